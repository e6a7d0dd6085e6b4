"""What the webhook changes in a pod: pod and cluster in, JSON patch (RFC 6902) and warnings out.

Pure (no I/O). A patch only adds: what a pod says itself stays. Planned again for the patched pod
(another webhook may have changed it meanwhile), the patch is empty. What cannot be done is a
warning, and the pod starts without it.
"""

import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from bootseer.base.redact import redact
from bootseer.errors import InvalidInputError
from bootseer.fanout.hostlist import expand_hosts
from bootseer.fanout.keys import new_secret
from bootseer.fanout.membership import node_count
from bootseer.kubernetes.webhook.identity import JOB_SET, Identity, identity_of, tells_rank
from bootseer.kubernetes.webhook.pods import Container, Owner, Pod
from bootseer.settings.config import FANOUT_KEY
from bootseer.settings.values import is_name

REPLAY = "bootseer.io/replay"
ENVIRONMENT = "bootseer.io/environment"
CHECKPOINT = "bootseer.io/checkpoint"
FANOUT = "bootseer.io/fanout"
ANNOTATIONS = (REPLAY, ENVIRONMENT, CHECKPOINT, FANOUT)
"""Pods that have none of these are not looked at."""
REQUIRED = "required"
"""The value of the label CHECKPOINT of pods that start with their folder of checkpoints or not at
all: API servers select pods by labels, and not by annotations."""
WARNINGS = "bootseer.io/warnings"
"""The annotation for warnings: whoever creates a pod is told, but that is mostly a controller."""
DRIVER = "csi.bootseer.io"
RUNTIME_CLASS = "bootseer"
HANDLER = "io.containerd.cri.runtime-handler"
"""A kubelet does not tell containerd the class when it pulls (containerd 1.7 and later)."""
MIRROR = "kubernetes.io/config.mirror"

_WARNINGS_MAX = 8
_ANNOTATIONS_BYTES_MAX = 256 * 1024
"""Of all annotations of an object (apimachinery, TotalAnnotationSizeLimitB)."""
_ROOM_BYTES = 1024
# Two slashes at the beginning are a name of its own to `normpath`.
_PATH = re.compile(r"/(?!/)[^\0-\x1f\x7f:]{1,1000}")
_TAKEN = re.compile(r"/(?:proc|sys|dev|etc)(?:/.*)?|/(?:bin|lib|sbin|usr|var|run)?")
_START = ("job", "submission", "attempt", "rank")
_JOBS = re.compile(r"[2-9]|[1-9][0-9]{1,4}")
_HOSTS = re.compile(r"[a-z0-9.\[\]-]{1,253}")
_KEY = "key"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s\0-\x1f\x7f]{1,1000}")

Operation = dict[str, Any]
"""One operation of a JSON patch."""


class Cluster(Struct, frozen=True, kw_only=True):
    """What the cluster has of Bootseer, and what its pods are told."""

    has_driver: bool
    handler: str
    """What the runtime class stands for in containerd's configuration; empty: there is no class."""
    store_url: str = ""
    """The store that pods are told of; empty: none."""


class KeySecret(Struct, frozen=True):
    """Secret with the key of a submission's fan-out, which goes when its owner does."""

    name: str
    owner: Owner

    def document(self) -> dict[str, Any]:
        """Return the object, with a new key. It is never changed afterwards."""
        owner = self.owner
        reference = {
            "apiVersion": owner.api_version,
            "kind": owner.kind,
            "name": owner.name,
            "uid": owner.uid,
        }
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.name, "ownerReferences": [reference]},
            "type": "Opaque",
            "immutable": True,
            "stringData": {_KEY: new_secret().decode()},
        }


class Plan(Struct, frozen=True):
    """What is done about a pod."""

    patch: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()
    has_checkpoint: bool = False
    """Whether every container gets the folder of checkpoints that the pod asks for."""
    secret: KeySecret | None = None
    """A Secret that the pod names, and that is made where there is none."""


_Warnings = dict[str, str]
"""What cannot be done, in order, and the kind of the volume that is left out for it, if one is."""


class _Volume(Struct, frozen=True, kw_only=True):
    """A volume that a pod is given."""

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
    """Whether a pod asks for anything."""
    is_asked = any(_asked(pod, name) for name in ANNOTATIONS)
    return is_asked and MIRROR not in pod.metadata.annotations


def plan(pod: Pod, cluster: Cluster) -> Plan:
    """What to do about a pod that is about to be created."""
    if not is_annotated(pod):
        return Plan()
    if pod.spec.os.name == "windows" or pod.spec.node_selector.get("kubernetes.io/os") == "windows":
        return Plan(warnings=("bootseer: the pod is for Windows; it starts as it is",))
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
    said = list(warnings)[:_WARNINGS_MAX]
    noted = "; ".join(said)
    if noted and pod.metadata.annotations.get(WARNINGS) != noted and _has_room(pod, noted):
        patch.append(_annotate(WARNINGS, noted))
    has_checkpoint = bool(_asked(pod, CHECKPOINT)) and "checkpoint" not in warnings.values()
    return Plan(tuple(patch), tuple(f"bootseer: {one}" for one in said), has_checkpoint, secret)


def _replay(pod: Pod, cluster: Cluster, warnings: _Warnings) -> Iterator[Operation]:
    annotations, spec = pod.metadata.annotations, pod.spec
    asked = _asked(pod, REPLAY)
    if not asked:
        return
    if asked != "auto":
        warnings[f"{REPLAY} is {asked[:40]!r}, which is neither auto nor off"] = ""
    elif spec.runtime_class_name not in ("", RUNTIME_CLASS):
        name = spec.runtime_class_name
        warnings[f"not replayed: the pod has the runtime class {name!r} already"] = ""
    elif not cluster.handler:
        warnings[f"not replayed: this cluster has no runtime class {RUNTIME_CLASS!r}"] = ""
    elif not spec.host_users:
        why = "in a user namespace (hostUsers: false) containerd copies the whole image"
        warnings[f"not replayed: {why}"] = ""
    elif annotations.get(HANDLER, cluster.handler) != cluster.handler:
        warnings[f"not replayed: the pod has another {HANDLER} already"] = ""
    elif not _has_room(pod, cluster.handler):
        warnings["not replayed: the pod's annotations have no room for one more"] = ""
    else:
        if not spec.runtime_class_name:
            yield {"op": "add", "path": "/spec/runtimeClassName", "value": RUNTIME_CLASS}
        if HANDLER not in annotations:
            yield _annotate(HANDLER, cluster.handler)


def _volumes(
    pod: Pod, cluster: Cluster, identity: Identity, warnings: _Warnings
) -> Iterator[_Volume]:
    """The volumes that a pod asks for and can be given."""
    annotations = pod.metadata.annotations
    # By these the driver notes on the start's timeline how long it took.
    start = {name: text for name in _START if (text := getattr(identity, name))}
    asked: list[_Volume] = []
    if _asked(pod, ENVIRONMENT):
        asked.append(
            _Volume(
                name="bootseer-environment",
                path=annotations.get(f"{ENVIRONMENT}-path") or "/opt/environment",
                is_read_only=True,
                attributes={
                    "kind": "environment",
                    "environment": annotations[ENVIRONMENT],
                    **start,
                },
            )
        )
    if _asked(pod, CHECKPOINT):
        asked.append(
            _Volume(
                name="bootseer-checkpoint",
                path=annotations.get(f"{CHECKPOINT}-path") or "/mnt/checkpoints",
                is_read_only=False,
                attributes={"kind": "checkpoint", "source": annotations[CHECKPOINT], **start},
            )
        )
    for volume in asked:
        problem, kind = _problem(pod, volume), volume.attributes["kind"]
        if volume.path in (one.path for one in asked if one is not volume):
            problem = f"environment and checkpoint folder have one path, {volume.path!r}"
        if problem:
            warnings[f"no {kind}: {problem}"] = kind
        elif cluster.has_driver:
            yield volume
        elif volume.is_read_only:
            warnings[f"no {kind}: this cluster has no CSI driver {DRIVER}"] = kind
        else:
            # Without its folder a trainer would begin at step 0, and save to the node's disk.
            why = f"this cluster has no CSI driver {DRIVER}"
            warnings[f"{why}: the pod waits for its checkpoint folder"] = ""
            yield volume


def _secret(pod: Pod, identity: Identity, warnings: _Warnings) -> KeySecret | None:
    """Return the Secret for the fan-out that a pod asks for; None without."""
    asked = _asked(pod, FANOUT)
    if not asked:
        return None
    owner = identity.owner
    if asked != "auto":
        try:
            expand_hosts(asked, f"the annotation {FANOUT}")
        except InvalidInputError as error:
            warnings[f"no fan-out: {error}"] = ""
            return None
    if not (identity.submission and owner.api_version and owner.kind and owner.name and owner.uid):
        warnings["no fan-out: the pod has no owner, whose pods could feed each other"] = ""
        return None
    digest = hashlib.sha256(f"{identity.job}\0{identity.submission}".encode()).hexdigest()
    return KeySecret(f"bootseer-fanout-{digest[:16]}", owner)


def _fanout_variables(pod: Pod, container: Container, secret: KeySecret) -> list[dict[str, Any]]:
    """Return what a container is told of the fan-out: the key, and its hosts where it could not
    tell them by itself."""
    key = {"name": secret.name, "key": _KEY, "optional": True}
    hosts = _asked(pod, FANOUT)
    if hosts == "auto":
        hosts = _hosts_of_job_set(pod, container)
    return [
        {"name": FANOUT_KEY, "valueFrom": {"secretKeyRef": key}},
        *([{"name": "BOOTSEER_FANOUT_HOSTS", "value": hosts}] if hosts else ()),
    ]


def _hosts_of_job_set(pod: Pod, container: Container) -> str:
    """Return the host list of a JobSet's replicated Job of several Jobs, whose pods have two
    numbers in their names; empty for other pods, and where their number is not told."""
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


def _asked(pod: Pod, name: str) -> str:
    """What an annotation asks for; empty where it asks for nothing."""
    text = pod.metadata.annotations.get(name, "")
    return "" if text == "off" else text


def _problem(pod: Pod, volume: _Volume) -> str:
    """Why a pod cannot have the volume; empty where it can."""
    path, source = volume.path, volume.attributes.get("source")
    if source is not None and not _URL.fullmatch(source):
        return f"{redact(source)[:80]!r} is no URL"
    if source is not None and "::" in source:
        return f"{redact(source)[:80]!r} is a chain of URLs (::), and no folder"
    if source is None and not is_name(volume.attributes["environment"]):
        return f"{volume.attributes['environment'][:80]!r} is no name of a snapshot"
    if not _PATH.fullmatch(path) or path != posixpath.normpath(path) or _TAKEN.fullmatch(path):
        return f"{path[:80]!r} is no path that a folder can be mounted at"
    named = [one for one in pod.spec.volumes if one.get("name") == volume.name]
    if named and not _is_ours(named[0], volume):
        return f"the pod has another volume of the name {volume.name!r}"
    return ""


def _is_ours(named: Mapping[str, Any], volume: _Volume) -> bool:
    """Whether it shows the same. Which start that is of another webhook may have changed since."""
    csi = named.get("csi")
    attributes = csi.get("volumeAttributes") if isinstance(csi, dict) else None
    if not isinstance(attributes, dict) or named["csi"].get("driver") != DRIVER:
        return False
    shown = ({**one, **dict.fromkeys(_START)} for one in (attributes, volume.attributes))
    return next(shown) == next(shown)


def _volume_patch(pod: Pod, volumes: list[_Volume]) -> Iterator[Operation]:
    names = {one.get("name") for one in pod.spec.volumes}
    new = [volume.source() for volume in volumes if volume.name not in names]
    yield from _append("/spec/volumes", bool(pod.spec.volumes), new)


def _containers(
    pod: Pod,
    told: list[dict[str, Any]],
    volumes: list[_Volume],
    secret: KeySecret | None,
    warnings: _Warnings,
) -> Iterator[Operation]:
    kinds = {"containers": pod.spec.containers, "initContainers": pod.spec.init_containers}
    for kind, containers in kinds.items():
        for place, container in enumerate(containers):
            at = f"/spec/{kind}/{place}"
            own = {variable.name for variable in container.env}
            left = own | ({"BOOTSEER_RANK"} if tells_rank(own) else set())
            # What a ConfigMap says would be weaker than what is said here.
            left |= {"BOOTSEER_STORE"} if container.env_from else set()
            more = [] if secret is None else _fanout_variables(pod, container, secret)
            new = [one for one in (*told, *more) if one["name"] not in left]
            yield from _append(f"{at}/env", bool(container.env), new)
            mounts = list(_mounts(container, volumes, warnings))
            yield from _append(f"{at}/volumeMounts", bool(container.volume_mounts), mounts)


def _variables(identity: Identity, cluster: Cluster) -> list[dict[str, Any]]:
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
        # A kubelet puts the values of other variables in the place of $(NAME); $$ is a $.
        *({"name": key, "value": text.replace("$", "$$")} for key, text in plain.items() if text),
        *(
            {"name": key, "valueFrom": {"fieldRef": {"fieldPath": field}}}
            for key, field in fields.items()
        ),
    ]


def _mounts(
    container: Container, volumes: list[_Volume], warnings: _Warnings
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
    """Whether the API takes two more annotations with such a value."""
    texts = (more, *pod.metadata.annotations, *pod.metadata.annotations.values())
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return size + _ROOM_BYTES <= _ANNOTATIONS_BYTES_MAX


def _append(path: str, is_there: bool, items: list[dict[str, Any]]) -> Iterator[Operation]:
    """Items at the end of a list, which is made where it is missing, null or empty."""
    if not is_there:
        if items:
            yield {"op": "add", "path": path, "value": items}
        return
    for item in items:
        yield {"op": "add", "path": f"{path}/-", "value": item}


def _annotate(name: str, value: str) -> Operation:
    escaped = name.replace("~", "~0").replace("/", "~1")
    return {"op": "add", "path": f"/metadata/annotations/{escaped}", "value": value}
