"""Does `bootseer report` tell the truth about real torchrun jobs with known faults?"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.model import (
    Case,
    Column,
    Sample,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio_of,
    variant,
)
from bootseer.report.explain import Analysis, Delay, StartModel
from bootseer.report.graph import begin_of, end_of
from bootseer.report.read import read_graph
from bootseer.report.sources import TimelineFolder, find_start
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.processes import process_tree
from testbed.starts.nodes import NamespaceNode, Nodes, nodes
from testbed.waiting import pause, wait_for

_PROGRAM = REPOSITORY / "bench/profile/truth_program.py"
_DEADLINE_S = 120.0
_CHECKPOINT_BYTES = 17_000_000
_DATA_BYTES = 8_000_000
_MODULE_BYTES = 3_000_000
_SLOW_DISK_BYTES_PER_S = 4_000_000
_SLOW_SERVER_BYTES_PER_S = 8_000_000
_SLOW_LINE_MBIT = 40
_SLOW_LINE = ("rate", f"{_SLOW_LINE_MBIT}mbit", "delay", "20ms", "limit", "2000")
_HANG_S = 6.0
_WAIT_S = 6.0
_CLOCK_AHEAD_S = 30
_SLACK_S = 0.05
"""Distance of a stage from the stop-watch that is still called right."""
_FAULTY, _HOSTS = "node-1", (0, 1)
_BARRIERS = ("init_process_group", "DistributedDataParallel", "first backward")
# An import as from a share: on the faulty node the package comes over the network.
_SHARED_TOOLS = """
import os, socket
if os.environ.get("FAULT_IMPORT"):
    with socket.create_connection((os.environ["SERVER"], 7000)) as connection:
        connection.sendall(b"%s slow\\n" % os.environ["FAULT_IMPORT"].encode())
        while connection.recv(1 << 18):
            pass
"""
# Python asks libc for the time of day, so a preloaded function sets a node's clock ahead.
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
  int result = next(id, now);
  if (id == CLOCK_REALTIME) now->tv_sec += %d;
  return result;
}
"""


@dataclass(frozen=True)
class Fault:
    """Fault of the second node, and the delay that the report must name for it."""

    name: str
    description: str
    stage: str = ""
    """Stage that the report must name; empty: it must name no node."""
    causes: tuple[str, ...] = ("unknown",)
    rank: int = -1
    variables: Mapping[str, str] = field(default_factory=dict)
    begins_after_s: float = 0.0
    is_ready: bool = True


@dataclass(frozen=True)
class Watched:
    """Stop-watch of one rank: stages in order of their begin, in seconds of the monotonic clock."""

    begin_s: float
    stages: tuple[tuple[str, float, float], ...]


class Truth:
    """The two nodes, the server that they load from, and the starts of the job."""

    def __init__(self, site: Nodes, folder: Path) -> None:
        self._site = site
        self.folder = folder
        self.number = 0
        self._slow: set[str] = set()
        for node in site.nodes:
            node.prefer()
        for rank in range(4):
            (folder / f"data-{rank}").write_bytes(os.urandom(_DATA_BYTES))
        os.sync()
        (folder / "lib").mkdir()
        (folder / "lib/shared_tools.py").write_text(_SHARED_TOOLS)
        with site.inside():
            self._server = socket.create_server((site.address, 7000), backlog=64)
        threading.Thread(target=self._serve, daemon=True).start()
        self._checkpoint = _checkpoint(folder)

    def close(self) -> None:
        self._server.close()

    @contextlib.contextmanager
    def limits(self, fault: Fault) -> Iterator[None]:
        """Apply the fault's limits of disk, line and server."""
        node = self._site.nodes[1]
        line = ["tc", "-n", self._site.switch, "qdisc"]
        if fault.name == "slow disk":
            node.limit_disk(self.folder, _SLOW_DISK_BYTES_PER_S)
        if fault.name == "slow network":
            netem = [*line, "add", "dev", "port1", "root", "netem", *_SLOW_LINE]
            if subprocess.run(netem, capture_output=True, check=False).returncode != 0:
                node.limit_line(_SLOW_LINE_MBIT)  # a kernel without netem
        if fault.name == "slow checkpoint":
            self._slow.add(node.address)
        try:
            yield
        finally:
            self._slow.clear()
            node.limit_disk(self.folder, 10**10)
            subprocess.run([*line, "del", "dev", "port1", "root"], capture_output=True, check=False)

    def start(self, fault: Fault, submission: str, port: int = 29400) -> "RunningStart":
        """Start the job on both nodes."""
        self.number += 1
        watch = self.folder / f"watch-{self.number}"
        running = RunningStart(self, watch, submission)
        for number, node in enumerate(self._site.nodes):
            is_faulty = number == 1
            if is_faulty:
                pause(fault.begins_after_s)
            variables = fault.variables if is_faulty else {}
            is_static = fault.name == "clock ahead"
            running.processes.append(
                self._run(node, number, port, watch, submission, variables, is_static)
            )
        return running

    def _run(
        self,
        node: NamespaceNode,
        number: int,
        port: int,
        watch: Path,
        submission: str,
        variables: Mapping[str, str],
        is_static: bool,
    ) -> "subprocess.Popen[bytes]":
        own = self.folder / node.name
        own.mkdir(exist_ok=True)
        first = self._site.nodes[0].address
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{REPOSITORY}:{self.folder / 'lib'}",
            "HOME": str(own),
            "BOOTSEER_TIMELINE_DIR": str(self.folder / "timelines"),
            "BOOTSEER_CACHE_DIR": str(own / "cache"),
            "BOOTSEER_RUN_DIR": str(own / "run"),
            "BOOTSEER_PUBLISH_TIMELINES": "off",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            # torch 2.13: restarted workers else find the addresses of those before them.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "SERVER": self._site.address,
            "WATCH": str(watch),
            "DATA": str(self.folder / "data"),
            "CHECKPOINT_BYTES": str(len(self._checkpoint)),
            **({"BOOTSEER_SUBMISSION": submission} if submission else {}),
            **variables,
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += ["--nproc-per-node=2", f"--node-rank={number}", f"--local-addr={node.address}"]
        torchrun += [f"--rdzv-id={port}", f"--rdzv-endpoint={first}:{port}", "--max-restarts=2"]
        if is_static:
            # The other rendezvous compares the nodes' clocks, and takes such a node for dead.
            torchrun += ["--rdzv-backend=static"]
        else:
            torchrun += ["--rdzv-backend=c10d", f"--rdzv-conf=is_host={number == 0}"]
        words = ["taskset", "-c", str(_HOSTS[number] % (os.cpu_count() or 1)), sys.executable]
        words += ["-m", "bootseer", "--job", "truth", "run", "--", *torchrun, str(_PROGRAM)]
        return node.run(words, environ, self.folder, own / f"output-{self.number}")

    def submissions(self) -> set[str]:
        """Return the submissions that have a timeline."""
        folder = self.folder / "timelines/truth/0"
        return {one.name for one in folder.iterdir()} if folder.exists() else set()

    def wait_for_submission(self, before: set[str]) -> set[str]:
        """Wait until there is a submission that is not in `before`."""
        return wait_for(lambda: self.submissions() - before, "a timeline", timeout_s=_DEADLINE_S)

    def hog(self) -> "list[subprocess.Popen[bytes]]":
        """Start programs that compete for the second node's processor."""
        node, loop = self._site.nodes[1], "while True: pass"
        words = [
            "taskset",
            "-c",
            str(_HOSTS[1] % (os.cpu_count() or 1)),
            sys.executable,
            "-c",
            loop,
        ]
        return [
            node.run(words, {"PATH": os.environ["PATH"]}, self.folder, self.folder / "hog")
            for _ in range(4)
        ]

    def _serve(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._server.accept()
            except OSError:
                return
            is_slow = address in self._slow
            threading.Thread(target=self._send, args=(connection, is_slow), daemon=True).start()

    def _send(self, connection: socket.socket, is_slow: bool) -> None:
        with contextlib.suppress(OSError), connection:
            with connection.makefile("rb") as lines:
                size, _, word = lines.readline().decode().strip().partition(" ")
            data = memoryview(self._checkpoint)[: int(size)]
            rate = 1_000_000 if word else _SLOW_SERVER_BYTES_PER_S / 2 if is_slow else 0.0
            step = int(rate / 20) or len(data)
            for first in range(0, len(data), step):
                connection.sendall(data[first : first + step])
                pause(step / rate if rate else 0.0)


class RunningStart:
    """Start of the job, while it runs and afterwards."""

    def __init__(self, truth: Truth, watch: Path, submission: str) -> None:
        self._truth = truth
        self._watch = watch
        self.submission = submission
        self.processes: list[subprocess.Popen[bytes]] = []

    def wait(self, fault: Fault) -> None:
        """Wait until the job ends; a job that hangs is killed after a while."""
        hogs: list[subprocess.Popen[bytes]] = []
        try:
            if fault.name == "busy CPU":
                self._wait_for_note(2, b"")
                hogs = self._truth.hog()
                for rank in (2, 3):
                    self._wait_for_note(rank, b"shared_tools")
                self._kill(hogs)
            if not fault.is_ready:
                self._wait_for_note(0, b"Parallel")
                pause(_HANG_S)
                return
            for process in self.processes:
                if process.wait(_DEADLINE_S) != 0:
                    raise RuntimeError(f"a node failed; see output-* in {self._truth.folder}")
        finally:
            self._kill([*hogs, *self.processes])

    def _wait_for_note(self, rank: int, word: bytes) -> None:
        """Wait until the stop-watch of a rank has noted `word`, or the job has ended."""
        wait_for(
            lambda: any(word in path.read_bytes() for path in self._watches(rank)) or self._ended(),
            f"{word.decode()} of rank {rank}",
            timeout_s=_DEADLINE_S,
        )

    def _watches(self, rank: int) -> list[Path]:
        return list(self._watch.parent.glob(f"{self._watch.name}-{rank}-*.jsonl"))

    def _ended(self) -> bool:
        return all(one.poll() is not None for one in self.processes)

    def _kill(self, processes: "list[subprocess.Popen[bytes]]") -> None:
        for process in processes:
            if process.poll() is None:
                for pid in process_tree(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.wait()

    def watched(self) -> dict[tuple[int, int], Watched]:
        """Return the stop-watches by rank and number of earlier processes of the rank."""
        found: dict[tuple[int, int], Watched] = {}
        for rank in range(4):
            rounds = sorted(map(_read_watch, self._watches(rank)), key=lambda one: one.begin_s)
            found |= {(rank, number): one for number, one in enumerate(rounds)}
        return found

    def model(self) -> StartModel:
        """Return the report's model of the start."""
        folder = TimelineFolder(self._truth.folder / "timelines")
        return StartModel(read_graph(find_start(folder, "truth", None, self.submission), 0))


def _read_watch(path: Path) -> Watched:
    stages: dict[tuple[str, float], float] = {}
    begin_s = 0.0
    for line in path.read_text().splitlines():
        one = json.loads(line)
        begin_s = begin_s or one["begin_s"]
        if "end_s" in one:
            stages[one["stage"], one["begin_s"]] = one["end_s"]
    return Watched(begin_s, tuple((name, begin, end) for (name, begin), end in stages.items()))


def _checkpoint(folder: Path) -> bytes:
    import torch

    path = folder / "checkpoint.pt"
    torch.save({"weight": torch.rand(_CHECKPOINT_BYTES // 4)}, path)
    return path.read_bytes()


def worst_distance_s(model: StartModel, watched: Mapping[tuple[int, int], Watched]) -> float:
    """Return how far the report's stage that is farthest from the stop-watch is off.

    Begins and ends are compared, up to one offset for the whole start: the report's clocks, which
    are corrected, must agree with the monotonic clock on both nodes.
    """
    pairs: list[tuple[float, float]] = []
    last_round = dict(sorted(watched))
    for group in model.graph.groups:
        if group.role != _PROGRAM.name:
            continue
        for row, rank in enumerate(group.ranks):
            stages = watched[rank, last_round[rank]].stages
            for name, begin_s, end_s in stages:
                if name in group.shape.names:
                    span = group.shape.names.index(name)
                    pairs.append((group.times[begin_of(span)][row], begin_s))
                    pairs.append((group.times[end_of(span)][row], end_s))
                elif end_s - begin_s > 2 * _SLACK_S + 0.1:
                    raise RuntimeError(f"the report lacks the stage {name} of rank {rank}")
    offset_s = statistics.median(ours - theirs for ours, theirs in pairs)
    return max(abs(ours - theirs - offset_s) for ours, theirs in pairs)


def lost_s(fault: Fault, watched: Mapping[tuple[int, int], Watched]) -> float:
    """Return the seconds that the stop-watch says were lost by a fault; 0 if it cannot tell.

    These are the seconds that the faulty stage took longer, as far as the other node waited for
    them at the next barrier.
    """
    if fault.name == "late node":
        return fault.begins_after_s
    if fault.name == "late rank":
        return min(_WAIT_S, _held_s(watched, "init_process_group", {fault.rank}))
    if fault.name == "restarted rank":
        return watched[3, 1].begin_s - watched[3, 0].begin_s
    if not fault.stage or not fault.is_ready:
        return 0.0
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for (rank, _), one in watched.items():
        for name, begin_s, end_s in one.stages:
            if name == fault.stage:
                seconds[rank >= 2].append(end_s - begin_s)
    more_s = max(seconds[True]) - statistics.median(seconds[False])
    names = [name for name, *_ in watched[0, 0].stages]
    barrier = next(name for name in names[names.index(fault.stage) :] if name in _BARRIERS)
    # A node may make up for a part later, as two ranks that share a processor do once they are
    # apart: nobody waits for that part.
    return min(more_s, _held_s(watched, barrier, {2, 3}))


def _held_s(
    watched: Mapping[tuple[int, int], Watched], barrier: str, faulty: Collection[int]
) -> float:
    """Return for how long the other ranks waited at a barrier for the last of the faulty ones."""
    arrived: dict[bool, list[float]] = {False: [], True: []}
    for (rank, _), one in watched.items():
        begin_s = next(begin_s for name, begin_s, _ in one.stages if name == barrier)
        arrived[rank in faulty].append(begin_s)
    return max(arrived[True]) - max(arrived[False])


def is_right(fault: Fault, delay: Delay | None) -> bool:
    """Return whether the report names the node, the stage and the cause of the fault."""
    if not fault.stage or delay is None:
        return bool(fault.stage) == (delay is not None)
    return (
        (delay.node, delay.stage) == (_FAULTY, fault.stage)
        and delay.cause.name in fault.causes
        and (fault.rank < 0 or delay.rank == fault.rank)
    )


_LATE = {"FAULT_LATE": f"3:{_WAIT_S}"}
FAULTS = (
    Fault("no fault", "nothing is wrong"),
    Fault("late node", "a node begins 5 s later", "scheduling", ("late scheduling",),
          begins_after_s=5.0),
    Fault("slow disk", "a disk of 4 MB/s", "first batch", ("slow disk",)),
    Fault("slow network", "a line of 40 Mbit/s (tc netem or tbf)", "torch.load", ("slow network",)),
    Fault("busy CPU", "four programs on the node's processor", "import torch", ("busy CPU",)),
    Fault("late rank", "a rank sleeps before init_process_group", "before init_process_group",
          rank=3, variables=_LATE),
    Fault("slow import", "a package comes over the network", "import shared_tools",
          ("slow import",), variables={"FAULT_IMPORT": str(_MODULE_BYTES)}),
    Fault("slow checkpoint", "a server sends 8 MB/s to the node", "torch.load",
          ("slow network",)),
    Fault("clock ahead", "a clock is 30 s ahead"),
    Fault("never ready", "a node hangs while it loads", "torch.load", ("not ended",),
          variables={"FAULT_HANG": "2,3:1"}, is_ready=False),
    Fault("restarted rank", "a rank fails while it loads", "torch.load", ("restarted workers",),
          rank=3, variables={"FAULT_CRASH": "3:3"}),
)  # fmt: skip
_TWICE = "two submissions"


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    if importlib.util.find_spec("torch") is None:
        raise MissingError("torch is not installed (make .venv/formats)")
    if shutil.which("taskset") is None:
        raise MissingError("there is no taskset (apt install util-linux)")
    workspace.shared["notes"] = [
        "torchrun with 2 ranks on each of two nodes (gloo), which have a network, control groups "
        "and a processor of their own on one machine; one fault on the second node; right: node, "
        "stage and cause of the longest delay; seconds lost (those that the other node waited for) "
        "and stages are compared with a stop-watch in the program, stages by begin and end",
    ]
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(nodes(2))
        folder = Path(workspace.directory) / "truth"
        folder.mkdir()
        truth = Truth(site, folder)
        stack.callback(truth.close)
        workspace.shared["truth"], workspace.shared["samples"] = truth, {}
        yield


def _sample(fault: Fault, running: RunningStart) -> Sample:
    watched, model = running.watched(), running.model()
    analysis = model.analyse()
    right = is_right(fault, analysis.delay) and analysis.is_ready == fault.is_ready
    if fault.name == "clock ahead":
        right = right and _clock_is_named(analysis)
    truth_s = lost_s(fault, watched)
    told_s = analysis.delay.seconds if analysis.delay else 0.0
    return Sample(
        analysis.ready_s,
        figures={
            "right": float(right),
            "lost_s": truth_s,
            "told_s": told_s,
            "lost_error": abs(told_s - truth_s) / truth_s if truth_s else 0.0,
            "worst_s": worst_distance_s(model, watched),
        },
    )


def _clock_is_named(analysis: Analysis) -> bool:
    shifts = analysis.clocks.shift_s
    return abs(shifts["node-0"] - shifts[_FAULTY] - _CLOCK_AHEAD_S) < _SLACK_S


def _take(fault: Fault) -> Variant:
    def take(workspace: Workspace) -> Sample:
        truth: Truth = workspace.shared["truth"]
        if workspace.is_smoke and fault.name not in ("no fault", "late rank"):
            raise MissingError("a smoke run has two faults")
        if fault.name == "clock ahead":
            fault.variables["LD_PRELOAD"] = _clock_library(truth.folder)  # type: ignore[index]
        with truth.limits(fault):
            running = truth.start(fault, f"s{truth.number}")
            running.wait(fault)
        sample = _sample(fault, running)
        workspace.shared["samples"][fault.name] = sample
        return sample

    return variant(fault.name, fault.description, take)


def _clock_library(folder: Path) -> str:
    if shutil.which("cc") is None:
        raise MissingError("there is no C compiler")
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_CLOCK % _CLOCK_AHEAD_S)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


def _twice(workspace: Workspace) -> Sample:
    """Two submissions of one name at once, and no scheduler that tells them apart."""
    truth: Truth = workspace.shared["truth"]
    if workspace.is_smoke:
        raise MissingError("a smoke run has two faults")
    late = next(one for one in FAULTS if one.name == "late rank")
    starts = []
    for port, rank in ((29501, 2), (29502, 3)):
        fault = replace(late, rank=rank, variables={"FAULT_LATE": f"{rank}:{_WAIT_S}"})
        before = truth.submissions()
        running = truth.start(fault, "", port)
        running.submission = min(truth.wait_for_submission(before))
        starts.append((fault, running))
    for fault, running in starts:
        running.wait(fault)
    samples = [_sample(fault, running) for fault, running in starts]
    sample = Sample(
        max(one.wall_s for one in samples),
        figures={
            **{key: max(one.figures[key] for one in samples) for key in samples[0].figures},
            "right": min(one.figures["right"] for one in samples),
        },
    )
    workspace.shared["samples"][_TWICE] = sample
    return sample


def _together(workspace: Workspace) -> Sample:
    samples = workspace.shared["samples"]
    count = len(samples)
    return Sample(
        sum(one.wall_s for one in samples.values()),
        figures={
            "right": sum(one.figures["right"] for one in samples.values()),
            "count": float(count),
            "lost_error": max(one.figures["lost_error"] for one in samples.values()),
            "worst_s": max(one.figures["worst_s"] for one in samples.values()),
            "allowed_s": _SLACK_S,
            "one": 1.0,
        },
    )


_ALL = "all"
CASE = Case(
    name="truth",
    description="Real torchrun jobs with known faults: what the report says, and a stop-watch.",
    prepare=_prepare,
    variants=(
        *map(_take, FAULTS),
        variant(_TWICE, "of one name at once, each with a late rank", _twice),
        variant(_ALL, "all of these", _together),
    ),
    ratios=(
        ratio_of("node, stage and cause", (_ALL, "right"), (_ALL, "count"), at_least(11 / 12)),
        ratio_of("seconds lost, worst error", (_ALL, "lost_error"), (_ALL, "one"), at_most(0.1)),
        ratio_of("stages, worst / 50 ms", (_ALL, "worst_s"), (_ALL, "allowed_s"), at_most(1)),
    ),
    columns=(
        Column("ready s", "wall_s"),
        Column("right", "right", digits=0),
        Column("lost s", "lost_s"),
        Column("report s", "told_s"),
        Column("worst stage ms", "worst_s", scale=1000, digits=0),
    ),
    runs=1,
    quick_runs=1,
    warmups=0,
)  # fmt: skip
