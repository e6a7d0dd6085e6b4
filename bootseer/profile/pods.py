"""Starts as Kubernetes tells of their pods: of images that know nothing of Bootseer.

Nothing in such a pod notes anything. The variables that the webhook gave its containers say which
start it is of, and the kubelet when its first container ran and the pod was ready. Where a pod has
a timeline, that counts instead. Pure (no I/O).
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import parse
from bootseer.profile.adapters.known import SIZE_MAX, clean, instant
from bootseer.profile.adapters.kubernetes import items, member
from bootseer.profile.files import Source, StartFiles, TimelineFile, place_of
from bootseer.settings.config import launcher_rank
from bootseer.settings.values import is_name
from bootseer.timeline.otlp import (
    READY,
    START,
    Stage,
    Value,
    encode_end,
    encode_start,
    trace_id_of,
)

_NS = 10**9


class _PodFile(Struct, frozen=True):
    """The timeline that a pod would have."""

    name: str
    data: bytes
    modified_ns: int = 0
    is_far: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self) -> bytes:
        return self.data


class WithPods:
    """Timelines, and pods that have none."""

    def __init__(self, source: Source, data: bytes) -> None:
        """`data`: the output of `kubectl get pods --output json`. Raises: CorruptError."""
        self._source = source
        self._starts: dict[tuple[str, int, str], dict[tuple[str, str], TimelineFile]] = {}
        for item in items(parse(data, "the output of kubectl", SIZE_MAX, is_foreign=True)):
            found = _of_pod(item) if item.get("kind") == "Pod" else None
            if found is not None:
                start, file = found
                # Of pods that came one after the other the last one counts.
                known = self._starts.setdefault(start, {}).setdefault(place_of(file), file)
                if file.name > known.name:
                    self._starts[start][place_of(file)] = file

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self._source.where}, and no such pod"

    def starts(self, job: str) -> Iterator[StartFiles]:
        """Raises: BootseerError."""
        left = {key[1:]: dict(pods) for key, pods in self._starts.items() if key[0] == job}
        for start in self._source.starts(job):
            pods = left.pop((start.attempt, start.submission), {})
            own = {place_of(file) for file in start.files}
            more = [file for place, file in pods.items() if place not in own]
            yield replace(start, files=(*start.files, *more))
        for (attempt, submission), pods in left.items():
            yield StartFiles(attempt, submission, tuple(pods.values()))


def _of_pod(item: dict[str, Any]) -> tuple[tuple[str, int, str], TimelineFile] | None:
    """Which start a pod is of, and its timeline; None where it is of none, or has not started."""
    metadata, status = item.get("metadata"), item.get("status")
    told = _variables(item)
    job = told.get("BOOTSEER_JOB", "")
    # A pod without an owner is a submission by itself.
    submission = told.get("BOOTSEER_SUBMISSION") or clean(member(metadata, "uid"))
    node, rank = clean(member(item, "spec", "nodeName")), _number(launcher_rank(told))
    began_ns = _began_ns(status)
    if not is_name(job) or not is_name(submission) or not is_name(node) or began_ns is None:
        return None
    attempt = _number(told.get("BOOTSEER_ATTEMPT", ""))
    resource: dict[str, Value] = {
        "service.name": "bootseer",
        "bootseer.job": job,
        "bootseer.submission": submission,
        "bootseer.attempt": attempt,
        "host.name": node,
        "bootseer.rank": rank,
        "k8s.pod.name": clean(member(metadata, "name")),
        "k8s.pod.uid": clean(member(metadata, "uid")),
    }
    trace_id = trace_id_of(job, attempt, submission)
    ready_ns = _ready_ns(status, began_ns)

    restart_count = max(
        (one for one in _states(status, "restartCount") if type(one) is int), default=0
    )
    again = f"its container was started again {restart_count} times" if restart_count else ""

    def stage(name: str, begin_ns: int, end_ns: int | None) -> bytes:
        span_id = trace_id_of(f"{name} {node} {rank}", attempt, submission)[:16]
        message = again if name == START else ""
        found = Stage(name, trace_id, span_id, "", begin_ns, end_ns, False, message, {}, resource)
        return encode_start(found) if end_ns is None else encode_end(found)

    lines = [stage(START, began_ns, ready_ns)]
    if ready_ns is not None:
        lines.append(stage(READY, ready_ns, ready_ns))
    when = datetime.fromtimestamp(began_ns // _NS, UTC)
    name = f"{when:%Y%m%dT%H%M%SZ}-0-{node}-{rank}"
    return (job, attempt, submission), _PodFile(name, b"".join(lines))


def _variables(item: dict[str, Any]) -> dict[str, str]:
    """What the pod's first container is told in so many words."""
    containers = member(item, "spec", "containers")
    first = containers[0] if isinstance(containers, list) and containers else None
    listed = member(first, "env")
    told = {
        clean(one.get("name")): clean(one.get("value"))
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict)
    }
    index = member(item, "metadata", "annotations", "batch.kubernetes.io/job-completion-index")
    return {"JOB_COMPLETION_INDEX": clean(index), **told}


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _began_ns(status: Any) -> int | None:
    """When the first of its containers that are no init containers began to run."""
    times = [
        instant(found)
        for state in ("running", "terminated")
        for found in _states(status, "state", state, "startedAt")
    ]
    return min((time for time in times if time is not None), default=None)


def _states(status: Any, *names: str) -> list[Any]:
    """What the kubelet says of each of its containers that are no init containers."""
    listed = member(status, "containerStatuses")
    return [member(one, *names) for one in (listed if isinstance(listed, list) else ())]


def _ready_ns(status: Any, began_ns: int) -> int | None:
    """When its readiness probe succeeded; for one that has ended, when it began: no more is known.
    None where it is not ready."""
    if member(status, "phase") in ("Succeeded", "Failed"):
        return began_ns
    listed = member(status, "conditions")
    for one in listed if isinstance(listed, list) else ():
        if member(one, "type") == "Ready" and member(one, "status") == "True":
            when = instant(member(one, "lastTransitionTime"))
            return max(began_ns, when) if when is not None else began_ns
    return None
