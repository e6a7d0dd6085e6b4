"""Samples of one client of a rate-limited HDFS, with the bytes that each DataNode moved.

Owns the start of clients: each client is a new process, and each mount a new one, so that nothing
is cached.
"""

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.checkpoint.cluster import CappedHdfs
from bench.checkpoint.placement import placement_figures
from bench.model import Sample, Workspace
from testbed.processes import FuseProcess, mounted, python_command, run_json, tree_cpu_s

DEADLINE_S = 180.0
_numbers = itertools.count()


def run_client(
    action: str,
    arguments: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    timeout_s: float = DEADLINE_S,
) -> Mapping[str, float]:
    """Run an action of `client` and return its figures. Raises: RuntimeError."""
    command = python_command("-m", "bench.checkpoint.client", action, json.dumps(arguments))
    outcome: Mapping[str, float] = run_json(command, timeout_s=timeout_s, env=env)
    return outcome


def run_timed(command: list[str], env: Mapping[str, str] | None = None) -> Mapping[str, float]:
    """Run a command and return its figures. Raises: RuntimeError."""
    timed = python_command("-m", "bench.containers.timed", *command)
    outcome: Mapping[str, float] = run_json(timed, timeout_s=DEADLINE_S, env=env)
    return outcome


@contextlib.contextmanager
def our_mount(workspace: Workspace, url: str, *flags: str) -> Iterator[FuseProcess]:
    """Mount `url` by `bootseer checkpoint mount` until the block ends. Raises: MissingError."""
    mountpoint = workspace.directory / f"mount-{next(_numbers)}"
    run_dir = workspace.directory / f"run-{mountpoint.name}"
    command = python_command("-m", "bootseer", "--run-dir", str(run_dir), "checkpoint", "mount")
    with mounted(
        [*command, "--foreground", *flags, url, str(mountpoint)], mountpoint, log_of(mountpoint)
    ) as server:
        yield server
    shutil.rmtree(run_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        mountpoint.rmdir()


def fresh_mountpoint(workspace: Workspace) -> Path:
    """Return a path on which nothing was mounted before."""
    return workspace.directory / f"mount-{next(_numbers)}"


def log_of(mountpoint: Path) -> Path:
    """Return the path of the log of the server of a mount point."""
    return mountpoint.with_name(f"{mountpoint.name}.log")


def sample(
    cluster: CappedHdfs, work: Callable[[], Mapping[str, float]], server: FuseProcess | None = None
) -> Sample:
    """Return a sample of `work`, which returns a client's figures; CPU time of `server` apart."""
    server_before_s = tree_cpu_s(server.pid) if server else 0.0
    before = cluster.moved()
    outcome = work()
    moved = cluster.moved() - before
    cpu_s = {"client": outcome["cpu_s"]}
    if server is not None:
        cpu_s["server"] = tree_cpu_s(server.pid) - server_before_s
    return Sample(
        outcome["wall_s"],
        cpu_s,
        moved_bytes=int(outcome["moved_bytes"]),
        figures=placement_figures(moved, cluster.rates),
    )


def derive(each: Sample) -> Mapping[str, float]:
    """Return the rate, the share of the DataNodes' limit, and CPU seconds per GiB."""
    moved_bytes = each.moved_bytes or 0
    derived = {"mb_per_s": moved_bytes / 1e6 / each.wall_s}
    for name in ("allowed", "even"):
        if each.figures.get(f"{name}_s"):
            derived[f"{name}_share"] = each.figures[f"{name}_s"] / each.wall_s
    if moved_bytes:
        derived["cpu_s_per_gib"] = sum(each.cpu_s.values()) / (moved_bytes / 2**30)
    return derived
