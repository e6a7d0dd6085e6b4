"""What a volume is to be, by the attributes that a pod or a PersistentVolume gives it.

Alone reads them. Whoever may make pods writes them, so nothing of them is believed before it was
checked here. Pure (no I/O).
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from bootseer.base.redact import public_url
from bootseer.errors import InvalidInputError, PermissionDeniedError
from bootseer.fuse.striped.mounted.options import parse_options
from bootseer.prefetch.index.source_names import REGISTRY
from bootseer.settings.values import parse_size
from bootseer.snapshots.manifest import is_name

_START = ("job", "submission", "attempt", "rank")
_SIZE_DEFAULT = "10GiB"
_SIZE_MIN_BYTES = 1 << 20
_MEMORY_MAX_BYTES = 4 << 30
"""Half of what the chart gives to all servers of a node (mounts.resources)."""
_DEADLINE_MAX_S = 120.0
"""So long a storage that does not answer may hold one of the few publishes of a node at a time."""
_VALUE_CHARS_MAX = 1024
_OPTIONS = (
    *("uid", "gid", "umask", "memory", "deadline"),
    *("stripe_unit", "stripe_count", "layout", "read_newest"),
)
_ATTRIBUTES = {
    "image": ("image", "workload"),
    "environment": ("environment", "target", "writable", "size", "uid", "gid", "workload"),
    "checkpoint": ("source", *_OPTIONS),
}
_IN_REGISTRY = re.compile(rf"{REGISTRY}(?:[A-Za-z0-9]|\[[0-9A-Fa-f:.]+\])[A-Za-z0-9._:@/-]*")
_IN_STORE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(?::[A-Za-z0-9._-]+)?(?:@[a-z0-9]+:[0-9a-f]+)?")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_ID_MAX = 2**32 - 2
"""The largest user or group: the next number means none."""
# Only these leave the node: others are folders of it, or read some that are (chains of fsspec).
_REMOTE = re.compile(
    r"(?:hdfs|viewfs|webhdfs|s3|s3a|gs|gcs|az|abfs|abfss|adl|oss)://[^/?#]+(?:/[^?#]*)?"
)
_WORKLOAD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# What a server may be told of a Secret. Others, as LD_PRELOAD, would make it another program.
_SECRETS = frozenset(
    (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"),
        *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "HADOOP_USER_NAME"),
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    )
)
_FAMILIES = ("AWS_", "AZURE_")
_OPTIONS_OF_STORAGES = "FSSPEC_"
"""Defaults for any storage, keys among them, of fsspec's own."""
_KEPT = frozenset(("AWS_CA_BUNDLE", "AWS_EC2_METADATA_DISABLED"))
"""Whom the node trusts, and that nobody takes its machine's role: neither a key nor a server."""


class ImageVolume(Struct, frozen=True, tag_field="kind", tag="image"):
    """An image's tree, read-only."""

    image: str
    workload: str = ""


class EnvironmentVolume(Struct, frozen=True, tag_field="kind", tag="environment"):
    """A directory of a snapshot."""

    environment: str
    target: str = ""
    """Which directory, where the snapshot has several."""
    writable_bytes: int = 0
    """What the pod may write on top of it; 0: nothing."""
    workload: str = ""
    owner: tuple[int, int] | None = None
    """The user and group as whose everything is shown; None: as it was captured."""


class CheckpointVolume(Struct, frozen=True, tag_field="kind", tag="checkpoint"):
    """A checkpoint folder, shared by all pods of the node that name it and its options alike."""

    source: str
    options: tuple[str, ...] = ()
    """As `mount_options.parse_options` takes them."""


Volume = ImageVolume | EnvironmentVolume | CheckpointVolume


def parse_volume(context: Mapping[str, str], sources: Sequence[str]) -> Volume:
    """The volume that these attributes mean. `sources`: URLs below which checkpoint folders may
    lie; none: every remote one. Raises: InvalidInputError, PermissionDeniedError."""
    # The kubelet's own, and those of provisioners, have a prefix.
    given = {name: text for name, text in context.items() if "/" not in name}
    kind = given.pop("kind", "")
    if kind not in _ATTRIBUTES:
        raise InvalidInputError(
            f"the volume's attribute kind is {_shown(kind)}; use one of {', '.join(_ATTRIBUTES)}"
        )
    for name, text in given.items():
        if name not in (*_ATTRIBUTES[kind], *_START):
            raise InvalidInputError(
                f"the attribute {_shown(name)} is none of a volume of the kind {kind}; there are "
                f"{', '.join((*_ATTRIBUTES[kind], *_START))}"
            )
        if len(text) > _VALUE_CHARS_MAX or not text.isprintable():
            raise InvalidInputError(
                f"the volume's attribute {name} is too long, or has characters that do not show"
            )
    if kind == "image":
        return ImageVolume(_image(given), _workload(given))
    if kind == "environment":
        return _environment(given)
    source = _source(_required(given, "source", kind), sources)
    return CheckpointVolume(source, tuple(_option(n, given[n]) for n in _OPTIONS if n in given))


def check_secrets(volume: Volume, secrets: Mapping[str, str]) -> dict[str, str]:
    """What a volume's server is told of them. Raises: InvalidInputError, which names no
    value."""
    if secrets and not isinstance(volume, CheckpointVolume):
        raise InvalidInputError(
            "only volumes of the kind checkpoint take secrets: images and environments come with "
            "the node's own credentials"
        )
    for name, text in secrets.items():
        if name not in _SECRETS or "\0" in text:
            raise InvalidInputError(
                f"the secret's key {_shown(name)} is none that a checkpoint volume takes; there "
                f"are {', '.join(sorted(_SECRETS))}"
            )
    return dict(secrets)


def server_variables(secrets: Mapping[str, str], node: Iterable[str]) -> dict[str, str | None]:
    """How the environment of a volume's server differs from one that has the variables `node`.

    Where a Secret names anything of a family, the node's variables of that family are left out
    (None): the node's keys would go to a server that the Secret names, and a token of the node's
    beside the Secret's own keys fails.
    """
    named = tuple(one for one in _FAMILIES if any(name.startswith(one) for name in secrets))
    hidden = (*named, _OPTIONS_OF_STORAGES) if named else ()
    left_out = (name for name in node if name.startswith(hidden) and name not in _KEPT)
    return {**dict.fromkeys(left_out), **secrets}


# ---- one attribute --------------------------------------------------------------------------


def _shown(text: str) -> str:
    return repr(text[:100])


def _required(given: Mapping[str, str], name: str, kind: str) -> str:
    if not given.get(name):
        raise InvalidInputError(f"a volume of the kind {kind} needs the attribute {name}")
    return given[name]


def _image(given: Mapping[str, str]) -> str:
    image = _required(given, "image", "image")
    # Others are files of the node, or its Docker engine.
    known = _IN_REGISTRY if image.startswith(REGISTRY) else _IN_STORE
    if not known.fullmatch(image) or ".." in image.split("/"):
        raise InvalidInputError(
            f"the volume's image is {_shown(image)}; write registry://HOST/NAME:TAG, or the name "
            "of an image that is indexed"
        )
    return image


def _workload(given: Mapping[str, str]) -> str:
    workload = given.get("workload", "")
    if workload and not _WORKLOAD.fullmatch(workload):
        raise InvalidInputError(f"the volume's workload {_shown(workload)} is no name")
    return workload


def _environment(given: Mapping[str, str]) -> EnvironmentVolume:
    name = _required(given, "environment", "environment")
    if not is_name(name):
        raise InvalidInputError(f"the volume's environment {_shown(name)} is no snapshot's name")
    writable = _switch(given, "writable")
    if "size" in given and not writable:
        raise InvalidInputError("the volume has a size, but only writable ones have: it is shared")
    size_bytes = parse_size(given.get("size", _SIZE_DEFAULT)) if writable else 0
    if writable and size_bytes < _SIZE_MIN_BYTES:
        raise InvalidInputError("the volume's size is less than 1MiB")
    target = given.get("target", "")
    if target and not target.startswith("/"):
        raise InvalidInputError(f"the volume's target {_shown(target)} is no absolute path")
    return EnvironmentVolume(name, target, size_bytes, _workload(given), _owner(given))


def _owner(given: Mapping[str, str]) -> tuple[int, int] | None:
    if "uid" not in given and "gid" not in given:
        return None
    ids = [given.get(name, given.get("uid", "0")) for name in ("uid", "gid")]
    if not all(_NUMBER.fullmatch(one) and int(one) <= _ID_MAX for one in ids):
        raise InvalidInputError("the volume's uid or gid is no number of a user or group")
    uid, gid = map(int, ids)
    return uid, gid


def _switch(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidInputError(f"the volume's attribute {name} is {_shown(text)}: true or false?")
    return text == "true"


def _option(name: str, text: str) -> str:
    if name == "read_newest":
        return name if _switch({name: text}, name) else "rw"
    if "," in text:
        raise InvalidInputError(f"the volume's attribute {name} is {_shown(text)}")
    if name == "memory" and parse_size(text) > _MEMORY_MAX_BYTES:
        raise PermissionDeniedError(
            f"the volume's memory {_shown(text)} is more than 4GiB: it is that of all mounts of "
            "the node, whose servers end together where they have too much"
        )
    if name == "deadline":
        options, _ = parse_options((f"deadline={text}",))
        if options["deadline_s"] > _DEADLINE_MAX_S:
            raise PermissionDeniedError(
                f"the volume's deadline {_shown(text)} is more than {_DEADLINE_MAX_S:g} seconds: "
                "volumes of other pods wait while a storage does not answer"
            )
    return f"{name}={text}"


def _source(source: str, allowed: Sequence[str]) -> str:
    shown = public_url(source)
    path = re.split(r"[/\\]|%2f|%5c", source.partition("://")[2], flags=re.IGNORECASE)
    if any(part.lower().replace("%2e", ".") in (".", "..") for part in path):
        raise InvalidInputError(f"the volume's source {shown} has a part . or .. in its path")
    if "::" in source:
        # Only the first would be compared with what is allowed; the others may be of the node.
        raise InvalidInputError(
            f"the volume's source {shown} is a chain of URLs (::); name the one folder"
        )
    if "@" in path[0] and ":" in path[0].partition("@")[0]:
        raise InvalidInputError(
            f"the volume's source {shown} holds a password, which every reader of the pod would "
            "see: put it into a Secret and name that as nodePublishSecretRef"
        )
    if allowed and not any(_is_within(source, one.rstrip("/")) for one in allowed):
        raise PermissionDeniedError(
            f"the volume's source {shown} is not below {' or '.join(map(public_url, allowed))}, "
            "where this cluster's checkpoint volumes may lie (--source of the CSI driver)"
        )
    if not allowed and not _REMOTE.fullmatch(source):
        raise PermissionDeniedError(
            f"the volume's source {shown} is no URL of a storage that nodes share; a folder of the "
            "nodes has to be allowed by --source of the CSI driver"
        )
    return source


def _is_within(source: str, allowed: str) -> bool:
    """Whether a URL is that of an allowed folder or, but on the node's own disk, lies below it.

    On the node's disk whoever writes to the allowed folder could put a link to any other folder of
    the node there, in place of the one that is named; inside of a source no link is followed.
    """
    is_remote = _REMOTE.fullmatch(allowed) is not None
    return source == allowed or (is_remote and source.startswith(f"{allowed}/"))
