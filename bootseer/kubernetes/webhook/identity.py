"""Which start a pod is of: job, submission, attempt and rank, by what its controller has noted.

Each controller of training jobs notes them in labels, annotations and variables of its own; the
topmost owner that these tell counts, since a pod names only its nearest one. Pure (no I/O).
"""

import re
from collections.abc import Mapping, Set

from msgspec import Struct

from bootseer.kubernetes.webhook.pods import Metadata, Owner, Pod
from bootseer.settings.values import as_name

_BATCH = "batch.kubernetes.io"
JOB_SET = "jobset.sigs.k8s.io"
"""The prefix of a JobSet's labels."""
_KUBEFLOW = "training.kubeflow.org"
_VOLCANO = "volcano.sh"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


class Identity(Struct, frozen=True, kw_only=True):
    """Which start a pod is of; what is not known is empty."""

    job: str
    submission: str
    """Empty: the pod has no owner, and is a submission by itself."""
    attempt: str
    rank: str
    owner: Owner = Owner()
    """The object whose UID `submission` is, as far as it is known: it lives as long."""


class _Controller(Struct, frozen=True, kw_only=True):
    """What one kind of controller notes at its pods: names of labels or annotations, the first of
    which that is there counts."""

    jobs: tuple[str, ...]
    submissions: tuple[str, ...] = ()
    """None of them: the identity of the pod's owner is the submission."""
    attempts: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()


# From the topmost owner to the nearest: a JobSet's pods have the labels of its Jobs, too.
_CONTROLLERS = (
    # JobSet; Trainer's TrainJob makes one of its own name (jobset_types.go).
    _Controller(
        jobs=(f"{JOB_SET}/jobset-name",),
        submissions=(f"{JOB_SET}/jobset-uid",),
        attempts=(f"{JOB_SET}/restart-attempt",),
        ranks=(f"{_BATCH}/job-completion-index",),
    ),
    # KubeRay: the RayJob, if it notes it, else the RayCluster (constant.go).
    _Controller(jobs=("ray.io/originated-from-cr-name", "ray.io/cluster")),
    # Volcano (batch/v1alpha1/labels.go).
    _Controller(
        jobs=(f"{_VOLCANO}/job-name",),
        attempts=(f"{_VOLCANO}/job-retry-count",),
        ranks=(f"{_VOLCANO}/task-index",),
    ),
    # PyTorchJob and its siblings, MPIJob (constants.go of kubeflow.org/v1 and v2beta1).
    _Controller(jobs=(f"{_KUBEFLOW}/job-name",), ranks=(f"{_KUBEFLOW}/replica-index",)),
    # Job; the names without a prefix are those before Kubernetes 1.27.
    _Controller(
        jobs=(f"{_BATCH}/job-name", "job-name"),
        submissions=(f"{_BATCH}/controller-uid", "controller-uid"),
        attempts=(f"{_BATCH}/job-index-failure-count",),
        ranks=(f"{_BATCH}/job-completion-index",),
    ),
)
# What a launcher's rank comes from by itself.
_RANK_VARIABLES = frozenset({"RANK", "JOB_COMPLETION_INDEX"})


def identity_of(pod: Pod) -> Identity:
    """Which start the pod is of."""
    metadata = pod.metadata
    known = {**metadata.labels, **metadata.annotations}
    owners = sorted(metadata.owner_references, key=lambda owner: not owner.controller)
    owner = owners[0] if owners else Owner()
    for controller in _CONTROLLERS:
        job = _first(known, controller.jobs)
        if job:
            uid = _first(known, controller.submissions)
            return Identity(
                job=as_name(job),
                submission=as_name(uid or owner.uid),
                attempt=_number(_first(known, controller.attempts)),
                rank=_number(_first(known, controller.ranks)),
                owner=_of_job_set(job, uid) if uid and controller is _CONTROLLERS[0] else owner,
            )
    return _of_owner(metadata, owner)


def tells_rank(names: Set[str]) -> bool:
    """Whether variables of these names tell a launcher its rank without the webhook's."""
    return not _RANK_VARIABLES.isdisjoint(names)


def _of_job_set(name: str, uid: str) -> Owner:
    """Return the JobSet, which owns the Jobs that own its pods."""
    return Owner(api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet", name=name, uid=uid)


def _of_owner(metadata: Metadata, owner: Owner) -> Identity:
    """Of a pod of a StatefulSet, a ReplicaSet or another owner, or of none."""
    name = owner.name
    if owner.kind == "ReplicaSet":
        # The owner's own owner is the Deployment.
        name = name.removesuffix(f"-{metadata.labels.get('pod-template-hash', '')}")
    ordinal = metadata.name.rpartition("-")[2] if owner.kind == "StatefulSet" else ""
    return Identity(
        job=as_name(name or metadata.generate_name.rstrip("-.") or metadata.name),
        submission=as_name(owner.uid),
        attempt="",
        rank=_number(ordinal),
        owner=owner,
    )


def _first(known: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((known[name] for name in names if known.get(name)), "")


def _number(text: str) -> str:
    return text if _NUMBER.fullmatch(text) else ""
