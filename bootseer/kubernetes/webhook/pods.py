"""Pods and reviews as an API server sends them (core/v1, admission.k8s.io/v1), as far as the
webhook reads them. Pure model.

Pods come from whoever may create them, reviews from whoever reaches the port: both are decoded
with bounds, and members that are not known here are left as they are.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from bootseer.base.documents import Form, Text

BODY_BYTES_MAX = 3 * 1024 * 1024
"""What an API server takes itself."""
_VALUES_MAX = 200_000
_CONTAINERS_MAX = 1000

_Words = dict[Text, Text]


class Owner(Struct, frozen=True, kw_only=True, rename="camel"):
    """An entry of a pod's ownerReferences."""

    api_version: Text = ""
    kind: Text = ""
    name: Text = ""
    uid: Text = ""
    controller: bool = False


class Metadata(Struct, frozen=True, kw_only=True, rename="camel"):
    """A pod's name, labels, annotations and owners."""

    name: Text = ""
    generate_name: Text = ""
    labels: _Words = {}
    annotations: _Words = {}
    owner_references: tuple[Owner, ...] = ()


class Variable(Struct, frozen=True, kw_only=True):
    """A variable of a container; what its value comes from is not read."""

    name: Text
    value: Text = ""


class Mount(Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a volume is mounted in a container."""

    name: Text
    mount_path: Text


class Device(Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a block device appears in a container."""

    device_path: Text


class Container(Struct, frozen=True, kw_only=True, rename="camel"):
    """A container of a pod."""

    name: Text = ""
    command: tuple[Text, ...] = ()
    args: tuple[Text, ...] = ()
    env: tuple[Variable, ...] = ()
    env_from: tuple[Any, ...] = ()
    volume_mounts: tuple[Mount, ...] = ()
    volume_devices: tuple[Device, ...] = ()


class OperatingSystem(Struct, frozen=True):
    """The operating system that a pod says it needs (since Kubernetes 1.24)."""

    name: Text = ""


class PodSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    """A pod's specification."""

    containers: Annotated[tuple[Container, ...], Meta(max_length=_CONTAINERS_MAX)]
    init_containers: Annotated[tuple[Container, ...], Meta(max_length=_CONTAINERS_MAX)] = ()
    volumes: tuple[dict[str, Any], ...] = ()
    runtime_class_name: Text = ""
    subdomain: Text = ""
    """The headless service that gives the pod a full name."""
    node_selector: _Words = {}
    host_users: bool = True
    os: OperatingSystem = OperatingSystem()


class Pod(Struct, frozen=True, kw_only=True):
    """A pod that is about to be created."""

    metadata: Metadata
    spec: PodSpec


class Request(Struct, frozen=True, kw_only=True, rename={"is_dry_run": "dryRun"}):
    """The question in an AdmissionReview."""

    uid: Annotated[Text, Meta(min_length=1, max_length=256)]
    operation: Text = ""
    namespace: Text = ""
    object: Any = None
    is_dry_run: bool = False


class Review(Struct, frozen=True, kw_only=True, rename={"api_version": "apiVersion"}):
    """An AdmissionReview that asks."""

    api_version: Text
    request: Request


REVIEW: Form[Review] = Form(
    type=Review,
    what="an AdmissionReview",
    kind="AdmissionReview",
    size_max=BODY_BYTES_MAX,
    value_count_max=_VALUES_MAX,
    is_foreign=True,
)
POD: Form[Pod] = Form(
    type=Pod,
    what="a pod",
    size_max=BODY_BYTES_MAX,
    value_count_max=_VALUES_MAX,
    is_foreign=True,
)
