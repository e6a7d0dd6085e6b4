"""Measures ways of restoring on cold nodes, until the import has finished."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from bench.containers.node import EmptyNode
from bench.env.site import RATE_MBIT, EnvironmentSite
from bench.env.ways import DEADLINE_S, IMPORT, RestoreMethod
from bench.machine.page_cache import evict_everything
from bench.model import Sample

_TICKS_PER_S = 100


def take(site: EnvironmentSite, way: RestoreMethod) -> Sample:
    """Measure the restore and then the import on one node.

    Bytes are all that crossed the loopback by then; CPU is the node's. Raises: RuntimeError.
    """
    site.line.set_rate(None)
    with site.node(way.name.replace(" ", "-"), way.tree(site)) as node:
        way.start(site, node)
        command = way.restore(site, node)
        _make_cold(site)
        before_bytes, before_cpu_s = site.line.received_bytes(), node.cpu_s()
        restore_s = run_timed(node, command)
        restore_cpu_s = node.cpu_s() - before_cpu_s
        import_s = run_timed(node, IMPORT, "ok")
        cpu_s = node.cpu_s() - before_cpu_s
        moved_bytes = site.line.received_bytes() - before_bytes
        site.line.set_rate(None)
    figures = {
        "restore_s": restore_s,
        "restore_cpu_s": restore_cpu_s,
        "import_s": import_s,
        "files_per_s": site.tree.name_count / restore_s,
        "stored_bytes": float(site.stored_bytes),
        "wanted_ready_s": 0.3,
    }
    return Sample(restore_s + import_s, {"node": cpu_s}, moved_bytes, figures)


def take_many(
    site: EnvironmentSite, commands_of: Callable[[EmptyNode], Sequence[Sequence[str]]], count: int
) -> Sample:
    """Run commands, one after the other, on `count` nodes at once until the last node is through.

    CPU is the whole machine's, the store's included. Raises: RuntimeError.
    """
    site.line.set_rate(None)
    with ExitStack() as stack:
        nodes = [stack.enter_context(site.node(f"many-{i}")) for i in range(count)]
        plans = [commands_of(node) for node in nodes]
        pool = stack.enter_context(ThreadPoolExecutor(count))
        _make_cold(site)
        before_bytes, before_cpu_s = site.line.received_bytes(), _machine_cpu_s()
        started_s = time.monotonic()

        def one(node: EmptyNode, commands: Sequence[Sequence[str]]) -> float:
            for command in commands:
                node.run(command, timeout_s=DEADLINE_S)
            return time.monotonic() - started_s

        ended_s = sorted(pool.map(one, nodes, plans))
        cpu_s = _machine_cpu_s() - before_cpu_s
        moved_bytes = site.line.received_bytes() - before_bytes
        site.line.set_rate(None)
    return Sample(ended_s[-1], {"machine": cpu_s}, moved_bytes, {"first_s": ended_s[0]})


def run_timed(node: EmptyNode, command: Sequence[str], output: str = "") -> float:
    """Run a command and return its seconds.

    Raises: RuntimeError if `output` is given and the command prints something else.
    """
    started_s = time.monotonic()
    printed = node.run(command, timeout_s=DEADLINE_S)
    wall_s = time.monotonic() - started_s
    if output and printed.strip() != output:
        raise RuntimeError(f"{command[0]} printed {printed[-200:]!r} instead of {output!r}")
    return wall_s


def _make_cold(site: EnvironmentSite) -> None:
    if evict_everything([]) != "drop_caches":
        raise RuntimeError("the page cache cannot be dropped, so no node is cold")
    site.line.set_rate(RATE_MBIT)


def _machine_cpu_s() -> float:
    # Fields user, nice and system, without idle, iowait and times that are counted twice
    # (proc_stat(5)).
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()
    return sum(int(field) for field in (*fields[1:4], *fields[6:8])) / _TICKS_PER_S
