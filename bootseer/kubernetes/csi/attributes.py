"""Parser of a volume's attributes, which a pod or a PersistentVolume gives. Pure (no I/O).

Anybody who may create pods writes the attributes, so each is checked here before it is used.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from bootseer.base.redact import public_url
from bootseer.errors import InvalidInputError, PermissionDeniedError
from bootseer.fanout.hostlist import HOSTS_MAX
from bootseer.fuse.striped.mounted.options import parse_options
from bootseer.prefetch.index.catalogue import REGISTRY
from bootseer.settings import values
from bootseer.snapshots.manifest import is_name

_START = ("job", "submission", "attempt", "rank")
_NODES = "nodes"
_SIZE_DEFAULT = "10GiB"
_SIZE_MIN_BYTES = 1 << 20
_MEMORY_MAX_BYTES = 4 << 30
"""Half of the memory that the chart gives to all servers of a node (mounts.resources)."""
_DEADLINE_MAX_S = 120.0
"""Longest time that a storage that does not answer may hold one of a node's few publishes."""
_VALUE_CHARS_MAX = 1024
_OPTIONS = (
    *("uid", "gid", "umask", "memory", "deadline"),
    *("stripe_unit", "stripe_count", "layout", "read_newest", "page_cache"),
)
_ATTRIBUTES = {
    "image": ("image", "workload", _NODES),
    "environment": ("environment", "target", "writable", "size", "uid", "gid", "workload", _NODES),
    "checkpoint": ("source", *_OPTIONS, _NODES),
}
_IN_REGISTRY = re.compile(rf"{REGISTRY}(?:[A-Za-z0-9]|\[[0-9A-Fa-f:.]+\])[A-Za-z0-9._:@/-]*")
_IN_STORE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(?::[A-Za-z0-9._-]+)?(?:@[a-z0-9]+:[0-9a-f]+)?")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_ID_MAX = 2**32 - 2
"""Largest user or group id: 2**32 - 1 means none."""
# URLs of remote storages. Others are directories of the node, or may read some (fsspec chains).
_REMOTE = re.compile(
    r"(?:hdfs|viewfs|webhdfs|s3|s3a|gs|gcs|az|abfs|abfss|adl|oss)://[^/?#]+(?:/[^?#]*)?"
)
# Keys of a Secret that a server gets as variables. Others, such as LD_PRELOAD, could run any code.
_SECRETS = frozenset(
    (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"),
        *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "HADOOP_USER_NAME"),
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    )
)
_FAMILIES = ("AWS_", "AZURE_")
_FSSPEC_DEFAULTS = "FSSPEC_"
"""Prefix of fsspec's defaults for any storage, which may hold keys."""
_KEPT = frozenset(("AWS_CA_BUNDLE", "AWS_EC2_METADATA_DISABLED"))
"""Variables of the node that stay: they are neither keys nor servers."""


class ImageVolume(Struct, frozen=True, tag_field="kind", tag="image"):
    """Read-only tree of an image."""

    image: str
    workload: str = ""


class EnvironmentVolume(Struct, frozen=True, tag_field="kind", tag="environment"):
    """Directory of a snapshot."""

    environment: str
    target: str = ""
    """Directory to show, if the snapshot has several."""
    writable_bytes: int = 0
    """Size of the pod's writable layer; 0 for a read-only volume."""
    workload: str = ""
    owner: tuple[int, int] | None = None
    """User and group shown for all files; None for those captured."""


class CheckpointVolume(Struct, frozen=True, tag_field="kind", tag="checkpoint"):
    """Checkpoint folder, shared by all pods of the node with the same source and options."""

    source: str
    options: tuple[str, ...] = ()
    """Options for `parse_options`."""


Volume = ImageVolume | EnvironmentVolume | CheckpointVolume


def parse_volume(context: Mapping[str, str], sources: Sequence[str]) -> Volume:
    """Parse a volume's attributes.

    `sources` are the URLs below which checkpoint folders may be; empty: any remote URL.

    Raises: InvalidInputError, PermissionDeniedError.
    """
    # Attributes with a prefix are the kubelet's or a provisioner's.
    given = {name: text for name, text in context.items() if "/" not in name}
    kind = given.pop("kind", "")
    if kind not in _ATTRIBUTES:
        raise InvalidInputError(
            f"the volume's attribute kind is {_shown(kind)}; use one of {', '.join(_ATTRIBUTES)}"
        )
    for name, text in given.items():
        if name not in (*_ATTRIBUTES[kind], *_START):
            raise InvalidInputError(
                f"a volume of the kind {kind} has no attribute {_shown(name)}; there are "
                f"{', '.join((*_ATTRIBUTES[kind], *_START))}"
            )
        if len(text) > _VALUE_CHARS_MAX or not text.isprintable():
            raise InvalidInputError(
                f"the volume's attribute {name} is too long or has unprintable characters"
            )
    _check_nodes(given)
    if kind == "image":
        return ImageVolume(_image(given), _workload(given))
    if kind == "environment":
        return _environment(given)
    if node_count(given) and not _switch(given, "read_newest"):
        raise InvalidInputError(
            "a checkpoint volume with the attribute nodes needs read_newest: nodes send each other "
            "what they read ahead"
        )
    source = _source(_required(given, "source", kind), sources)
    return CheckpointVolume(source, tuple(_option(n, given[n]) for n in _OPTIONS if n in given))


def check_secrets(volume: Volume, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets that a volume's server gets as variables.

    Raises: InvalidInputError, without any secret's value in its message.
    """
    if secrets and not isinstance(volume, CheckpointVolume):
        raise InvalidInputError(
            "only volumes of the kind checkpoint take secrets: images and environments are read "
            "with the node's own credentials"
        )
    for name, text in secrets.items():
        if name not in _SECRETS or "\0" in text:
            raise InvalidInputError(
                f"a checkpoint volume takes no secret with the key {_shown(name)}; there are "
                f"{', '.join(sorted(_SECRETS))}"
            )
    return dict(secrets)


def server_variables(secrets: Mapping[str, str], node: Iterable[str]) -> dict[str, str | None]:
    """Return the changes of a server's environment: variables to set, or to remove (None).

    If a Secret has a variable of a family (AWS, Azure), the node's variables of that family are
    removed: the node's keys must not go to a server that the Secret names, and the node's token
    does not work with the Secret's keys.

    Args:
        secrets: Variables from the Secret.
        node: Names of the node's variables.
    """
    named = tuple(one for one in _FAMILIES if any(name.startswith(one) for name in secrets))
    hidden = (*named, _FSSPEC_DEFAULTS) if named else ()
    left_out = (name for name in node if name.startswith(hidden) and name not in _KEPT)
    return {**dict.fromkeys(left_out), **secrets}


def node_count(context: Mapping[str, str]) -> int:
    """Return how many nodes of the volume's start feed each other; 0 if it does not say so."""
    return int(context.get(_NODES, "0"))


# ---- one attribute --------------------------------------------------------------------------


def _shown(text: str) -> str:
    return repr(text[:100])


def _required(given: Mapping[str, str], name: str, kind: str) -> str:
    if not given.get(name):
        raise InvalidInputError(f"a volume of the kind {kind} needs the attribute {name}")
    return given[name]


def _image(given: Mapping[str, str]) -> str:
    image = _required(given, "image", "image")
    # Other sources would be files of the node or its Docker engine.
    known = _IN_REGISTRY if image.startswith(REGISTRY) else _IN_STORE
    if not known.fullmatch(image) or ".." in image.split("/"):
        raise InvalidInputError(
            f"the volume's image is {_shown(image)}; write registry://HOST/NAME:TAG, or the name "
            "of an image that is indexed"
        )
    return image


def _check_nodes(given: Mapping[str, str]) -> None:
    text = given.get(_NODES, "0")
    if not _NUMBER.fullmatch(text) or int(text) > HOSTS_MAX:
        raise InvalidInputError(
            f"the volume's attribute nodes is {_shown(text)}; write a number of nodes, at most "
            f"{HOSTS_MAX}"
        )
    if text != "0" and not given.get("job"):
        raise InvalidInputError(
            "a volume with the attribute nodes needs the attribute job, which its other pods have, "
            "too"
        )


def _workload(given: Mapping[str, str]) -> str:
    workload = given.get("workload", "")
    if workload and not values.is_name(workload):
        raise InvalidInputError(f"the volume's workload {_shown(workload)} is not a valid name")
    return workload


def _environment(given: Mapping[str, str]) -> EnvironmentVolume:
    name = _required(given, "environment", "environment")
    if not is_name(name):
        raise InvalidInputError(f"the volume's environment {_shown(name)} is not a snapshot's name")
    writable = _switch(given, "writable")
    if "size" in given and not writable:
        raise InvalidInputError("the volume has a size, which only a writable volume can have")
    size_bytes = values.parse_size(given.get("size", _SIZE_DEFAULT)) if writable else 0
    if writable and size_bytes < _SIZE_MIN_BYTES:
        raise InvalidInputError("the volume's size is less than 1MiB")
    target = given.get("target", "")
    if target and not target.startswith("/"):
        raise InvalidInputError(f"the volume's target {_shown(target)} is not an absolute path")
    return EnvironmentVolume(name, target, size_bytes, _workload(given), _owner(given))


def _owner(given: Mapping[str, str]) -> tuple[int, int] | None:
    if "uid" not in given and "gid" not in given:
        return None
    ids = [given.get(name, given.get("uid", "0")) for name in ("uid", "gid")]
    if not all(_NUMBER.fullmatch(one) and int(one) <= _ID_MAX for one in ids):
        raise InvalidInputError("the volume's uid or gid is not the number of a user or group")
    uid, gid = map(int, ids)
    return uid, gid


def _switch(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidInputError(
            f"the volume's attribute {name} is {_shown(text)}; write true or false"
        )
    return text == "true"


def _option(name: str, text: str) -> str:
    if name in ("read_newest", "page_cache"):
        return name if _switch({name: text}, name) else "rw"
    if "," in text:
        raise InvalidInputError(f"the volume's attribute {name} has a comma: {_shown(text)}")
    if name == "memory" and values.parse_size(text) > _MEMORY_MAX_BYTES:
        raise PermissionDeniedError(
            f"the volume's memory {_shown(text)} is more than 4GiB: all mounts of the node share "
            "their memory, and all servers are killed if it is used up"
        )
    if name == "deadline":
        options, _ = parse_options((f"deadline={text}",))
        if options["deadline_s"] > _DEADLINE_MAX_S:
            raise PermissionDeniedError(
                f"the volume's deadline {_shown(text)} is more than {_DEADLINE_MAX_S:g} seconds: "
                "volumes of other pods would wait for a storage that does not answer"
            )
    return f"{name}={text}"


def _source(source: str, allowed: Sequence[str]) -> str:
    shown = public_url(source)
    path = re.split(r"[/\\]|%2f|%5c", source.partition("://")[2], flags=re.IGNORECASE)
    if any(part.lower().replace("%2e", ".") in (".", "..") for part in path):
        raise InvalidInputError(f"the volume's source {shown} has . or .. in its path")
    if "::" in source:
        # Only the first URL would be checked; the others could be directories of the node.
        raise InvalidInputError(
            f"the volume's source {shown} is a chain of URLs (::); name a single folder"
        )
    if "@" in path[0] and ":" in path[0].partition("@")[0]:
        raise InvalidInputError(
            f"the volume's source {shown} holds a password, which every reader of the pod would "
            "see: put it into a Secret and refer to that in nodePublishSecretRef"
        )
    if allowed and not any(_is_within(source, one.rstrip("/")) for one in allowed):
        raise PermissionDeniedError(
            f"the volume's source {shown} is not below {' or '.join(map(public_url, allowed))}, "
            "where this cluster's checkpoint volumes may lie (--source of the CSI driver)"
        )
    if not allowed and not _REMOTE.fullmatch(source):
        raise PermissionDeniedError(
            f"the volume's source {shown} is not the URL of a remote storage; a folder of the "
            "nodes must be allowed by --source of the CSI driver"
        )
    return source


def _is_within(source: str, allowed: str) -> bool:
    """Return whether a URL is an allowed folder or, for remote storages, lies below one.

    On the node's disk, anybody who writes to the allowed folder could put a link to any other
    directory of the node below it. Inside a source, links are not followed.
    """
    is_remote = _REMOTE.fullmatch(allowed) is not None
    return source == allowed or (is_remote and source.startswith(f"{allowed}/"))
