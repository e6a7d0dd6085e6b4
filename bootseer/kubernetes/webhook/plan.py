"""Plan of the webhook: from a pod and the cluster to a JSON patch (RFC 6902) and warnings. Pure.

A patch only adds; whatever the pod sets itself stays. For a pod that is already patched the patch
is empty, since API servers call webhooks again after other webhooks. If a request of the pod cannot
be met, the pod starts without it and gets a warning.
"""

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from bootseer.base.redact import redact
from bootseer.errors import CorruptError, InvalidInputError
from bootseer.fanout.hostlist import HOSTS_MAX, expand_hosts
from bootseer.fanout.keys import new_secret
from bootseer.fanout.membership import node_count
from bootseer.kubernetes.webhook.pods import (
    JOB_SET,
    POD,
    REVIEW,
    OwnerReference,
    Pod,
    PodContainer,
    StartIdentity,
    has_rank,
    identity_of,
)
from bootseer.settings.config import FANOUT_KEY
from bootseer.settings.values import is_name

REPLAY = "bootseer.io/replay"
ENVIRONMENT = "bootseer.io/environment"
CHECKPOINT = "bootseer.io/checkpoint"
FANOUT_HOSTS = "bootseer.io/fanout-hosts"
ANNOTATIONS = (REPLAY, ENVIRONMENT, CHECKPOINT, FANOUT_HOSTS)
"""Annotations that the webhook handles; pods without any are not changed."""
REQUIRED = "required"
"""Value of the label CHECKPOINT of pods that must not start without their checkpoint folder. It is
a label because API servers select pods by labels, not by annotations."""
WARNINGS = "bootseer.io/warnings"
"""Annotation for warnings: the response's own warnings reach only the controller."""
DRIVER = "csi.bootseer.io"
RUNTIME_CLASS = "bootseer"
HANDLER = "io.containerd.cri.runtime-handler"
"""Annotation that names the runtime when a kubelet pulls an image (containerd 1.7 and later)."""
MIRROR = "kubernetes.io/config.mirror"

_WARNINGS_MAX = 8
_ANNOTATIONS_BYTES_MAX = 256 * 1024
"""Largest total size of an object's annotations (apimachinery, TotalAnnotationSizeLimitB)."""
_ROOM_BYTES = 1024
# Two slashes at the beginning are refused: `normpath` keeps them.
_PATH = re.compile(r"/(?!/)[^\0-\x1f\x7f:]{1,1000}")
_TAKEN = re.compile(r"/(?:proc|sys|dev|etc)(?:/.*)?|/(?:bin|lib|sbin|usr|var|run)?")
_START = ("job", "submission", "attempt", "rank")
_NODES = "nodes"
_JOBS = re.compile(r"[2-9]|[1-9][0-9]{1,4}")
_HOSTS = re.compile(r"[a-z0-9.\[\]-]{1,253}")
_KEY = "key"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s\0-\x1f\x7f]{1,1000}")

Operation = dict[str, Any]
"""Operation of a JSON patch."""


class Cluster(Struct, frozen=True, kw_only=True):
    """Parts of Bootseer that the cluster has."""

    has_driver: bool
    """Whether the CSI driver is installed."""
    handler: str
    """containerd runtime of the runtime class; empty if there is no runtime class."""
    store_url: str = ""
    """Store to set in the pods' environment; empty for none."""


class KeySecret(Struct, frozen=True):
    """Secret with the key of a submission's fan-out. It is deleted with its owner."""

    name: str
    owner: OwnerReference

    def document(self) -> dict[str, Any]:
        """Return the immutable Secret object, with a new key."""
        reference: dict[str, Any] = to_builtins(self.owner)
        del reference["controller"]  # of the pod
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.name, "ownerReferences": [reference]},
            "type": "Opaque",
            "immutable": True,
            "stringData": {_KEY: new_secret().decode()},
        }


class PodPlan(Struct, frozen=True):
    """Changes of a pod."""

    patch: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()
    has_checkpoint: bool = False
    """Whether every container gets the checkpoint folder that the pod requests."""
    secret: KeySecret | None = None
    """Secret that the pod refers to, to be made unless it exists."""


_Warnings = dict[str, str]
"""Warnings in order, each with the kind of the volume that is left out because of it, or ""."""


class _Volume(Struct, frozen=True, kw_only=True):
    """Volume to add to a pod."""

    name: str
    path: str
    is_read_only: bool
    attributes: Mapping[str, str]

    def source(self) -> dict[str, Any]:
        csi: dict[str, Any] = {"driver": DRIVER, "volumeAttributes": dict(self.attributes)}
        if self.is_read_only:
            csi["readOnly"] = True
        return {"name": self.name, "csi": csi}


def is_annotated(pod: Pod) -> bool:
    """Return whether a pod has a request that the webhook handles."""
    is_requested = any(_requested(pod, name) for name in ANNOTATIONS)
    return is_requested and MIRROR not in pod.metadata.annotations


def plan(pod: Pod, cluster: Cluster) -> PodPlan:
    """Return the changes of a pod that is about to be created."""
    if not is_annotated(pod):
        return PodPlan()
    if pod.spec.os.name == "windows" or pod.spec.node_selector.get("kubernetes.io/os") == "windows":
        return PodPlan(warnings=("bootseer: the pod is for Windows; it starts as it is",))
    warnings: _Warnings = {}
    label = pod.metadata.labels.get(CHECKPOINT, REQUIRED)
    if label != REQUIRED:
        warnings[f"the label {CHECKPOINT} is {label[:40]!r}, which is not {REQUIRED}"] = ""
    identity = identity_of(pod)
    volumes = list(_volumes(pod, cluster, identity, warnings))
    secret = _secret(pod, identity, warnings)
    patch = [
        *_replay(pod, cluster, warnings),
        *_volume_patch(pod, volumes),
        *_containers(pod, _variables(identity, cluster), volumes, secret, warnings),
    ]
    shown = list(warnings)[:_WARNINGS_MAX]
    text = "; ".join(shown)
    if text and pod.metadata.annotations.get(WARNINGS) != text and _has_room(pod, text):
        patch.append(_annotate(WARNINGS, text))
    has_checkpoint = bool(_requested(pod, CHECKPOINT)) and "checkpoint" not in warnings.values()
    return PodPlan(tuple(patch), tuple(f"bootseer: {one}" for one in shown), has_checkpoint, secret)


def _replay(pod: Pod, cluster: Cluster, warnings: _Warnings) -> Iterator[Operation]:
    annotations, spec = pod.metadata.annotations, pod.spec
    requested = _requested(pod, REPLAY)
    if not requested:
        return
    if requested != "auto":
        warnings[f"{REPLAY} is {requested[:40]!r}, which is neither auto nor off"] = ""
    elif spec.runtime_class_name not in ("", RUNTIME_CLASS):
        name = spec.runtime_class_name
        warnings[f"not replayed: the pod already sets runtimeClassName {name!r}"] = ""
    elif not cluster.handler:
        warnings[f"not replayed: this cluster has no runtime class {RUNTIME_CLASS!r}"] = ""
    elif not spec.host_users:
        why = "in a user namespace (hostUsers: false) containerd copies the whole image"
        warnings[f"not replayed: {why}"] = ""
    elif annotations.get(HANDLER, cluster.handler) != cluster.handler:
        warnings[f"not replayed: the pod already sets another {HANDLER}"] = ""
    elif not _has_room(pod, cluster.handler):
        warnings["not replayed: the pod's annotations have no room for one more"] = ""
    else:
        if not spec.runtime_class_name:
            yield {"op": "add", "path": "/spec/runtimeClassName", "value": RUNTIME_CLASS}
        if HANDLER not in annotations:
            yield _annotate(HANDLER, cluster.handler)


def _volumes(
    pod: Pod, cluster: Cluster, identity: StartIdentity, warnings: _Warnings
) -> Iterator[_Volume]:
    """Yield the volumes that a pod requests and can get."""
    annotations = pod.metadata.annotations
    # The driver writes the volume's stage to the timeline of this start.
    start = {name: text for name in _START if (text := getattr(identity, name))}
    count = _node_count(pod)
    requested: list[_Volume] = []
    if _requested(pod, ENVIRONMENT):
        requested.append(
            _Volume(
                name="bootseer-environment",
                path=annotations.get(f"{ENVIRONMENT}-path") or "/opt/environment",
                is_read_only=True,
                attributes={
                    "kind": "environment",
                    "environment": annotations[ENVIRONMENT],
                    **start,
                    **({_NODES: str(count)} if count and identity.job else {}),
                },
            )
        )
    if _requested(pod, CHECKPOINT):
        requested.append(
            _Volume(
                name="bootseer-checkpoint",
                path=annotations.get(f"{CHECKPOINT}-path") or "/mnt/checkpoints",
                is_read_only=False,
                attributes={"kind": "checkpoint", "source": annotations[CHECKPOINT], **start},
            )
        )
    for volume in requested:
        problem, kind = _problem(pod, volume), volume.attributes["kind"]
        if volume.path in (one.path for one in requested if one is not volume):
            problem = f"environment and checkpoint folder have the same path, {volume.path!r}"
        if problem:
            warnings[f"no {kind}: {problem}"] = kind
        elif cluster.has_driver:
            yield volume
        elif volume.is_read_only:
            warnings[f"no {kind}: this cluster has no CSI driver {DRIVER}"] = kind
        else:
            # Without the folder a trainer would begin at step 0 and save to the node's disk.
            why = f"this cluster has no CSI driver {DRIVER}"
            warnings[f"{why}: the pod waits for its checkpoint folder"] = ""
            yield volume


def _secret(pod: Pod, identity: StartIdentity, warnings: _Warnings) -> KeySecret | None:
    """Return the Secret for the fan-out that a pod requests, or None."""
    requested = _requested(pod, FANOUT_HOSTS)
    if not requested:
        return None
    owner = identity.owner
    if requested != "auto":
        try:
            expand_hosts(requested, f"the annotation {FANOUT_HOSTS}")
        except InvalidInputError as error:
            warnings[f"no fan-out: {error}"] = ""
            return None
    if not (identity.submission and owner.api_version and owner.kind and owner.name and owner.uid):
        warnings["no fan-out: the pod has no owner, such as a Job"] = ""
        return None
    digest = hashlib.sha256(f"{identity.job}\0{identity.submission}".encode()).hexdigest()
    return KeySecret(f"bootseer-fanout-{digest[:16]}", owner)


def _fanout_variables(pod: Pod, container: PodContainer, secret: KeySecret) -> list[dict[str, Any]]:
    """Return a container's variables for the fan-out: the key, and hosts it cannot find itself."""
    key = {"name": secret.name, "key": _KEY, "optional": True}
    hosts = _requested(pod, FANOUT_HOSTS)
    if hosts == "auto":
        hosts = _hosts_of_job_set(pod, container)
    return [
        {"name": FANOUT_KEY, "valueFrom": {"secretKeyRef": key}},
        *([{"name": "BOOTSEER_FANOUT_HOSTS", "value": hosts}] if hosts else ()),
    ]


def _hosts_of_job_set(pod: Pod, container: PodContainer) -> str:
    """Return the host list of a replicated Job with several Jobs in a JobSet.

    Its pods have two numbers in their names. Empty for other pods, and if the number of nodes is
    unknown.
    """
    labels = pod.metadata.labels
    name, job, jobs = (
        labels.get(f"{JOB_SET}/{one}", "")
        for one in ("jobset-name", "replicatedjob-name", "replicatedjob-replicas")
    )
    environ = {one.name: one.value for one in container.env}
    count = node_count(environ, (*container.command, *container.args))
    if not (name and job and pod.spec.subdomain and _JOBS.fullmatch(jobs)) or count is None:
        return ""
    pods, rest = divmod(count, int(jobs))
    if rest or not pods:
        return ""
    hosts = f"{name}-{job}-[0-{int(jobs) - 1}]-[0-{pods - 1}].{pod.spec.subdomain}"
    return hosts if _HOSTS.fullmatch(hosts) else ""


def _node_count(pod: Pod) -> int:
    """Return how many nodes a pod's volumes share a fan-out with; 0 if it wants none.

    The nodes must be numbered by their pods' names, which have two numbers in a JobSet with several
    Jobs.
    """
    jobs = pod.metadata.labels.get(f"{JOB_SET}/replicatedjob-replicas", "1")
    if _requested(pod, FANOUT_HOSTS) != "auto" or jobs != "1":
        return 0
    counts = []
    for container in pod.spec.containers:
        environ = {one.name: one.value for one in container.env}
        counts.append(node_count(environ, (*container.command, *container.args)) or 0)
    count = max(counts, default=0)
    return count if count <= HOSTS_MAX else 0


def _requested(pod: Pod, name: str) -> str:
    """Return the value of an annotation, or "" if it is missing or "off"."""
    text = pod.metadata.annotations.get(name, "")
    return "" if text == "off" else text


def _problem(pod: Pod, volume: _Volume) -> str:
    """Return why a pod cannot have the volume, or "" if it can."""
    path, source = volume.path, volume.attributes.get("source")
    if source is not None and not _URL.fullmatch(source):
        return f"{redact(source)[:80]!r} is not a URL"
    if source is not None and "::" in source:
        return f"{redact(source)[:80]!r} is a chain of URLs (::), not a folder"
    if source is None and not is_name(volume.attributes["environment"]):
        return f"{volume.attributes['environment'][:80]!r} is not the name of a snapshot"
    if not _PATH.fullmatch(path) or path != posixpath.normpath(path) or _TAKEN.fullmatch(path):
        return f"{path[:80]!r} is not a path that a folder can be mounted at"
    named = [one for one in pod.spec.volumes if one.get("name") == volume.name]
    if named and not _is_same(named[0], volume):
        return f"the pod has another volume called {volume.name!r}"
    return ""


def _is_same(named: Mapping[str, Any], volume: _Volume) -> bool:
    """Return whether a pod's volume equals `volume`, whichever start its attributes name."""
    csi = named.get("csi")
    attributes = csi.get("volumeAttributes") if isinstance(csi, dict) else None
    if not isinstance(attributes, dict) or named["csi"].get("driver") != DRIVER:
        return False
    of_start = dict.fromkeys((*_START, _NODES))
    shown = ({**one, **of_start} for one in (attributes, volume.attributes))
    return next(shown) == next(shown)


def _volume_patch(pod: Pod, volumes: list[_Volume]) -> Iterator[Operation]:
    names = {one.get("name") for one in pod.spec.volumes}
    new = [volume.source() for volume in volumes if volume.name not in names]
    yield from _append("/spec/volumes", bool(pod.spec.volumes), new)


def _containers(
    pod: Pod,
    variables: list[dict[str, Any]],
    volumes: list[_Volume],
    secret: KeySecret | None,
    warnings: _Warnings,
) -> Iterator[Operation]:
    kinds = {"containers": pod.spec.containers, "initContainers": pod.spec.init_containers}
    for kind, containers in kinds.items():
        for place, container in enumerate(containers):
            at = f"/spec/{kind}/{place}"
            own = {variable.name for variable in container.env}
            left_out = own | ({"BOOTSEER_RANK"} if has_rank(own) else set())
            # A value set here would win over one from a ConfigMap.
            left_out |= {"BOOTSEER_STORE"} if container.env_from else set()
            more = [] if secret is None else _fanout_variables(pod, container, secret)
            new = [one for one in (*variables, *more) if one["name"] not in left_out]
            yield from _append(f"{at}/env", bool(container.env), new)
            mounts = list(_mounts(container, volumes, warnings))
            yield from _append(f"{at}/volumeMounts", bool(container.volume_mounts), mounts)


def _variables(identity: StartIdentity, cluster: Cluster) -> list[dict[str, Any]]:
    plain = {
        "BOOTSEER_JOB": identity.job,
        "BOOTSEER_SUBMISSION": identity.submission,
        "BOOTSEER_ATTEMPT": identity.attempt,
        "BOOTSEER_RANK": identity.rank,
        "BOOTSEER_STORE": cluster.store_url,
    }
    fields = {"BOOTSEER_NODE": "spec.nodeName"}
    if not identity.submission:
        fields["BOOTSEER_SUBMISSION"] = "metadata.uid"
    return [
        # A kubelet expands $(NAME) and turns $$ into $.
        *({"name": key, "value": text.replace("$", "$$")} for key, text in plain.items() if text),
        *(
            {"name": key, "valueFrom": {"fieldRef": {"fieldPath": field}}}
            for key, field in fields.items()
        ),
    ]


def _mounts(
    container: PodContainer, volumes: list[_Volume], warnings: _Warnings
) -> Iterator[dict[str, Any]]:
    taken = {posixpath.normpath(one.mount_path): one.name for one in container.volume_mounts}
    taken |= {posixpath.normpath(one.device_path): "" for one in container.volume_devices}
    for volume in volumes:
        other = taken.get(volume.path)
        if other is None:
            mount: dict[str, Any] = {"name": volume.name, "mountPath": volume.path}
            if volume.is_read_only:
                mount["readOnly"] = True
            yield mount
        elif other != volume.name:
            kind, where = volume.attributes["kind"], f"in container {container.name!r}"
            warnings[f"no {kind} {where}: it has another volume at {volume.path}"] = kind


def _has_room(pod: Pod, more: str) -> bool:
    """Return whether the API server accepts two more annotations with this value."""
    texts = (more, *pod.metadata.annotations, *pod.metadata.annotations.values())
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return size + _ROOM_BYTES <= _ANNOTATIONS_BYTES_MAX


def _append(path: str, is_there: bool, items: list[dict[str, Any]]) -> Iterator[Operation]:
    """Yield operations that append to a list, which is replaced if missing, null or empty."""
    if not is_there:
        if items:
            yield {"op": "add", "path": path, "value": items}
        return
    for item in items:
        yield {"op": "add", "path": f"{path}/-", "value": item}


def _annotate(name: str, value: str) -> Operation:
    escaped = name.replace("~", "~0").replace("/", "~1")
    return {"op": "add", "path": f"/metadata/annotations/{escaped}", "value": value}


_POD_BYTES_MAX = 1024 * 1024
"""Largest pod that is changed: etcd stores 1.5 MiB, and a patch must not make a pod too large."""


def answer(
    body: bytes, cluster: Callable[[], Cluster], ensure_secret: Callable[[str, KeySecret], str]
) -> bytes:
    """Return the AdmissionReview that answers a request.

    A pod is refused only if its label requires a checkpoint folder that it cannot get.

    Args:
        body: The request's AdmissionReview.
        cluster: Returns the cluster's state; called only for annotated pods.
        ensure_secret: Makes a Secret in a namespace; returns the reason if it cannot, else "".

    Raises: CorruptError if `body` is not an AdmissionReview.
    """
    review = REVIEW.decode(body, "the request's body")
    request = review.request
    planned, refusal = PodPlan(), ""
    if request.operation == "CREATE":
        planned = _planned(request.object, len(body), cluster)
        refusal = _refusal(request.object, planned)
        secret = None if refusal or request.is_dry_run else planned.secret
        if secret is not None and (problem := ensure_secret(request.namespace, secret)):
            # The pod refers to the Secret as optional, so it starts without.
            warnings = (
                *planned.warnings,
                f"bootseer: the key of the fan-out is in the store: {problem}",
            )
            planned = replace(planned, warnings=warnings)
    response: dict[str, Any] = {"uid": request.uid, "allowed": not refusal}
    if refusal:
        response["status"] = {"code": 403, "message": refusal}
    elif planned.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(planned.patch).encode()).decode()
    if planned.warnings:
        response["warnings"] = planned.warnings
    document = {"apiVersion": review.api_version, "kind": "AdmissionReview", "response": response}
    return json.dumps(document).encode()


def _planned(document: Any, size_bytes: int, cluster: Callable[[], Cluster]) -> PodPlan:
    # Pods without our annotations are not even decoded.
    if _words(document, "annotations").keys().isdisjoint(ANNOTATIONS):
        return PodPlan()
    if size_bytes > _POD_BYTES_MAX:
        return PodPlan(
            warnings=("bootseer: the pod is too large for a change; it starts as it is",)
        )
    try:
        pod = POD.convert(document, "the request's object")
    except CorruptError as error:
        return PodPlan(warnings=(f"bootseer: {error}; it starts as it is",))
    return plan(pod, cluster()) if is_annotated(pod) else PodPlan()


def _refusal(document: Any, planned: PodPlan) -> str:
    """Return why a pod must not start, or "" if it may."""
    is_required = _words(document, "labels").get(CHECKPOINT) == REQUIRED
    if not is_required or planned.has_checkpoint or MIRROR in _words(document, "annotations"):
        return ""
    why = "; ".join(planned.warnings) or f"it has no annotation {CHECKPOINT}"
    return f"the pod's label {CHECKPOINT} is {REQUIRED}, and it cannot get the folder: {why}"


def _words(document: Any, name: str) -> dict[str, Any]:
    """Return the labels or annotations of an unchecked object."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    words = metadata.get(name) if isinstance(metadata, dict) else None
    return words if isinstance(words, dict) else {}
