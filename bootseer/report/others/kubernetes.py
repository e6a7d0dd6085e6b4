"""Parser of `kubectl get pods,events --output json`. Pure (no I/O).

Events are of core/v1 or events.k8s.io/v1. Both name the pod, and a kubelet's events also the node.
Times are by the clocks of scheduler and node, mostly in whole seconds. Pods, if included, tell when
they were created.

A pod whose image lacks Bootseer writes no timeline. The variables that the webhook set in its
containers identify the start, and the pod's status says when its first container ran and when it
was ready: `WithPods` makes a timeline from both, for pods that have none of their own.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from bootseer.base.documents import parse
from bootseer.report.graph import CONTROL_PLANE, KUBELET
from bootseer.report.others.foreign_stage import SIZE_MAX, STAGES_MAX, ForeignStage, clean, instant
from bootseer.report.sources import Source, StartFiles, TimelineFile, node_and_rank
from bootseer.settings.config import launcher_rank
from bootseer.settings.values import as_count, is_name
from bootseer.timeline.otlp import (
    READY,
    START,
    Stage,
    Value,
    encode_end,
    encode_start,
    trace_id_of,
)

_SCHEDULER_CLOCK, _KUBELET_CLOCK, _SERVER_CLOCK = "kube-scheduler", "kubelet", "kube-apiserver"
_ASSIGNED = re.compile(r"Successfully assigned \S{1,600} to (\S{1,253})")
_SIZE = re.compile(r"Image size: (\d{1,18}) bytes")
_PULLED_IN = re.compile(r" in (?:(\d{1,3})h)?(?:(\d{1,3})m)?(\d{1,4}(?:\.\d{1,9})?)(ms|s)\b")
_CONTAINER = re.compile(r"spec\.(initContainers|containers)\{([^}]{1,253})\}")
_REASONS = ("FailedScheduling", "Scheduled", "Pulling", "Pulled", "Created", "Started")


class _Pod:
    """Facts about one pod, collected from its object and its events."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.name = ""
        self.node = ""
        self.owner = ""
        self.created_ns: int | None = None
        self.events: list[tuple[int, int, str, str, str]] = []
        """Time, position of the reason in `_REASONS`, reason, container, message."""


def parse_kubernetes(data: bytes) -> list[ForeignStage]:
    """Return the stages of each pod from its creation until its last container started."""
    document = parse(data, "the output of kubectl", SIZE_MAX, is_foreign=True)
    pods: dict[str, _Pod] = {}
    for item in items(document):
        if item.get("kind") == "Pod":
            _take_pod(item, pods)
        else:
            _take_event(item, pods)
    found: list[ForeignStage] = []
    for pod in pods.values():
        found += _stages(pod)
        if len(found) >= STAGES_MAX:
            break
    return found


def items(document: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a Kubernetes list, or the document itself if it is a single object."""
    if not isinstance(document, dict):
        return
    found = document.get("items", [document])
    yield from (item for item in found if isinstance(item, dict)) if isinstance(found, list) else ()


def member(value: Any, *names: str) -> Any:
    """Return the nested member at these names, or None if one is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _listed(value: Any, *names: str) -> list[Any]:
    """Return the nested list at these names; empty if it is missing or no list."""
    found = member(value, *names)
    return found if isinstance(found, list) else []


def _pod(pods: dict[str, _Pod], uid: object, name: object) -> _Pod:
    known = pods.setdefault(clean(uid) or clean(name), _Pod(clean(uid) or clean(name)))
    known.name = clean(name) or known.name
    return known


def _take_pod(item: dict[str, Any], pods: dict[str, _Pod]) -> None:
    metadata = item.get("metadata")
    pod = _pod(pods, member(metadata, "uid"), member(metadata, "name"))
    pod.node = clean(member(item, "spec", "nodeName")) or pod.node
    owner = next(iter(_listed(metadata, "ownerReferences")), None)
    # A JobSet has a Job for each of its roles.
    job_set = member(metadata, "labels", "jobset.sigs.k8s.io/jobset-uid")
    pod.owner = clean(job_set) or clean(member(owner, "uid"))
    pod.created_ns = instant(member(metadata, "creationTimestamp"))
    for condition in _listed(item, "status", "conditions"):
        if member(condition, "type") == "PodScheduled" and condition.get("status") == "True":
            when = instant(condition.get("lastTransitionTime"))
            if when is not None:
                pod.events.append((when, _REASONS.index("Scheduled"), "Scheduled", "", ""))


def _take_event(item: dict[str, Any], pods: dict[str, _Pod]) -> None:
    about = item.get("involvedObject") or item.get("regarding")
    reason = item.get("reason")
    times = ("eventTime", "firstTimestamp", "deprecatedFirstTimestamp", "lastTimestamp")
    when = next((found for name in times if (found := instant(item.get(name)))), None)
    if member(about, "kind") != "Pod" or reason not in _REASONS or when is None:
        return
    pod = _pod(pods, member(about, "uid"), member(about, "name"))
    message = item.get("message") or item.get("note")
    message = message[:1024] if isinstance(message, str) else ""
    if reason == "Scheduled":
        assigned = _ASSIGNED.match(message)
        pod.node = assigned[1] if assigned else pod.node
    elif reason != "FailedScheduling":
        host = member(item, "source", "host") or member(item, "deprecatedSource", "host")
        pod.node = clean(host or item.get("reportingInstance")) or pod.node
    field = member(about, "fieldPath")
    pod.events.append((when, _REASONS.index(reason), reason, clean(field), message))


def _stages(pod: _Pod) -> Iterator[ForeignStage]:
    """Yield a stage for each interval between two events of the pod."""
    before_ns, before, before_container = pod.created_ns, "Submitted", ""
    for when, _, reason, container, message in sorted(_once(pod.events), key=_order):
        # The scheduler's microseconds may lie after the kubelet's whole second.
        when = max(when, before_ns or when)
        if reason == "FailedScheduling":
            # The pod has been waiting since its creation, or since the first failed attempt.
            before_ns = before_ns if before_ns is not None else when
            continue
        name, role, clock = _name(reason, before, before_container)
        if name and before_ns is not None:
            if name == "image pull":
                pulled_ns = _pulled_ns(message)
                when = before_ns + pulled_ns if pulled_ns else when
            size = _SIZE.search(message)
            bytes_moved = {"bootseer.bytes": int(size[1])} if size and name == "image pull" else {}
            yield _known(pod, name, role, before_ns, when, clock, bytes_moved)
        before_ns, before, before_container = when, reason, container
    if before_ns is not None and before != "Started":
        name = {"Submitted": "pod scheduling", "Pulling": "image pull"}.get(before, "pod set-up")
        if name == "pod scheduling":
            yield _known(pod, name, CONTROL_PLANE, before_ns, None, _SERVER_CLOCK, {})
        else:
            yield _known(pod, name, KUBELET, before_ns, None, _KUBELET_CLOCK, {})


def _name(reason: str, before: str, before_container: str) -> tuple[str, str, str]:
    """Return the stage that an event ends, its role, and its clock."""
    if reason == "Scheduled":
        return "pod scheduling", CONTROL_PLANE, _SCHEDULER_CLOCK
    container = _CONTAINER.match(before_container)
    is_init = container is not None and container[1] == "initContainers"
    if before == "Started" and container and is_init:
        return f"init container {container[2]}", KUBELET, _KUBELET_CLOCK
    names = {"Created": "container create", "Started": "container start"}
    if before == "Pulling" and reason == "Pulled":
        return "image pull", KUBELET, _KUBELET_CLOCK
    if before in ("Scheduled", "Submitted"):
        return "pod set-up", KUBELET, _KUBELET_CLOCK
    return names.get(reason, ""), KUBELET, _KUBELET_CLOCK


def _pulled_ns(message: str) -> int:
    """Return a pull's duration from the kubelet's message, which is more exact; 0 if missing."""
    found = _PULLED_IN.search(message)
    if found is None:
        return 0
    hours, minutes, seconds, unit = found.groups()
    whole = 3600 * int(hours or 0) + 60 * int(minutes or 0)
    return int((whole + float(seconds) / (1000 if unit == "ms" else 1)) * 1e9)


def _order(event: tuple[int, int, str, str, str]) -> tuple[int, int, int]:
    """Return the sort key: events of one second by scheduler, init containers, other containers."""
    when, place, reason, container, _ = event
    if reason in ("Scheduled", "FailedScheduling"):
        return when // 10**9, 0, place
    return when // 10**9, 1 if container.startswith("spec.initContainers") else 2, place


def _once(events: list[tuple[int, int, str, str, str]]) -> list[tuple[int, int, str, str, str]]:
    """Keep the first event of each reason and container; later ones belong to restarts."""
    first: dict[tuple[str, str], tuple[int, int, str, str, str]] = {}
    for event in sorted(events):
        known = first.setdefault(event[2:4], event)
        if not known[4]:
            first[event[2:4]] = (*known[:4], event[4])
    return list(first.values())


def _known(
    pod: _Pod, name: str, role: str, begin: int, end: int | None, clock: str, more: dict[str, Any]
) -> ForeignStage:
    return ForeignStage(
        name=name,
        role=role,
        begin_ns=begin,
        end_ns=end,
        clock=clock,
        nodes=tuple(filter(None, (pod.node, pod.name))),
        unit=pod.uid,
        family=pod.owner,
        attributes=more,
    )


_NS = 10**9


class WithPods:
    """Source that adds timelines made from pods to those of another source."""

    def __init__(self, source: Source, data: bytes) -> None:
        """Parse `data`, the output of `kubectl get pods --output json`."""
        self._source = source
        self._starts: dict[tuple[str, int, str], dict[tuple[str, str], TimelineFile]] = {}
        for item in items(parse(data, "the output of kubectl", SIZE_MAX, is_foreign=True)):
            found = _of_pod(item) if item.get("kind") == "Pod" else None
            if found is not None:
                start, file = found
                # If pods replaced each other, the last one counts.
                known = self._starts.setdefault(start, {}).setdefault(node_and_rank(file), file)
                if file.name > known.name:
                    self._starts[start][node_and_rank(file)] = file

    @property
    def where(self) -> str:
        return f"{self._source.where} and the pods"

    def starts(self, job: str) -> Iterator[StartFiles]:
        remaining = {key[1:]: dict(pods) for key, pods in self._starts.items() if key[0] == job}
        for start in self._source.starts(job):
            pods = remaining.pop((start.attempt, start.submission), {})
            start = start.opened() if pods else start
            own = {node_and_rank(file) for file in start.files}
            more = [file for place, file in pods.items() if place not in own]
            yield replace(start, files=(*start.files, *more))
        for (attempt, submission), pods in remaining.items():
            yield StartFiles(attempt, submission, tuple(pods.values()))


def _of_pod(item: dict[str, Any]) -> tuple[tuple[str, int, str], TimelineFile] | None:
    """Return a pod's start and timeline, or None if it has no start or has not started yet."""
    metadata, status = item.get("metadata"), item.get("status")
    variables = _variables(item)
    job = variables.get("BOOTSEER_JOB", "")
    # A pod without an owner is a submission by itself.
    submission = variables.get("BOOTSEER_SUBMISSION") or clean(member(metadata, "uid"))
    node, rank = clean(member(item, "spec", "nodeName")), as_count(launcher_rank(variables))
    began_ns = _began_ns(status)
    if not is_name(job) or not is_name(submission) or not is_name(node) or began_ns is None:
        return None
    attempt = as_count(variables.get("BOOTSEER_ATTEMPT", ""))
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
    restarts = f"the container was restarted {restart_count} times" if restart_count else ""

    def stage(name: str, begin_ns: int, end_ns: int | None) -> bytes:
        span_id = trace_id_of(f"{name} {node} {rank}", attempt, submission)[:16]
        message = restarts if name == START else ""
        found = Stage(name, trace_id, span_id, "", begin_ns, end_ns, False, message, {}, resource)
        return encode_start(found) if end_ns is None else encode_end(found)

    lines = [stage(START, began_ns, ready_ns)]
    if ready_ns is not None:
        lines.append(stage(READY, ready_ns, ready_ns))
    when = datetime.fromtimestamp(began_ns // _NS, UTC)
    name = f"{when:%Y%m%dT%H%M%SZ}-0-{node}-{rank}"
    return (job, attempt, submission), TimelineFile(name, b"".join(lines))


def _variables(item: dict[str, Any]) -> dict[str, str]:
    """Return the literal environment variables of the pod's first container."""
    first = next(iter(_listed(item, "spec", "containers")), None)
    variables = {
        clean(one.get("name")): clean(one.get("value"))
        for one in _listed(first, "env")
        if isinstance(one, dict)
    }
    index = member(item, "metadata", "annotations", "batch.kubernetes.io/job-completion-index")
    return {"JOB_COMPLETION_INDEX": clean(index), **variables}


def _began_ns(status: Any) -> int | None:
    """Return when the pod's first container began to run; init containers do not count."""
    times = [
        instant(found)
        for state in ("running", "terminated")
        for found in _states(status, "state", state, "startedAt")
    ]
    return min((time for time in times if time is not None), default=None)


def _states(status: Any, *names: str) -> list[Any]:
    """Return a member of each container's status; init containers do not count."""
    return [member(one, *names) for one in _listed(status, "containerStatuses")]


def _ready_ns(status: Any, began_ns: int) -> int | None:
    """Return when the pod became ready, or None if it is not ready.

    For a pod that has ended nothing but its begin is known, which is returned.
    """
    if member(status, "phase") in ("Succeeded", "Failed"):
        return began_ns
    for one in _listed(status, "conditions"):
        if member(one, "type") == "Ready" and member(one, "status") == "True":
            when = instant(member(one, "lastTransitionTime"))
            return max(began_ns, when) if when is not None else began_ns
    return None
