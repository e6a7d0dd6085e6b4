"""What Kubernetes knows of pods: `kubectl get pods,events --output json`. Pure (no I/O).

Events are of core/v1 and of events.k8s.io/v1; both name the pod, the kubelet's the node, too. Times
are of the clocks of scheduler and node, most in whole seconds. Pods, where they are given, say when
they were created.
"""

import re
from collections.abc import Iterator
from typing import Any

from bootseer.base.documents import parse
from bootseer.profile.adapters.known import SIZE_MAX, STAGES_MAX, Known, clean, instant
from bootseer.profile.model.tracks import CONTROL_PLANE, KUBELET

_SCHEDULER_CLOCK, _KUBELET_CLOCK, _SERVER_CLOCK = "kube-scheduler", "kubelet", "kube-apiserver"
_ASSIGNED = re.compile(r"Successfully assigned \S{1,600} to (\S{1,253})")
_SIZE = re.compile(r"Image size: (\d{1,18}) bytes")
_PULLED_IN = re.compile(r" in (?:(\d{1,3})h)?(?:(\d{1,3})m)?(\d{1,4}(?:\.\d{1,9})?)(ms|s)\b")
_CONTAINER = re.compile(r"spec\.(initContainers|containers)\{([^}]{1,253})\}")
_REASONS = ("FailedScheduling", "Scheduled", "Pulling", "Pulled", "Created", "Started")


class _Pod:
    """What is known of one pod."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.name = ""
        self.node = ""
        self.owner = ""
        self.created_ns: int | None = None
        self.events: list[tuple[int, int, str, str, str]] = []
        """When, its place in the order of reasons, reason, container, message."""


def parse_kubernetes(data: bytes) -> list[Known]:
    """The stages of each pod from its creation until its last container started.

    Raises: CorruptError.
    """
    document = parse(data, "the output of kubectl", SIZE_MAX, is_foreign=True)
    pods: dict[str, _Pod] = {}
    for item in items(document):
        if item.get("kind") == "Pod":
            _take_pod(item, pods)
        else:
            _take_event(item, pods)
    found: list[Known] = []
    for pod in pods.values():
        found += _stages(pod)
        if len(found) >= STAGES_MAX:
            break
    return found


def items(document: Any) -> Iterator[dict[str, Any]]:
    """The objects of a list, or the one that is there alone."""
    if not isinstance(document, dict):
        return
    found = document.get("items", [document])
    yield from (item for item in found if isinstance(item, dict)) if isinstance(found, list) else ()


def member(value: Any, *names: str) -> Any:
    """What lies below these names; None where one of them is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _pod(pods: dict[str, _Pod], uid: object, name: object) -> _Pod:
    known = pods.setdefault(clean(uid) or clean(name), _Pod(clean(uid) or clean(name)))
    known.name = clean(name) or known.name
    return known


def _take_pod(item: dict[str, Any], pods: dict[str, _Pod]) -> None:
    metadata = item.get("metadata")
    pod = _pod(pods, member(metadata, "uid"), member(metadata, "name"))
    pod.node = clean(member(item, "spec", "nodeName")) or pod.node
    owners = member(metadata, "ownerReferences")
    owner = owners[0] if isinstance(owners, list) and owners else None
    # A JobSet has a Job for each of its roles.
    job_set = member(metadata, "labels", "jobset.sigs.k8s.io/jobset-uid")
    pod.owner = clean(job_set) or clean(member(owner, "uid"))
    pod.created_ns = instant(member(metadata, "creationTimestamp"))
    conditions = member(item, "status", "conditions")
    for condition in conditions if isinstance(conditions, list) else ():
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


def _stages(pod: _Pod) -> Iterator[Known]:
    """From one event to the next, in whichever order the containers of the pod came."""
    before_ns, before, before_container = pod.created_ns, "Submitted", ""
    for when, _, reason, container, message in sorted(_once(pod.events), key=_order):
        # The scheduler's microseconds may be later than the kubelet's whole second.
        when = max(when, before_ns or when)
        if reason == "FailedScheduling":
            # The scheduler tried in vain: the pod waits, since it was created or tried first.
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
    """The stage that an event ends, whose it is, and whose clock said so."""
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
    """How long a pull took, as its kubelet says more exactly than by times; 0 where it does not."""
    found = _PULLED_IN.search(message)
    if found is None:
        return 0
    hours, minutes, seconds, unit = found.groups()
    whole = 3600 * int(hours or 0) + 60 * int(minutes or 0)
    return int((whole + float(seconds) / (1000 if unit == "ms" else 1)) * 1e9)


def _order(event: tuple[int, int, str, str, str]) -> tuple[int, int, int]:
    """Of events in one second: those of the scheduler, then of init containers, then of others."""
    when, place, reason, container, _ = event
    if reason in ("Scheduled", "FailedScheduling"):
        return when // 10**9, 0, place
    return when // 10**9, 1 if container.startswith("spec.initContainers") else 2, place


def _once(events: list[tuple[int, int, str, str, str]]) -> list[tuple[int, int, str, str, str]]:
    """The first of each reason and container: later ones are of containers that were restarted."""
    first: dict[tuple[str, str], tuple[int, int, str, str, str]] = {}
    for event in sorted(events):
        known = first.setdefault(event[2:4], event)
        if not known[4]:
            first[event[2:4]] = (*known[:4], event[4])
    return list(first.values())


def _known(
    pod: _Pod, name: str, role: str, begin: int, end: int | None, clock: str, more: dict[str, Any]
) -> Known:
    return Known(
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
