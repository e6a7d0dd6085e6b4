"""Assignment of other programs' stages to the nodes and processes of a start.

A pod or a submission belongs to the next launcher that began after it; a span to the start that has
its trace id, or to the node that it names if the start was under way; NCCL's times to the next
barrier of the rank that took at least as long. All other stages belong to other starts. `ADAPTERS`
has the parsers, and `ask_slurm` runs Slurm's commands.
"""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from bootseer.errors import CorruptError, InvalidInputError, from_oserror
from bootseer.report.graph import (
    ADAPTER,
    BEFORE_LAUNCHER,
    NO_RANK,
    node_of,
    rank_of,
)
from bootseer.report.others.foreign_stage import SIZE_MAX, ForeignStage
from bootseer.report.others.kubernetes import parse_kubernetes
from bootseer.report.others.nccl import parse_nccl
from bootseer.report.others.slurm import FIELDS, parse_slurm
from bootseer.report.others.spans import parse_spans
from bootseer.timeline.otlp import BARRIER, PARENT, PROCESS, ROLE, START, Stage, Value

_K = TypeVar("_K")
_T = TypeVar("_T")
_NS = 10**9
# No name of a node has a slash.
_OF_SUBMISSION = "/"
# Schedulers note whole seconds, by clocks of their own.
_SLACK_NS = 2 * _NS
# A pod or queue time that ended longer before the launcher belongs to another start.
_GAP_MAX_NS = 3600 * _NS
# NCCL rounds each of its parts to a hundredth of a second.
_ROUNDED_NS = _NS // 10


class ForeignStages:
    """Index of other programs' stages, looked up node by node."""

    def __init__(self, known: Mapping[str, Iterable[ForeignStage]]) -> None:
        """Index the stages, given by the name of their adapter."""
        self._units: dict[tuple[str, str], list[ForeignStage]] = {}
        self._nccl: dict[int, list[tuple[str, ForeignStage]]] = {}
        self._beside: dict[str, list[tuple[str, ForeignStage]]] = {}
        self._below: dict[tuple[str, str], list[tuple[str, ForeignStage]]] = {}
        spans: list[tuple[str, ForeignStage]] = []
        for adapter, found in known.items():
            for one in found:
                if one.begin_ns is None:
                    self._nccl.setdefault(one.rank, []).append((adapter, one))
                elif one.role in BEFORE_LAUNCHER:
                    self._units.setdefault((adapter, one.unit), []).append(one)
                else:
                    spans.append((adapter, one))
        outermost = _outermost([one for _, one in spans])
        for adapter, one in spans:
            above = one.trace_id, one.parent_id
            self._below.setdefault(outermost.get(above, above), []).append((adapter, one))
            for name in {_short(name) for name in one.nodes}:
                self._beside.setdefault(name, []).append((adapter, one))
        self._units_of: dict[str, list[tuple[str, str]]] = {}
        for key, found in self._units.items():
            names = {_short(name) for one in found for name in one.nodes}
            for name in names or {_OF_SUBMISSION + found[0].submission}:
                self._units_of.setdefault(name, []).append(key)

    def __bool__(self) -> bool:
        return bool(self._units or self._nccl or self._below)

    def for_node(self, stages: Sequence[Stage]) -> list[Stage]:
        """Return the other programs' stages for the node that has these stages."""
        return [*self._before_launcher(stages), *self._spans(stages), *self._nccl_parts(stages)]

    def pending_pods(self, nodes: Iterable[str], like: Stage) -> Iterator[list[Stage]]:
        """Yield the stages of each pod that has not started yet.

        Its owner must also own a pod of one of `nodes`. `like` is any stage of the start.
        """
        seen = {key for node in nodes for key in self._units_of.get(_short(node), ())}
        families = {(key[0], one.family) for key in seen for one in self._units[key][:1]}
        for key, found in self._units.items():
            is_pending = any(one.end_ns is None for one in found) and key not in seen
            if is_pending and found[0].family and (key[0], found[0].family) in families:
                node = next(iter(found[-1].nodes), "?")
                yield [_stage(key[0], one, like, node) for one in found]

    def _before_launcher(self, stages: Sequence[Stage]) -> Iterator[Stage]:
        """Yield the stages of the latest unit before the node's launcher, for each adapter."""
        # Daemons of the node may have mounted volumes for the pod before its launcher began.
        launchers = [stage for stage in stages if stage.name == START] or stages
        began = min(stage.start_ns for stage in launchers)
        node = node_of(stages[0])
        submission = str(stages[0].resource.get("bootseer.submission", ""))
        # A stage may name its pod, which then counts whatever the clocks say.
        pods = {stage.resource.get("k8s.pod.uid") for stage in stages}
        latest: dict[str, tuple[int, str]] = {}
        # Units without a node belong to the submission; without both, to a start of one node.
        wide = {_OF_SUBMISSION + submission, _OF_SUBMISSION}
        for adapter, unit in self._candidates(self._units_of, [_short(node), *wide]):
            found = self._units[adapter, unit]
            if any(one.end_ns is None for one in found):
                continue
            end = max(one.end_ns or 0 for one in found)
            if unit in pods or -_GAP_MAX_NS <= end - began <= _SLACK_NS:
                latest[adapter] = max(latest.get(adapter, (end, unit)), (end, unit))
        for adapter, (_, unit) in latest.items():
            for one in self._units[adapter, unit]:
                yield _stage(adapter, one, stages[0], node)

    def _spans(self, stages: Sequence[Stage]) -> Iterator[Stage]:
        """Yield the spans of other programs on the node, or below a span of the node."""
        node = node_of(stages[0])
        began = min(stage.start_ns for stage in stages)
        ended = max(stage.end_ns or stage.start_ns for stage in stages)
        ours = dict.fromkeys((stage.trace_id, stage.span_id) for stage in stages)
        below = list(self._candidates(self._below, ours))
        found = {id(one): (adapter, one) for adapter, one in below}
        for adapter, one in self._candidates(self._beside, [_short(node)]):
            found.setdefault(id(one), (adapter, one))
        for adapter, one in found.values():
            if began - _SLACK_NS <= (one.begin_ns or 0) <= ended:
                yield _stage(adapter, one, stages[0], node)

    def _candidates(self, index: Mapping[_K, Sequence[_T]], keys: Iterable[_K]) -> Iterator[_T]:
        for key in keys:
            yield from index.get(key, ())

    def _nccl_parts(self, stages: Sequence[Stage]) -> Iterator[Stage]:
        """Yield NCCL's times of each rank; each communicator ends with a barrier of its own."""
        barriers: dict[int, list[Stage]] = {}
        for stage in sorted(stages, key=lambda one: one.start_ns):
            if BARRIER in stage.attributes and stage.end_ns is not None:
                barriers.setdefault(rank_of(stage), []).append(stage)
        for rank, met in barriers.items():
            for adapter, one in self._nccl.get(rank, ()):
                total_ns = int(float(one.attributes["nccl.total_s"]) * _NS)
                while met and _length(met[0]) + _ROUNDED_NS < total_ns:
                    met.pop(0)
                if met:
                    yield from _parts(adapter, one, met.pop(0))


def _length(stage: Stage) -> int:
    return (stage.end_ns or stage.start_ns) - stage.start_ns


def _parts(adapter: str, one: ForeignStage, barrier: Stage) -> Iterator[Stage]:
    process = str(barrier.resource.get(PROCESS, ""))
    resource: dict[str, Value] = {
        "host.name": node_of(barrier),
        "bootseer.rank": rank_of(barrier),
        ADAPTER: adapter,
        PROCESS: f"{process} {one.role}",
        PARENT: process,
        ROLE: one.role,
    }
    end = (barrier.end_ns or 0) - sum(int(seconds * _NS) for _, seconds in one.parts)
    for name, seconds in one.parts:
        begin, end = end, end + int(seconds * _NS)
        yield Stage(
            name=name,
            trace_id=barrier.trace_id,
            span_id=f"{one.unit} {name}",
            parent_id="",
            start_ns=max(begin, barrier.start_ns),
            end_ns=max(end, barrier.start_ns),
            attributes=one.attributes,
            resource=resource,
        )


def _stage(adapter: str, one: ForeignStage, beside: Stage, node: str) -> Stage:
    process = one.role if one.role in BEFORE_LAUNCHER else f"{adapter} {one.role} {one.process}"
    resource: dict[str, Value] = {
        "host.name": node,
        ADAPTER: adapter,
        PROCESS: process,
        ROLE: one.role,
    }
    if one.rank != NO_RANK:
        resource["bootseer.rank"] = one.rank
    return Stage(
        name=one.name,
        trace_id=beside.trace_id,
        span_id=one.span_id or f"{adapter} {one.unit} {one.name} {one.begin_ns}",
        parent_id=one.parent_id,
        start_ns=one.begin_ns or 0,
        end_ns=one.end_ns,
        failed=one.failed,
        message=one.message or (f"by the clock of {one.clock}" if one.clock else ""),
        attributes=one.attributes,
        resource=resource,
    )


def _outermost(spans: Sequence[ForeignStage]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return, for each span, the parent of its outermost enclosing span in the same file."""
    parents = {(one.trace_id, one.span_id): one.parent_id for one in spans if one.span_id}
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for start in parents:
        chain: dict[tuple[str, str], None] = {}
        at = start
        while at in parents and at not in found and at not in chain:
            chain[at] = None
            at = at[0], parents[at]
        found.update(dict.fromkeys(chain, found.get(at, at)))
    return found


def _short(name: str) -> str:
    """Return a node's name without its domain; an IP address is returned as it is."""
    first = name.partition(".")[0]
    return name if first.isdecimal() else first


_log = logging.getLogger(__name__)

Adapter = Callable[[bytes], Sequence[ForeignStage]]
"""Parser of another program's output. Raises CorruptError if the format is a different one."""

ADAPTERS: Mapping[str, Adapter] = {
    "slurm": parse_slurm,
    "kubernetes": parse_kubernetes,
    "nccl": parse_nccl,
    "otlp": parse_spans,
}
"""Adapters by the name that `bootseer report --with` takes."""

_SLURM_JOB = re.compile(r"\d{1,10}(?:_\d{1,10})?")
ASKING_S = 5.0
"""Deadline of a Slurm command: a report without queue times is better than one that waits."""


def read_other(path: Path) -> bytes:
    """Read another program's output from a file.

    Raises: InvalidInputError if the file is too large; NotFoundError.
    """
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_MAX + 1)
    except OSError as error:
        raise from_oserror(error, f"read {path}") from error
    if len(data) > SIZE_MAX:
        raise InvalidInputError(
            f"{path} is larger than {SIZE_MAX // 2**20} MiB; cut out the part about this start"
        )
    return data


def ask_slurm(submission: str) -> Sequence[ForeignStage]:
    """Ask this machine's Slurm for a job; return nothing if there is no Slurm, job or answer."""
    if not _SLURM_JOB.fullmatch(submission):
        return ()
    for command in (
        ["sacct", "--duplicates", "--allocations", "--parsable2", "-o", FIELDS, "-j", submission],
        ["scontrol", "show", "job", submission],
    ):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                command,
                # Seconds since 1970: without them times have no zone.
                env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASKING_S,
            )
            found = parse_slurm(done.stdout[:SIZE_MAX]) if done.returncode == 0 else []
        except subprocess.TimeoutExpired:
            _log.info("no queue times for job %s: %s did not answer", submission, command[0])
            return ()
        except (OSError, CorruptError) as error:
            _log.info("no queue times for job %s: %s: %s", submission, command[0], error)
            continue
        if found:
            return found
    return ()
