"""Fan-out: time of the slowest of N nodes for an object, and bytes that the store sends."""

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.fanout.lab import Report, Scenario, cpu_s_per_gb, measure
from bench.fanout.simulation import Simulation, World
from bench.fanout.starts import Starts, hdfs_store, s3_store, start_site
from bench.machine.tmpfs import tmpfs
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
from bootseer.fanout.trees import Trees

_COUNTS = (2, 4, 8, 16, 32, 64)
_FORETOLD = (16, 32, 64)
_FAULTY, _JOINED, _MANY = 32, 32, 10_000
_SEED = 1
_ONE, _CPU = "1 node", "4 nodes, CPU"
_FAULTS, _LATE, _HOSTILE, _RACKS = "32, 6 faulty", "32, late", "32, hostile", "16 in two racks"
_BLOCKED, _WITHOUT = "4 starts, ports blocked", "4 starts, without fan-out"
_STORES = {"HDFS": hdfs_store, "S3": s3_store}
_STARTS, _SEPARATE = 16, 4
_START_MBIT, _START_MB = 16.0, (16, 16, 32)
"""MiB of the image, the environment and the checkpoint that each node reads. 16 starts on two
cores use both nearly all the time at this rate; at 8 Mbit/s the queue of a line alone is longer
than the silence after which a node counts as lost."""
_QUICK_SHARE = 4.0
"""Lines are so much faster where each node reads all of the store by itself."""
_LARGE, _LARGE_FAULTS = "10,000 simulated", "10,000 simulated, 1 % faulty"
_MEMORY_BYTES = 2 << 30
_LAB_RATE = 2e6 * 1448 / 1514
"""Bytes per second of an object on a line of 16 Mbit/s, which carries headers of Ethernet, IP and
TCP as well: one node alone takes as long as measured."""
_LAB_CHUNK_CPU_S = 0.00074
"""CPU of a chunk of 64 KiB at a node: 11.2 s for each GB, measured with 16 nodes."""


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    with tmpfs(workspace.directory, _MEMORY_BYTES) as memory, contextlib.ExitStack() as stack:
        workspace.shared["memory"], workspace.shared["stack"] = memory, stack
        workspace.shared["notes"] = [
            "An object of 16 MiB in chunks of 64 KiB; nodes and the store are network namespaces "
            "on this machine, whose lines carry 16 Mbit/s each way. 6 faulty: after 2 s two die, "
            "one freezes and three drop to a tenth. Late: joined over 10 s, a quarter never. "
            "Hostile: the child of a root has the key, and sends wrong bytes, nothing and drips by "
            "turns. "
            "Times are those of the slowest sound node, from its own beginning",
            "CPU: an object of 256 MiB in chunks of 1 MiB, lines without limit; per node and GB, "
            "which it receives and sends on. Files are on the disk, as a node's cache is: a tmpfs "
            "of pages of 4 KiB takes more CPU for a write",
            "Starts: whole replayed starts on nodes that have nothing, image, environment and "
            "checkpoint of 16, 16 and 32 MiB, all read; lines of 16 Mbit/s, for ports blocked and "
            "without fan-out 64 Mbit/s. All nodes share the cores of this machine, on which a "
            "start takes seconds",
        ]
        yield


def _scenario(workspace: Workspace, scenario: Scenario, *, is_on_disk: bool = False) -> Sample:
    where = workspace.directory if is_on_disk else workspace.shared["memory"]
    with tempfile.TemporaryDirectory(dir=where) as folder:
        report = measure(scenario, Path(folder))
    for line in report.fed:
        if not line.endswith("; "):
            workspace.say(line)
    if report.unfinished or report.wrong:
        raise RuntimeError(
            f"{report.unfinished} nodes not finished, {report.wrong} with wrong bytes"
        )
    return _sample(scenario, report)


def _sample(scenario: Scenario, report: Report) -> Sample:
    return Sample(
        max(report.took_s.values()),
        moved_bytes=scenario.size * len(report.took_s),
        figures={
            "copies": report.copies,
            "uplink_copies": report.uplink_copies,
            "first_s": max(report.first_s.values()),
            "cpu_s_per_gb": cpu_s_per_gb(report, scenario.size),
            "one": 1.0,
        },
    )


def _real(
    name: str, description: str, scenario: Callable[[], Scenario], *, is_on_disk: bool = False
) -> Variant:
    def take(workspace: Workspace) -> Sample:
        made = scenario()
        if workspace.is_smoke:
            made = replace(made, size=1 << 20, fault_s=0.1, joined_s={})
        return _scenario(workspace, made, is_on_disk=is_on_disk)

    return variant(name, description, take)


def _with_faults() -> Scenario:
    hit = random.Random(_SEED).sample(range(_FAULTY), 6)
    return Scenario(_FAULTY, lost=hit[:2], frozen=hit[2:3], slow=hit[3:])


def _late(count: int) -> tuple[tuple[int, ...], dict[int, float]]:
    """Return who never comes, and when the others do."""
    dice = random.Random(_SEED)
    absent = tuple(sorted(dice.sample(range(count), count // 4)))
    return absent, {n: 10 * dice.random() for n in range(count) if n not in absent}


def _joined() -> Scenario:
    absent, joined_s = _late(_JOINED)
    return Scenario(_JOINED, absent=absent, joined_s=joined_s)


def _hostile() -> Scenario:
    trees = Trees(_FAULTY)
    return Scenario(_FAULTY, hostile=[trees.children(0, trees.root(0))[0]])


# Whole starts


def _starts(workspace: Workspace, kind: str) -> tuple[Starts, str, Mapping[str, str]]:
    """Return the nodes, and the store of this kind, in which a start is recorded."""
    shared, stack = workspace.shared, workspace.shared["stack"]
    if "starts" not in shared:
        folder = workspace.directory / "starts"
        folder.mkdir(exist_ok=True)
        count = _SEPARATE if workspace.is_smoke else _STARTS
        megabytes = (1, 1, 1) if workspace.is_smoke else _START_MB
        shared["starts"] = stack.enter_context(start_site(folder, count, _START_MBIT, megabytes))
    if kind not in shared:
        folder = workspace.directory / kind
        folder.mkdir(exist_ok=True)
        url, variables = stack.enter_context(_STORES[kind](shared["starts"], folder))
        shared["starts"].record(url, variables)
        shared[kind] = url, variables
    return shared["starts"], *shared[kind]


def _start_name(kind: str, count: int) -> str:
    return f"start from {kind}, {count} {'node' if count == 1 else 'nodes'}"


def _started(kind: str, count: int) -> Variant:
    def take(workspace: Workspace) -> Sample:
        starts, url, variables = _starts(workspace, kind)
        return Sample(starts.take(url, variables, min(count, starts.count)))

    return variant(_start_name(kind, count), "image, environment, checkpoint", take)


def _by_themselves(name: str, description: str, *, is_blocked: bool) -> Variant:
    def take(workspace: Workspace) -> Sample:
        starts, url, variables = _starts(workspace, "HDFS")
        starts.site.set_share(_QUICK_SHARE)
        starts.site.separate(is_blocked)
        try:
            return Sample(starts.take(url, variables, _SEPARATE, fanout=is_blocked))
        finally:
            starts.site.separate(False)
            starts.site.set_share(1.0)

    return variant(name, description, take)


# Simulated


def _lab(count: int) -> World:
    """Return a start of nodes that share this machine's two cores."""
    return World(count, rate=_LAB_RATE, chunk_cpu_s=_LAB_CHUNK_CPU_S)


def _six_of_32() -> World:
    made = _with_faults()
    return replace(
        _lab(_FAULTY),
        lost=tuple(made.lost),
        frozen=tuple(made.frozen),
        slow=tuple(made.slow),
        seed=_SEED,
    )


def _late_of_32() -> World:
    absent, joined_s = _late(_JOINED)
    return replace(_lab(_JOINED), absent=absent, joined_s=joined_s, seed=_SEED)


def _large(faults: bool) -> World:
    """Return a start of 10,000 nodes: 1 GiB over lines of 1 Gbit/s."""
    dice = random.Random(_SEED)
    hit = dice.sample(range(_MANY), _MANY // 100) if faults else []
    third = len(hit) // 3
    return World(
        _MANY,
        chunks=256,
        chunk_bytes=4 << 20,
        rate=125e6,
        hop_s=0.001,
        lost=tuple(hit[:third]),
        frozen=tuple(hit[third : third + third // 2]),
        slow=tuple(hit[third + third // 2 :]),
        joined_s={n: dice.random() for n in range(_MANY)} if faults else {},
        seed=_SEED,
    )


def _simulated(name: str, description: str, world: Callable[[], World]) -> Variant:
    def take(workspace: Workspace) -> Sample:
        made = world()
        if workspace.is_smoke and made.nodes > _FAULTY:
            made = World(_FAULTY)
        began_s = time.process_time()
        outcome = Simulation(made).run()
        return Sample(
            max(outcome.took_s.values()),
            cpu_s={"simulation": time.process_time() - began_s},
            figures={
                "copies": outcome.copies,
                "first_s": max(outcome.first_s.values()),
                "times_alone": outcome.ratio,
                "one": 1.0,
            },
        )

    return variant(name, description, take)


def _times(name: str, limit: float) -> Ratio:
    return ratio_of(f"{name} / {_ONE}", (name, "wall_s"), (_ONE, "wall_s"), at_most(limit))


def _at_most(name: str, figure: str, what: str, limit: float) -> Ratio:
    return ratio_of(f"{name}, {what}", (name, figure), (name, "one"), at_most(limit))


def _foretold(name: str, measured: str) -> Iterator[Ratio]:
    for target in (at_most(1.1), at_least(0.9)):
        yield ratio_of(f"{name} / measured", (name, "wall_s"), (measured, "wall_s"), target)


def _named(count: int) -> str:
    return f"{count} nodes"


CASE = Case(
    name="fanout",
    description="An object for all nodes of a job: the slowest node, and what the store sends.",
    prepare=_prepare,
    variants=(
        _real(_ONE, "reads the store by itself", lambda: Scenario(1)),
        *(_real(_named(count), "all begin at once", partial(Scenario, count)) for count in _COUNTS),
        _real(_FAULTS, "2 die, 1 freezes, 3 at a tenth", _with_faults),
        _real(_LATE, "joined over 10 s, a quarter never", _joined),
        _real(_HOSTILE, "one member lies", _hostile),
        _real(_RACKS, "an uplink of 16 Mbit/s each", lambda: Scenario(16, racks=2)),
        _real(
            _CPU,
            "fast lines",
            lambda: Scenario(4, 256 << 20, chunk_bytes=1 << 20, mbit=None),
            is_on_disk=True,
        ),
        *(_started(kind, count) for kind in _STORES for count in (1, _STARTS)),
        _by_themselves(_WITHOUT, "each node reads the store", is_blocked=False),
        _by_themselves(_BLOCKED, "no node reaches another one", is_blocked=True),
        *(
            _simulated(f"{count} simulated", "the same plan", partial(_lab, count))
            for count in _FORETOLD
        ),
        _simulated(f"{_FAULTS}, simulated", "the same plan", _six_of_32),
        _simulated(f"{_LATE}, simulated", "the same plan", _late_of_32),
        _simulated(_LARGE, "1 GiB at 1 Gbit/s", lambda: _large(False)),
        _simulated(
            _LARGE_FAULTS, "1 % lost, frozen or slow; begun within 1 s", lambda: _large(True)
        ),
    ),
    ratios=(
        *(_times(_named(count), 1.2) for count in _COUNTS),
        *(_at_most(_named(count), "copies", "copies from the store", 1.2) for count in _COUNTS),
        _at_most(_named(64), "first_s", "seconds until the first chunk", 1.0),
        _times(_FAULTS, 1.6),
        _times(_LATE, 1.5),
        _times(_HOSTILE, 1.3),
        _at_most(_RACKS, "uplink_copies", "copies by an uplink", 2.0),
        _at_most(_CPU, "cpu_s_per_gb", "CPU s/GB", 1.0),
        *(
            ratio_of(
                f"start from {kind}, {_STARTS} nodes / 1",
                (_start_name(kind, _STARTS), "wall_s"),
                (_start_name(kind, 1), "wall_s"),
                at_most(1.25),
            )
            for kind in _STORES
        ),
        ratio_of(
            f"{_BLOCKED} / without", (_BLOCKED, "wall_s"), (_WITHOUT, "wall_s"), at_most(1.03)
        ),
        *(one for count in _FORETOLD for one in _foretold(f"{count} simulated", _named(count))),
        _at_most(_LARGE, "times_alone", "times one node", 1.3),
        _at_most(_LARGE_FAULTS, "times_alone", "times one node", 1.3),
    ),
    columns=(
        Column("slowest s", "wall_s"),
        Column("copies", "copies"),
        Column("copies by an uplink", "uplink_copies"),
        Column("first chunk s", "first_s"),
        Column("CPU s/GB", "cpu_s_per_gb"),
        Column("times one node", "times_alone"),
    ),
    runs=1,
    quick_runs=1,
    warmups=0,
    audience="reader",
)
