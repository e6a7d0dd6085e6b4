"""`bootseer warm` on a file system where every request is a round trip."""

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.model import (
    Case,
    Column,
    Ratio,
    Sample,
    Session,
    TakeSample,
    Target,
    Variant,
    Workspace,
    at_least,
    ratio_of,
    variant,
)
from testbed.mounts.slow_fs import read_counters
from testbed.needs import MissingError
from testbed.processes import FuseProcess, mounted, python_command, tree_cpu_s

_LATENCY_S = 0.001
_DEADLINE_S = 300.0
_PACKAGES = ("numpy", "numpy.libs", "pyarrow", "pyarrow.libs")
_READAHEAD_BYTES = {"4k": 0, "128k": 128 * 1024}


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    tree = workspace.directory / "tree"
    for name in _PACKAGES[: workspace.sized(4, 4, 2)]:
        found = importlib.util.find_spec(name.removesuffix(".libs"))
        if found is None or found.origin is None:
            raise MissingError(f"{name} is not installed; pip install numpy pyarrow")
        source = Path(found.origin).parents[1] / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True)
    workspace.shared["tree"] = tree
    workspace.shared["notes"] = [
        f"`import numpy, pyarrow` from a file system with {_LATENCY_S * 1000:g} ms for each read, "
        "open and lookup (FUSE; a stand-in for Lustre or NFS), mounted anew, and so with nothing "
        "cached, for each run; moved bytes and reads are what it was asked for",
        "4k: it reads nothing ahead, so that each page fault is a request; 128k: it reads ahead as "
        "the kernel does by default",
        "CPU of the file system's server apart from that of the command and all of `bootseer warm`",
    ]
    yield


def _import(workspace: Workspace, directory: Path) -> list[str]:
    names = "numpy" if workspace.is_smoke else "numpy, pyarrow"
    script = f"import sys; sys.path.insert(0, {str(directory)!r}); import {names}"
    return python_command("-I", "-S", "-c", script)


def _environment(workspace: Workspace) -> dict[str, str]:
    # Without this, the first run would leave bytecode in the tree for the others.
    return {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "BOOTSEER_STORE": str(workspace.directory / "store"),
        "BOOTSEER_RUN_DIR": str(workspace.directory / "run"),
        "BOOTSEER_CACHE_DIR": str(workspace.directory / "cache"),
    }


def _run(workspace: Workspace, command: Sequence[str]) -> tuple[float, float]:
    """Run a command; return its seconds and its CPU seconds. Raises: RuntimeError."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started_ns = time.monotonic_ns()
    try:
        done = subprocess.run(
            command,
            env=_environment(workspace),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(str(error)) from None
    wall_s = (time.monotonic_ns() - started_ns) / 1e9
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or done.stderr:
        raise RuntimeError(f"the command ended with {done.returncode}: {done.stderr[-1000:]}")
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return wall_s, cpu_s


def _warmed(command: Sequence[str], directory: Path, name: str) -> list[str]:
    return python_command("-m", "bootseer", "warm", "--name", name, str(directory), "--", *command)


def _background(workspace: Workspace, action: str) -> float:
    """Wait for the background process and return its CPU seconds. Raises: RuntimeError."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline_s:
        for path in (workspace.directory / "cache" / "warm").glob("*.json"):
            state = json.loads(path.read_text())
            if state["action"] == action:
                path.unlink()
                return float(state.get("cpu_s", 0.0))
        time.sleep(0.02)
    raise RuntimeError("the process in the background does not end")


@contextlib.contextmanager
def _slow(workspace: Workspace, readahead: str) -> Iterator[tuple[FuseProcess, Path]]:
    """Yield a new mount of the tree, and the path of its counters."""
    mountpoint = workspace.directory / f"slow-{readahead}"
    counters = workspace.directory / "counters"
    command = python_command(
        "-m",
        "testbed.mounts.slow_fs",
        str(workspace.shared["tree"]),
        str(mountpoint),
        str(0.0 if workspace.is_smoke else _LATENCY_S),
        str(_READAHEAD_BYTES[readahead]),
        str(counters),
    )
    with mounted(command, mountpoint, workspace.directory / "slow.log") as server:
        yield server, counters


def _session(readahead: str, *, is_warmed: bool) -> Session:
    name = f"slow-{readahead}"

    def take(workspace: Workspace) -> Sample:
        with _slow(workspace, readahead) as (server, counters):
            command = _import(workspace, server.mountpoint)
            if is_warmed:
                command = _warmed(command, server.mountpoint, name)
            wall_s, command_cpu_s = _run(workspace, command)
            if is_warmed:
                command_cpu_s += _background(workspace, "read")
            server_cpu_s = tree_cpu_s(server.pid)
            asked = read_counters(counters)
        return Sample(
            wall_s,
            cpu_s={"command": command_cpu_s, "server": server_cpu_s},
            moved_bytes=asked.read_bytes,
            figures={"read_count": asked.read_count},
        )

    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        if is_warmed:
            with _slow(workspace, readahead) as (server, _):
                _run(
                    workspace,
                    _warmed(_import(workspace, server.mountpoint), server.mountpoint, name),
                )
                _background(workspace, "recorded")
        yield lambda: take(workspace)

    return session


def _local(workspace: Workspace) -> Sample:
    wall_s, cpu_s = _run(workspace, _import(workspace, workspace.shared["tree"]))
    return Sample(wall_s, cpu_s={"command": cpu_s}, moved_bytes=0)


def _ratios(readahead: str, target: Target | None) -> tuple[Ratio, ...]:
    cold, warm = f"cold_{readahead}", f"warm_{readahead}"
    return (
        ratio_of(f"{cold} / {warm}, time", (cold, "wall_s"), (warm, "wall_s"), target),
        ratio_of(f"{cold} / {warm}, reads", (cold, "read_count"), (warm, "read_count")),
        ratio_of(f"{warm} / {cold}, bytes", (warm, "moved_bytes"), (cold, "moved_bytes")),
        ratio_of(
            f"{warm} / {cold}, CPU without the server",
            (warm, "command_cpu_s"),
            (cold, "command_cpu_s"),
        ),
    )


CASE = Case(
    name="warm",
    description="A start from a file system behind latency: page faults against `bootseer warm`.",
    prepare=_prepare,
    variants=(
        variant("local", "the same tree, local and cached", _local),
        Variant("cold_4k", "faults of 4 KiB", _session("4k", is_warmed=False)),
        Variant("warm_4k", "`bootseer warm`, the same mount", _session("4k", is_warmed=True)),
        Variant("cold_128k", "the kernel's read-ahead", _session("128k", is_warmed=False)),
        Variant("warm_128k", "`bootseer warm`, the same mount", _session("128k", is_warmed=True)),
    ),
    ratios=(
        *_ratios("4k", at_least(2)),
        *_ratios("128k", None),
        ratio_of("warm_4k / local, time", ("warm_4k", "wall_s"), ("local", "wall_s")),
    ),
    columns=(
        Column("s", "wall_s"),
        Column("reads", "read_count", digits=0),
        Column("MB moved", "moved_bytes", scale=1e-6, digits=1),
        Column("command CPU s", "command_cpu_s"),
        Column("server CPU s", "server_cpu_s"),
    ),
    runs=5,
    quick_runs=2,
    audience="reader",
)
