"""Fan-out of the volumes of a job's pods: the nodes on which the pods run feed each other.

The volume's attribute `nodes` is the number of nodes of its start. The number in the pod's name is
the number of this node: pods of an Indexed Job, a StatefulSet, a JobSet with one Job, or a job of
Kubeflow have one. Each node publishes its own address (`fanout.addresses`). The pods of a namespace
share no fan-out with those of another one.
"""

import logging
import os
import re
from collections.abc import Mapping

from msgspec.structs import replace

from bootseer.errors import BootseerError
from bootseer.fanout.host import HostPlan
from bootseer.fanout.membership import MEMBERS_MIN, Member, Membership, port_of
from bootseer.kubernetes.csi.attributes import node_count
from bootseer.kubernetes.csi.fanout_host import VolumeFanoutPlan
from bootseer.kubernetes.pod_stages import start_of_volume
from bootseer.linux.processes import ProcessId
from bootseer.served.processes import VOLUMES_FANOUT, start
from bootseer.served.ready_socket import new_ready_name
from bootseer.settings.config import Settings, is_default_store
from bootseer.settings.values import as_name

_log = logging.getLogger(__name__)

_LISTEN_WAIT_S = 5.0
_WINDOW_S = 300.0
"""Time for the volumes of a start to be read. No pod tells the driver that it is ready."""
# The pods of a Job have five random characters behind their number.
_NUMBERED = re.compile(r".+-(0|[1-9][0-9]{0,5})(?:-[a-z0-9]{5})?")
# Of Kubeflow's jobs, the master is the first node (as in `fanout.membership`).
_WORKER = re.compile(r".+-worker-(?:0|[1-9][0-9]{0,5})")


def join_start(settings: Settings, context: Mapping[str, str], address: str) -> Settings:
    """Return the settings for what a volume mounts: those of its start, if it has a fan-out.

    Begins this node's fan-out process if none runs for the start. Never raises: a failure is one
    warning.

    Args:
        settings: Settings of the node.
        context: The volume's attributes, which `parse_volume` has checked.
        address: Address at which other nodes reach this one; "" if volumes take no part.
    """
    apart = replace(settings, fanout=False)
    count = node_count(context)
    if count < MEMBERS_MIN or not settings.fanout or not address or is_default_store(settings):
        return apart
    pod = start_of_volume(context)
    number = pod_number(pod.pod)
    if number is None or number >= count:
        _log.warning(
            "the pod %s/%s has no number below %d in its name, so that its volumes are read "
            "without fan-out",
            *(pod.namespace, pod.pod, count),
        )
        return apart
    joined = replace(
        settings,
        job=as_name(f"{pod.namespace}.{pod.job}"),
        # Not the default of `start_of_volume`, the pod's uid, which differs between the pods.
        submission=as_name(context.get("submission") or "pods"),
        attempt=pod.attempt,
        # The pods publish the start's timelines.
        publish_timelines=False,
    )
    try:
        plan = _host_plan(joined, number, count, address)
        _begin(VolumeFanoutPlan(plan, settings, pod))
    except (BootseerError, OSError) as error:
        _log.warning("volumes of %s are read without fan-out: %s", joined.job, error)
        return apart
    return joined


def pod_number(name: str) -> int | None:
    """Return the number of a pod among those of its controller, from its name. Pure."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return None
    return int(found[1]) + (_WORKER.fullmatch(name) is not None)


def _host_plan(settings: Settings, number: int, count: int, address: str) -> HostPlan:
    words = (settings.job, settings.submission, str(settings.attempt))
    port = settings.fanout_port or port_of(*words)
    members = tuple(Member(str(one), "", port) for one in range(count))
    return HostPlan(
        settings=settings,
        membership=Membership(members, number, "the volume's attribute nodes"),
        start=words,
        secret="",
        user=ProcessId.of(os.getpid()),
        ready_name=new_ready_name(),
        address=address,
        window_s=_WINDOW_S,
        says_ready=False,
    )


def _begin(plan: VolumeFanoutPlan) -> None:
    with start(VOLUMES_FANOUT, plan.settings.run_dir) as process:
        process.tell(plan)
        process.wait(_LISTEN_WAIT_S)
