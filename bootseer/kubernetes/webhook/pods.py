"""Model of pods and admission reviews (core/v1, admission.k8s.io/v1), and the start of a pod. Pure.

Anybody who may create pods or reach the port writes these documents, so decoding is bounded. Only
the members that the webhook reads are declared; others are ignored.

A pod's start (job, submission, attempt, rank) is read from the labels, annotations and variables of
its controller. The topmost owner that these identify counts, since a pod names only its nearest.
"""

import re
from collections.abc import Mapping, Set
from typing import Annotated, Any

from msgspec import Meta, Struct

from bootseer.base.documents import DocumentFormat, Text
from bootseer.settings.values import as_name

BODY_BYTES_MAX = 3 * 1024 * 1024
"""Largest request body that an API server itself accepts."""
_VALUES_MAX = 200_000
_CONTAINERS_MAX = 1000

_Words = dict[Text, Text]


class OwnerReference(Struct, frozen=True, kw_only=True, rename="camel"):
    """Entry of a pod's ownerReferences."""

    api_version: Text = ""
    kind: Text = ""
    name: Text = ""
    uid: Text = ""
    controller: bool = False


class ObjectMeta(Struct, frozen=True, kw_only=True, rename="camel"):
    """Name, labels, annotations and owners of a pod."""

    name: Text = ""
    generate_name: Text = ""
    labels: _Words = {}
    annotations: _Words = {}
    owner_references: tuple[OwnerReference, ...] = ()


class EnvVar(Struct, frozen=True, kw_only=True):
    """Environment variable of a container; `valueFrom` is not read."""

    name: Text
    value: Text = ""


class VolumeMount(Struct, frozen=True, kw_only=True, rename="camel"):
    """Mount of a volume in a container."""

    name: Text
    mount_path: Text


class VolumeDevice(Struct, frozen=True, kw_only=True, rename="camel"):
    """Block device in a container."""

    device_path: Text


class PodContainer(Struct, frozen=True, kw_only=True, rename="camel"):
    """Container of a pod."""

    name: Text = ""
    command: tuple[Text, ...] = ()
    args: tuple[Text, ...] = ()
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[Any, ...] = ()
    volume_mounts: tuple[VolumeMount, ...] = ()
    volume_devices: tuple[VolumeDevice, ...] = ()


class OperatingSystem(Struct, frozen=True):
    """Operating system that a pod needs (since Kubernetes 1.24)."""

    name: Text = ""


class PodSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    """Specification of a pod."""

    containers: Annotated[tuple[PodContainer, ...], Meta(max_length=_CONTAINERS_MAX)]
    init_containers: Annotated[tuple[PodContainer, ...], Meta(max_length=_CONTAINERS_MAX)] = ()
    volumes: tuple[dict[str, Any], ...] = ()
    runtime_class_name: Text = ""
    subdomain: Text = ""
    """Headless service that gives the pod a full name."""
    node_selector: _Words = {}
    host_users: bool = True
    os: OperatingSystem = OperatingSystem()


class Pod(Struct, frozen=True, kw_only=True):
    """Pod that is about to be created."""

    metadata: ObjectMeta
    spec: PodSpec


class AdmissionRequest(Struct, frozen=True, kw_only=True, rename={"is_dry_run": "dryRun"}):
    """Request of an AdmissionReview."""

    uid: Annotated[Text, Meta(min_length=1, max_length=256)]
    operation: Text = ""
    namespace: Text = ""
    object: Any = None
    is_dry_run: bool = False


class AdmissionReview(Struct, frozen=True, kw_only=True, rename={"api_version": "apiVersion"}):
    """AdmissionReview with a request."""

    api_version: Text
    request: AdmissionRequest


REVIEW: DocumentFormat[AdmissionReview] = DocumentFormat(
    type=AdmissionReview,
    what="an AdmissionReview",
    kind="AdmissionReview",
    size_max=BODY_BYTES_MAX,
    value_count_max=_VALUES_MAX,
    is_foreign=True,
)
POD: DocumentFormat[Pod] = DocumentFormat(
    type=Pod,
    what="a pod",
    size_max=BODY_BYTES_MAX,
    value_count_max=_VALUES_MAX,
    is_foreign=True,
)


_BATCH = "batch.kubernetes.io"
JOB_SET = "jobset.sigs.k8s.io"
"""Prefix of a JobSet's labels."""
_KUBEFLOW = "training.kubeflow.org"
_VOLCANO = "volcano.sh"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


class StartIdentity(Struct, frozen=True, kw_only=True):
    """Start that a pod belongs to. Unknown members are empty."""

    job: str
    submission: str
    """Empty if the pod has no owner and is a submission by itself."""
    attempt: str
    rank: str
    owner: OwnerReference = OwnerReference()
    """Object whose UID is `submission`, if known: it lives as long as the submission."""


class _Controller(Struct, frozen=True, kw_only=True):
    """Labels and annotations of one kind of controller; the first one of a pod counts."""

    jobs: tuple[str, ...]
    submissions: tuple[str, ...] = ()
    """Without a match, the UID of the pod's owner is the submission."""
    attempts: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()


# From the topmost owner to the nearest: a JobSet's pods also have the labels of its Jobs.
_CONTROLLERS = (
    # JobSet; Trainer's TrainJob makes one of its own name (jobset_types.go).
    _Controller(
        jobs=(f"{JOB_SET}/jobset-name",),
        submissions=(f"{JOB_SET}/jobset-uid",),
        attempts=(f"{JOB_SET}/restart-attempt",),
        ranks=(f"{_BATCH}/job-completion-index",),
    ),
    # KubeRay: the RayJob if there is one, else the RayCluster (constant.go).
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
# Variables from which a launcher reads its rank.
_RANK_VARIABLES = frozenset({"RANK", "JOB_COMPLETION_INDEX"})


def identity_of(pod: Pod) -> StartIdentity:
    """Return the start that a pod belongs to."""
    metadata = pod.metadata
    known = {**metadata.labels, **metadata.annotations}
    owners = sorted(metadata.owner_references, key=lambda owner: not owner.controller)
    owner = owners[0] if owners else OwnerReference()
    for controller in _CONTROLLERS:
        job = _first(known, controller.jobs)
        if job:
            uid = _first(known, controller.submissions)
            return StartIdentity(
                job=as_name(job),
                submission=as_name(uid or owner.uid),
                attempt=_number(_first(known, controller.attempts)),
                rank=_number(_first(known, controller.ranks)),
                owner=_job_set(job, uid) if uid and controller is _CONTROLLERS[0] else owner,
            )
    return _identity_from_owner(metadata, owner)


def has_rank(names: Set[str]) -> bool:
    """Return whether a launcher with variables of these names knows its rank already."""
    return not _RANK_VARIABLES.isdisjoint(names)


def _job_set(name: str, uid: str) -> OwnerReference:
    return OwnerReference(api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet", name=name, uid=uid)


def _identity_from_owner(metadata: ObjectMeta, owner: OwnerReference) -> StartIdentity:
    name = owner.name
    if owner.kind == "ReplicaSet":
        # Name the Deployment, which owns the ReplicaSet.
        name = name.removesuffix(f"-{metadata.labels.get('pod-template-hash', '')}")
    ordinal = metadata.name.rpartition("-")[2] if owner.kind == "StatefulSet" else ""
    return StartIdentity(
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
