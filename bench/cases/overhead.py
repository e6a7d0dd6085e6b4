"""Cost of Bootseer for a start that it cannot speed up."""

import contextlib
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import Enum

from bench.model import Case, Column, Ratio, Sample, Variant, Workspace, at_most, ratio, variant
from testbed.node import Node

_DEADLINE_S = 300.0
_BEHIND_S = 20.0
_FILE_COUNT = 200
# Writes files into a folder, as `pip install` does.
_SET_UP = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for number in range(int(sys.argv[2])):
    (folder / f"module_{number}.py").write_text(f"value = {number}\\n" * 100)
"""
# Uses CPU time like the rest of a start, then prints the size of the set-up's files.
_START = """
import pathlib, sys, time
ends_s = time.process_time() + float(sys.argv[2])
while time.process_time() < ends_s:
    pass
print(sum(file.stat().st_size for file in pathlib.Path(sys.argv[1]).iterdir()))
"""
_EXPECTED_BYTES = sum(100 * len(f"value = {number}\n") for number in range(_FILE_COUNT))
_TEST_SETTINGS = ("BOOTSEER_DEADLINE", "BOOTSEER_MEMORY", "BOOTSEER_PUBLISH_TIMELINES")
_PLAIN = "plain"


class _StartKind(Enum):
    """Ways of making a start."""

    PLAIN = "without Bootseer"
    WRAPPED = "by a bare `bootseer run`"
    SET_UP = "by `bootseer run --setup`"


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    workspace.shared["notes"] = [
        f"A set-up that writes {_FILE_COUNT} files, and a program that computes for "
        f"{_start_s(workspace):g} s of CPU: the shorter a start, the more weighs what is lost. "
        "Each start is on a node with empty folders, and what goes on behind it has ended before "
        "the next; the other settings are the defaults",
    ]
    yield


def _start_s(workspace: Workspace) -> float:
    return workspace.sized(100, 40, 1) / 10


def _command(workspace: Workspace, node: Node, way: _StartKind) -> list[str]:
    target = str(node.base / "environment")
    script = workspace.directory / "set-up.sh"
    set_up = [sys.executable, "-S", "-c", _SET_UP, target, str(_FILE_COUNT)]
    script.write_text(f"exec {shlex.join(set_up)}\n")
    start = [sys.executable, "-c", _START, target, str(_start_s(workspace))]
    plain = ["sh", "-c", f'sh {script} && exec "$@"', "sh", *start]
    run = [sys.executable, "-m", "bootseer", "run"]
    if way is _StartKind.PLAIN:
        return plain
    if way is _StartKind.WRAPPED:
        return [*run, "--", *plain]
    return [*run, "--setup", f"sh {script}", "--target", target, "--", *start]


def _take(workspace: Workspace, way: _StartKind, store: str) -> Sample:
    node = Node(workspace.directory / "node", store)
    # With the default deadline, memory and timelines, as users have them.
    environ = {name: v for name, v in node.environment.items() if name not in _TEST_SETTINGS}
    try:
        command = _command(workspace, node, way)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
        wall_s = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode or done.stdout.strip() != str(_EXPECTED_BYTES):
            raise RuntimeError(f"the start ended with {done.returncode}: {done.stderr[-1000:]}")
        # The publishing process must not run beside the next start. Without a store it is ended
        # here.
        while node.processes() and time.monotonic() - began < wall_s + _BEHIND_S:
            time.sleep(0.1)
    finally:
        node.sweep()
        shutil.rmtree(node.base, ignore_errors=True)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Sample(wall_s, cpu_s={"start": cpu_s})


@contextlib.contextmanager
def _new_store(workspace: Workspace) -> Iterator[str]:
    folder = workspace.directory / "store"
    try:
        yield folder.as_uri()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _refusing_store(workspace: Workspace) -> Iterator[str]:
    with socket.socket() as unheard:
        # Bound, so that no other process gets the port, but not listening.
        unheard.bind(("127.0.0.1", 0))
        yield f"hdfs://127.0.0.1:{unheard.getsockname()[1]}/bootseer"


@contextlib.contextmanager
def _silent_store(workspace: Workspace) -> Iterator[str]:
    # The kernel accepts connections, and no process answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"hdfs://127.0.0.1:{silent.getsockname()[1]}/bootseer"


def _started(
    name: str,
    description: str,
    way: _StartKind,
    store: Callable[[Workspace], AbstractContextManager[str]] = _new_store,
) -> Variant:
    def take(workspace: Workspace) -> Sample:
        with store(workspace) as url:
            return _take(workspace, way, url)

    return variant(name, description, take)


def _time(top: str) -> Ratio:
    return ratio(top, _PLAIN, "wall_s", "time", at_most(1.05))


CASE = Case(
    name="overhead",
    description="A start that Bootseer cannot help: nothing is recorded, or the store is away.",
    prepare=_prepare,
    variants=(
        _started(_PLAIN, "`sh -c 'SET-UP && exec PROGRAM'`", _StartKind.PLAIN),
        _started("wrapped", "`bootseer run` of the same; an empty store", _StartKind.WRAPPED),
        _started("first start", "`run --setup`; an empty store, which gets it", _StartKind.SET_UP),
        _started("store refuses", "an HDFS that nobody serves", _StartKind.SET_UP, _refusing_store),
        _started(
            "store silent",
            "an HDFS that takes connections and never answers",
            _StartKind.SET_UP,
            _silent_store,
        ),
    ),
    ratios=(
        _time("wrapped"),
        _time("first start"),
        _time("store refuses"),
        _time("store silent"),
        # On a machine that does other work, CPU time says more than elapsed time.
        ratio("wrapped", _PLAIN, "cpu_s", "CPU"),
        ratio("first start", _PLAIN, "cpu_s", "CPU"),
    ),
    columns=(Column("s", "wall_s"), Column("CPU s", "cpu_s")),
    runs=5,
    quick_runs=1,
    warmups=0,
    audience="reader",
)
