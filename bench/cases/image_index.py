"""Indexing an image: speed and memory."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.containers.big_image import as_zstd, synthetic
from bench.machine.page_cache import evict_everything
from bench.model import (
    Case,
    Column,
    Ratio,
    Sample,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio_of,
    variant,
)
from testbed.images.layout import OciLayout
from testbed.images.torch_image import TAGS, torch_image
from testbed.processes import python_command, run_json

_DEADLINE_S = 1200.0
_GIB = 2**30
_LARGE_GIB = (1, 10, 30)
_WANTED_MB_PER_CORE_S = 100.0


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    source = OciLayout(torch_image(workspace.kept, workspace.say))
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


def _index(name: str, description: str) -> Variant:
    return variant(name, description, lambda space: _take(space, *space.shared[name]))


def _index_large(gib: int) -> Variant:
    def take(workspace: Workspace) -> Sample:
        size_bytes = workspace.sized(gib * _GIB, _GIB, _GIB // 64)
        # Made for each run, since all of them together need too much space.
        folder = workspace.directory / f"large-{gib}"
        try:
            return _take(workspace, synthetic(folder, size_bytes), size_bytes)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return variant(f"{gib} GiB", f"one layer of {gib} GiB, gzip", take)


def _take(workspace: Workspace, layout: OciLayout, tar_bytes: int) -> Sample:
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
    return ratio_of(
        f"{name}, MB/s per core in use / {_WANTED_MB_PER_CORE_S:g}",
        (name, "mb_per_core_s"),
        (name, "wanted_mb_per_core_s"),
        at_least(1),
    )


CASE = Case(
    name="image-index",
    description="An image is indexed: speed by compression, memory by size.",
    prepare=_prepare,
    variants=(
        _index("gzip", "the torch image as Docker pushes it"),
        _index("zstd", "the same with zstd layers"),
        *(_index_large(gib) for gib in _LARGE_GIB),
    ),
    ratios=(
        _speed("gzip"),
        _speed("zstd"),
        ratio_of(
            "30 GiB, peak memory / 1 GiB",
            ("30 GiB", "peak_bytes"),
            ("30 GiB", "allowed_peak_bytes"),
            at_most(1),
        ),
        ratio_of(
            "30 GiB / 10 GiB, peak memory",
            ("30 GiB", "peak_bytes"),
            ("10 GiB", "peak_bytes"),
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
