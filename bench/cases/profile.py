"""Is the right node blamed for a slow start of 10,000, and how long does it take to say so?"""

import contextlib
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
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
    at_least,
    at_most,
    ratio_of,
    variant,
)
from bench.profile.score import Score, score
from bootseer.profile.publish.outgoing import encode, outgoing
from bootseer.report.sources import pack
from bootseer.store import open_store
from bootseer.timeline.stored import key_of
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.processes import python_command, tree_cpu_s, tree_peak_bytes
from testbed.starts.generate import hard
from testbed.starts.timelines import write_timelines

_NODES, _QUICK_NODES, _SMOKE_NODES = 10_000, 500, 110
_FAULTY_COUNTS = (1, 3, 10, 30, 100)
_SEEDS = (11, 12, 13)
_FILLERS = 36
_DEADLINE_S = 600.0
_BROWSER_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
_ALL, _SMALL = "1 to 100 faulty", "3 to 8 s lost"
_LARGE, _LARGE_STORED = "4 million stages", "4 million from a store"


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    workspace.shared["scores"] = {}
    workspace.shared["notes"] = [
        "Generated starts: 8 ranks a node, log-normal durations with heavy tails, one node in 20 "
        "without figures of the kernel, one in 50 with misleading ones, clocks that differ, one by "
        "an hour; severity 1.5 to 4, every sixth faulty node with two faults",
    ]
    yield


def _nodes(workspace: Workspace) -> int:
    return workspace.sized(_NODES, _QUICK_NODES, _SMOKE_NODES)


def _faulty(count: int) -> Variant:
    def take(workspace: Workspace) -> Sample:
        began = time.monotonic()
        total, small = Score(), Score()
        for seed in _SEEDS[: workspace.sized(3, 3, 1)]:
            of_all, of_small = score(hard(_nodes(workspace), count, seed))
            total, small = total + of_all, small + of_small
        workspace.shared["scores"][count] = total, small
        return Sample(time.monotonic() - began, figures={**total.figures(), "one": 1.0})

    return variant(f"{count} faulty", f"{len(_SEEDS)} starts of 10,000 nodes", take)


def _together(place: int) -> Callable[[Workspace], Sample]:
    def take(workspace: Workspace) -> Sample:
        total = Score()
        for scores in workspace.shared["scores"].values():
            total += scores[place]
        return Sample(0.0, figures={**total.figures(), "one": 1.0})

    return take


def _write_large(workspace: Workspace) -> Path:
    timelines = workspace.directory / "timelines"
    if not timelines.exists():
        fillers = workspace.sized(_FILLERS, _FILLERS, 1)
        recipe = replace(hard(_nodes(workspace), 50, 9), filler_count=fillers)
        write_timelines(timelines, recipe, job="large", submission="s")
    return timelines


def _publish(timelines: Path, store: str) -> None:
    """Put the timelines into a store, as their nodes do."""
    with open_store(store) as opened:
        for path in sorted(timelines.rglob("*.jsonl")):
            key = key_of("large", "s", 0, path.stem)
            opened.publish(key, pack(encode(outgoing([path]))), replace=True)


@contextlib.contextmanager
def _folder(workspace: Workspace) -> Iterator[TakeSample]:
    timelines = _write_large(workspace)
    yield _taking(workspace, "--timeline-dir", str(timelines))


@contextlib.contextmanager
def _store(workspace: Workspace) -> Iterator[TakeSample]:
    store = (workspace.directory / "store").as_uri()
    _publish(_write_large(workspace), store)
    nothing = workspace.directory / "none"
    yield _taking(workspace, "--timeline-dir", str(nothing), "--store", store)


def _taking(workspace: Workspace, *source: str) -> TakeSample:
    browser = shutil.which("chromium")
    if browser is None:
        raise MissingError("chromium is not installed (apt install chromium)")
    page = workspace.directory / "start.html"

    def take() -> Sample:
        wall_s, cpu_s, peak_bytes = _report(page, *source)
        return Sample(
            wall_s,
            cpu_s={"report": cpu_s},
            figures={
                "peak_bytes": float(peak_bytes),
                "page_bytes": float(page.stat().st_size),
                "heat_s": _heat_s(browser, page, workspace.directory / "browser"),
                "allowed_s": 30.0,
                "allowed_bytes": 2.0 * 2**30,
                "allowed_page_bytes": 1e7,
                "allowed_heat_s": 2.0,
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
            time.sleep(0.1)
    finally:
        deadline.cancel()
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"bootseer report ended with {process.returncode}")
    return time.monotonic() - began, cpu_s, peak_bytes


def _heat_s(browser: str, page: Path, profile: Path) -> float:
    """Return how long the page took to draw the heat map."""
    command = [browser, *_BROWSER_FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-heat-ms="([0-9.]+)"', shown)
    if found is None:
        raise RuntimeError("the page was not drawn")
    return float(found[1]) / 1000


def _at_most(name: str, what: str, figure: str, allowed: str) -> Ratio:
    return ratio_of(f"{name}, {what}", (name, figure), (name, allowed), at_most(1))


def _at_least(what: str, figure: str, limit: float) -> Ratio:
    top, bottom = (_ALL, figure), (_ALL, "one")
    return ratio_of(f"{_ALL}, {what}", top, bottom, at_least(limit))


CASE = Case(
    name="profile",
    description="Slow nodes and their causes in generated starts of 10,000 nodes; one of 4 million "
    "stages reported.",
    prepare=_prepare,
    variants=(
        *(_faulty(count) for count in _FAULTY_COUNTS),
        variant(_ALL, "all of these starts together", _together(0)),
        variant(_SMALL, "of these the nodes that lost 3 to 8 s", _together(1)),
        Variant(_LARGE_STORED, "10,000 nodes in a store, `bootseer report --html`", _store),
        Variant(_LARGE, "the same from a folder of timelines", _folder),
    ),
    ratios=(
        _at_least("F1 for nodes", "f1", 0.95),
        _at_least("F1, nodes that were slow once counted as wrong", "f1_strict", 0.95),
        _at_least("right cause of those named", "right_share", 0.9),
        _at_most(_LARGE_STORED, "time / 30 s", "wall_s", "allowed_s"),
        _at_most(_LARGE, "time / 30 s", "wall_s", "allowed_s"),
        _at_most(_LARGE_STORED, "memory / 2 GiB", "peak_bytes", "allowed_bytes"),
        _at_most(_LARGE, "page / 10 MB", "page_bytes", "allowed_page_bytes"),
        _at_most(_LARGE, "heat map drawn / 2 s", "heat_s", "allowed_heat_s"),
    ),
    columns=(
        Column("s", "wall_s", digits=1),
        Column("CPU s", "cpu_s", digits=1),
        Column("peak MiB", "peak_bytes", scale=1 / 2**20, digits=0),
        Column("F1", "f1", digits=3),
        Column("strict F1", "f1_strict", digits=3),
        Column("right cause", "right_share", digits=3),
        Column("named", "named_count", digits=0),
        Column("missed", "missed_count", digits=0),
        Column("false", "false_count", digits=0),
        Column("slow once", "once_count", digits=0),
        Column("page MB", "page_bytes", scale=1e-6, digits=2),
        Column("heat ms", "heat_s", scale=1000, digits=0),
    ),
    runs=1,
    quick_runs=1,
    warmups=0,
    audience="reader",
)
