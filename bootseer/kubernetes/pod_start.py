"""Which start a pod is of, as its volumes and its containers tell. Pure (no I/O).

Whoever may make pods writes both: they choose what a stage is noted under, and nothing else.
"""

from collections.abc import Mapping

from msgspec import Struct

from bootseer.settings.config import launcher_rank
from bootseer.settings.values import as_name


class PodStart(Struct, frozen=True):
    """A pod, and the start that it is of."""

    pod: str = ""
    namespace: str = ""
    uid: str = ""
    job: str = ""
    submission: str = ""
    attempt: int = 0
    rank: int = 0


def of_volume(context: Mapping[str, str]) -> PodStart:
    """The start of the pod that a volume with these attributes is for."""
    return _start(context, "csi.storage.k8s.io/pod.", context)


def of_container(labels: Mapping[str, str], variables: Mapping[str, str]) -> PodStart:
    """The start of the pod of a container that a kubelet has given these labels and variables."""
    told = {
        name: variables.get(f"BOOTSEER_{name.upper()}", "")
        for name in ("job", "submission", "attempt")
    }
    told["rank"] = launcher_rank(variables)
    return _start(labels, "io.kubernetes.pod.", told)


def _start(pod: Mapping[str, str], prefix: str, told: Mapping[str, str]) -> PodStart:
    """A start that nothing else is said of is the pod's own."""
    name, namespace, uid = (pod.get(f"{prefix}{one}", "") for one in ("name", "namespace", "uid"))
    return PodStart(
        pod=name,
        namespace=namespace,
        uid=uid,
        job=as_name(told.get("job") or name),
        submission=as_name(told.get("submission") or uid),
        attempt=_count(told.get("attempt", "")),
        rank=_count(told.get("rank", "")),
    )


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
