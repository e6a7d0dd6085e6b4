"""How fast is an image indexed, and in how much memory?"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.containers.big_image import as_zstd, synthetic
from bench.machine.page_cache import evict_everything
from bench.model import (
    Bound,
    Case,
    Column,
    Figure,
    Ratio,
    Sample,
    TakeSample,
    Target,
    Variant,
    Workspace,
)
from testbed.images.layout import Layout
from testbed.images.torch_image import TAGS, torch_image
from testbed.processes import python_command, run_json

_DEADLINE_S = 1200.0
_GIB = 2**30
_LARGE_GIB = (1, 10, 30)
_WANTED_MB_PER_CORE_S = 100.0


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    source = Layout(torch_image(workspace.kept, workspace.say))
    layers = source.layers(TAGS[0])
    workspace.shared["gzip"] = source, sum(layer.tar_bytes for layer in layers)
    copy = as_zstd(source, layers, workspace.directory / "zstd-layout")
    workspace.shared["zstd"] = copy, sum(layer.tar_bytes for layer in layers)
    workspace.shared["notes"] = [
        "`image index` of an OCI layout into an empty store, both on disk; the page cache is "
        "dropped before. A core in use is a second of CPU time of all its threads",
        "Peak memory is the kernel's maximum of resident memory. The large images are one gzip "
        "layer of files of 1 MiB",
    ]
    yield


def _index(name: str) -> Callable[[Workspace], contextlib.AbstractContextManager[TakeSample]]:
    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        layout, tar_bytes = workspace.shared[name]
        yield lambda: _take(workspace, layout, tar_bytes)

    return session


def _index_large(gib: int) -> Callable[[Workspace], contextlib.AbstractContextManager[TakeSample]]:
    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        size_bytes = (1 if workspace.is_quick else gib) * _GIB

        def take() -> Sample:
            # Made for each run, since all of them at once would need too much room.
            folder = workspace.directory / f"large-{gib}"
            try:
                return _take(workspace, synthetic(folder, size_bytes), size_bytes)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        yield take

    return session


def _take(workspace: Workspace, layout: Layout, tar_bytes: int) -> Sample:
    place = workspace.directory / "index"
    settings = {
        "BOOTSEER_STORE": (place / "store").as_uri(),
        "BOOTSEER_CACHE_DIR": str(place / "cache"),
        "BOOTSEER_RUN_DIR": str(place / "run"),
        "BOOTSEER_TIMELINE_DIR": str(place / "timeline"),
    }
    index = ["-m", "bootseer", "image", "index", f"oci:{layout.folder}:v1"]
    command = python_command("-m", "bench.containers.timed", *python_command(*index))
    evict_everything([])
    try:
        cost = run_json(command, timeout_s=_DEADLINE_S, env=settings)
        stored_bytes = _size_bytes(place / "store")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    figures = {
        "tar_bytes": float(tar_bytes),
        "peak_bytes": cost["peak_bytes"],
        "allowed_peak_bytes": float(_GIB),
        "stored_bytes": stored_bytes,
        "wanted_mb_per_core_s": _WANTED_MB_PER_CORE_S,
    }
    return Sample(cost["wall_s"], {"index": cost["cpu_s"]}, figures=figures)


def _size_bytes(folder: Path) -> float:
    return float(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))


def _derive(sample: Sample) -> Mapping[str, float]:
    megabytes = sample.figures["tar_bytes"] / 1e6
    return {
        "mb_per_s": megabytes / sample.wall_s,
        "mb_per_core_s": megabytes / sample.cpu_s["index"],
    }


def _speed(name: str) -> Ratio:
    return Ratio(
        f"{name}, MB/s per core in use / {_WANTED_MB_PER_CORE_S:g}",
        Figure(name, "mb_per_core_s"),
        Figure(name, "wanted_mb_per_core_s"),
        Target(Bound.AT_LEAST, 1),
    )


CASE = Case(
    name="image-index",
    description="An image is indexed: speed by compression, memory by size.",
    prepare=_prepare,
    variants=(
        Variant("gzip", "the torch image as Docker pushes it", _index("gzip")),
        Variant("zstd", "the same with zstd layers", _index("zstd")),
        *(
            Variant(f"{gib} GiB", f"one layer of {gib} GiB, gzip", _index_large(gib))
            for gib in _LARGE_GIB
        ),
    ),
    ratios=(
        _speed("gzip"),
        _speed("zstd"),
        Ratio(
            "30 GiB, peak memory / 1 GiB",
            Figure("30 GiB", "peak_bytes"),
            Figure("30 GiB", "allowed_peak_bytes"),
            Target(Bound.AT_MOST, 1),
        ),
        Ratio(
            "30 GiB / 10 GiB, peak memory",
            Figure("30 GiB", "peak_bytes"),
            Figure("10 GiB", "peak_bytes"),
        ),
    ),
    columns=(
        Column("index s", "wall_s", digits=1),
        Column("MB/s", "mb_per_s", digits=0),
        Column("MB/s per core in use", "mb_per_core_s", digits=0),
        Column("peak memory MiB", "peak_bytes", scale=2**-20, digits=0),
        Column("in the store MB", "stored_bytes", scale=1e-6, digits=0),
    ),
    derive=_derive,
    runs=3,
    quick_runs=1,
    warmups=0,
)
