"""How long does the report of a start of 10,000 nodes take, with its page?

A run takes five minutes on two quiet processors, most of it for writing the start: 4.4 GB.
"""

import contextlib
import functools
import itertools
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.model import (
    Case,
    Column,
    Ratio,
    Sample,
    TakeSample,
    Variant,
    Workspace,
    at_most,
    ratio_of,
    variant,
)
from bootseer.profile.publish.outgoing import encode, outgoing
from bootseer.report.read import in_order
from bootseer.report.sources import pack
from bootseer.store import open_store
from bootseer.timeline.stored import key_of
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.processes import python_command, tree_cpu_s, tree_peak_bytes
from testbed.starts.generate import hard
from testbed.starts.timelines import write_timelines

_NODES, _QUICK_NODES, _SMOKE_NODES = 10_000, 500, 110
# 400 stages a node, as of eight ranks with 40 slow imports each.
_FILLERS = 36
_FAULTY = 50
_FILES_A_PART = 50
_DEADLINE_S = 600.0
_BROWSER_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
_SMALL, _LARGE = "400,000 stages from a store", "4 million stages from a store"
_FOLDER, _DRAWN = "4 million stages from a folder", "the page drawn"


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    workspace.shared["notes"] = [
        "Generated starts as of `profile`, with 36 further imports for each of 8 ranks; the store "
        "is a folder of the same disk, and has the timelines as nodes publish them; all files are "
        "in the page cache",
    ]
    yield


def _large_nodes(workspace: Workspace) -> int:
    return workspace.sized(_NODES, _QUICK_NODES, _SMOKE_NODES)


def _small_nodes(workspace: Workspace) -> int:
    return workspace.sized(_NODES // 10, _QUICK_NODES // 10, _SMOKE_NODES // 10)


def _written(workspace: Workspace, node_count: int) -> Path:
    """Return the folder of the timelines of a start, which is written at the first call."""
    timelines = workspace.directory / f"timelines-{node_count}"
    if not timelines.exists():
        workspace.say(f"writing the timelines of {node_count} nodes")
        fillers = _FILLERS if not workspace.is_smoke else 1
        recipe = replace(hard(node_count, min(_FAULTY, node_count), 9), filler_count=fillers)
        write_timelines(timelines, recipe, job="large", submission="s")
    return timelines


def _published(workspace: Workspace, node_count: int) -> str:
    """Put the timelines of a start into a store, as their nodes do; return its URL."""
    paths = sorted(_written(workspace, node_count).rglob("*.jsonl"))
    store = (workspace.directory / f"store-{node_count}").as_uri()
    workspace.say(f"publishing the timelines of {node_count} nodes")
    parts = [paths[at : at + _FILES_A_PART] for at in range(0, len(paths), _FILES_A_PART)]
    for _ in in_order(functools.partial(_publish, store), parts):
        pass
    return store


def _publish(store: str, paths: Sequence[Path]) -> None:
    with open_store(store) as opened:
        for path in paths:
            key = key_of("large", "s", 0, path.stem)
            opened.publish(key, pack(encode(outgoing([path]))), replace=True)


def _from_store(name: str, description: str, nodes_of: Callable[[Workspace], int]) -> Variant:
    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        store = _published(workspace, nodes_of(workspace))
        nothing = workspace.directory / "none"
        yield _taking(workspace, "--timeline-dir", str(nothing), "--store", store)

    return Variant(name, description, session)


@contextlib.contextmanager
def _from_folder(workspace: Workspace) -> Iterator[TakeSample]:
    timelines = _written(workspace, _large_nodes(workspace))
    yield _taking(workspace, "--timeline-dir", str(timelines))


def _taking(workspace: Workspace, *source: str) -> TakeSample:
    page = workspace.directory / "start.html"

    def take() -> Sample:
        wall_s, cpu_s, peak_bytes = _report(page, *source)
        return Sample(
            wall_s,
            cpu_s={"report": cpu_s},
            figures={
                "peak_bytes": float(peak_bytes),
                "page_bytes": float(page.stat().st_size),
                "allowed_s": 30.0,
                "allowed_bytes": 2.0 * 2**30,
                "allowed_page_bytes": 1e7,
            },
        )

    return take


def _report(page: Path, *source: str) -> tuple[float, float, int]:
    """Return seconds, CPU seconds, and the sum of the processes' peak memory in bytes."""
    command = python_command("-m", "bootseer", *source, "report", "large")
    began, peak_bytes, cpu_s = time.monotonic(), 0, 0.0
    process = subprocess.Popen(
        [*command, "--html", str(page)], cwd=REPOSITORY, stdout=subprocess.DEVNULL
    )
    deadline = threading.Timer(_DEADLINE_S, process.kill)
    deadline.start()
    try:
        while process.poll() is None:
            peak_bytes = max(peak_bytes, tree_peak_bytes(process.pid))
            cpu_s = max(cpu_s, tree_cpu_s(process.pid))
            # A look at all processes takes 10 ms, of which the report would have a part.
            time.sleep(0.5)
    finally:
        deadline.cancel()
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"bootseer report ended with {process.returncode}")
    return time.monotonic() - began, cpu_s, peak_bytes


def _draw(workspace: Workspace) -> Sample:
    """Let Chromium draw the page that was written last; the time is that of its heat map."""
    page = workspace.directory / "start.html"
    browser = shutil.which("chromium")
    if browser is None:
        raise MissingError("chromium is not installed (apt install chromium)")
    if not page.exists():
        raise MissingError("it draws the page of another variant")
    profile = workspace.directory / "browser"
    command = [browser, *_BROWSER_FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-heat-ms="([0-9.]+)"', shown)
    if found is None:
        raise RuntimeError("the page was not drawn")
    return Sample(float(found[1]) / 1000, figures={"allowed_s": 2.0})


def _at_most(name: str, what: str, figure: str, allowed: str) -> Ratio:
    return ratio_of(f"{name}, {what}", (name, figure), (name, allowed), at_most(1))


CASE = Case(
    name="report",
    description="`bootseer report --html` of generated starts of 1,000 and 10,000 nodes.",
    prepare=_prepare,
    variants=(
        _from_store(_SMALL, "1,000 nodes of 8 ranks with 50 stages each", _small_nodes),
        _from_store(_LARGE, "10,000 such nodes", _large_nodes),
        Variant(_FOLDER, "the same start from a folder of timelines", _from_folder),
        variant(_DRAWN, "the heat map of 10,000 nodes, in Chromium", _draw),
    ),
    ratios=(
        *itertools.chain.from_iterable(
            (
                _at_most(name, "time / 30 s", "wall_s", "allowed_s"),
                _at_most(name, "memory / 2 GiB", "peak_bytes", "allowed_bytes"),
                _at_most(name, "page / 10 MB", "page_bytes", "allowed_page_bytes"),
            )
            for name in (_LARGE, _FOLDER)
        ),
        _at_most(_DRAWN, "time / 2 s", "wall_s", "allowed_s"),
    ),
    columns=(
        Column("s", "wall_s"),
        Column("CPU s", "cpu_s", digits=1),
        Column("peak MiB", "peak_bytes", scale=1 / 2**20, digits=0),
        Column("page MB", "page_bytes", scale=1e-6, digits=2),
    ),
    runs=1,
    quick_runs=1,
    warmups=0,
    audience="reader",
)
