"""Snapshots: the model, their mounts, the chains whose trees must be served, and filters of lists.

Follows the semantics of containerd's own snapshotters (core/snapshots/snapshotter.go, overlayfs),
with one addition: a committed snapshot may be *remote*. It has no directory; it and everything
below it is the lazily served tree of a chain (`index.chains`). Pure (no I/O).
"""

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from bootseer.base.documents import from_line, is_digest
from bootseer.errors import CorruptError, InvalidInputError

REF_LABEL = "containerd.io/snapshot.ref"
"""Label with the chain that the snapshot will be; set by a client that unpacks an image."""
WORKLOAD_LABEL = "containerd.io/snapshot/bootseer.workload"
"""Label of a container's snapshot with the workload whose record the container replays."""

_DIGEST_GRAMMAR = re.compile(r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[A-Za-z0-9=_-]{1,255}")
_CONTAINER = re.compile(r"k8s\.io/[0-9]{1,19}/([0-9a-f]{64})")
_WORKLOAD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEY_CHARACTERS_MAX = 4096


class SnapshotKind(enum.StrEnum):
    """Kind of a snapshot: committed ones are parents; active and view ones are mounted.

    An active snapshot is writable, a view is read-only.
    """

    VIEW = "view"
    ACTIVE = "active"
    COMMITTED = "committed"


class SnapshotUsage(Struct, frozen=True):
    """Disk usage of a snapshot without its parents."""

    size_bytes: int = 0
    inode_count: int = 0


class Snapshot(Struct, frozen=True):
    """Snapshot in the database."""

    number: int
    """Number that names the snapshot's directory; never used again."""
    key: str
    parent: str
    """Key of the parent; "" without one."""
    kind: SnapshotKind
    labels: Mapping[str, str]
    created_ns: int
    updated_ns: int
    chain_id: str = ""
    """Chain of a remote snapshot; "" for an ordinary one."""
    usage: SnapshotUsage = field(default_factory=SnapshotUsage)


class SnapshotMount(Struct, frozen=True):
    """Mount that containerd makes for a snapshot: arguments of mount(2)."""

    kind: str
    source: str
    options: tuple[str, ...]


class Lower(Struct, frozen=True):
    """Layers below a snapshot: ordinary snapshots, the nearest first, then a chain or none."""

    numbers: tuple[int, ...]
    chain_id: str


class ImageMount(Struct, frozen=True):
    """Time that a container waited for the mount of its image."""

    container: str
    """Id of the container."""
    directory: Path
    begin_ns: int
    duration_ns: int
    is_live: bool
    """Whether the image was mounted before, for another container or by an earlier snapshotter."""


class TreeKey(Struct, frozen=True):
    """Identity of a served tree. Containers of one image with the same workload share one tree."""

    index_digest: str
    workload: str
    owner: tuple[int, int] | None = None
    """User and group that own all files as shown; None: the stored owners."""


def check_key(key: str, what: str) -> str:
    """Return `key` if it can name a snapshot. Raises: InvalidInputError."""
    if not key or len(key) > _KEY_CHARACTERS_MAX or "\0" in key:
        raise InvalidInputError(f"{key[:100]!r} is no {what} of a snapshot")
    return key


def wanted_chain(labels: Mapping[str, str]) -> str | None:
    """Return the chain that a new snapshot is labelled with, or None if it cannot be served.

    Raises: InvalidInputError for a label that is not a digest.
    """
    chain_id = labels.get(REF_LABEL)
    if chain_id is None:
        return None
    if not _DIGEST_GRAMMAR.fullmatch(chain_id):
        raise InvalidInputError(f"the label {REF_LABEL} is {chain_id[:100]!r}, which is no digest")
    return chain_id if is_digest(chain_id) else None


def chain_named(key: str) -> str:
    """Return the chain that a committed snapshot of an image is named after; "" for other keys."""
    # containerd passes names as "NAMESPACE/NUMBER/NAME" (core/metadata/snapshot.go).
    name = key.rpartition("/")[2]
    return name if is_digest(name) else ""


def container_of(key: str) -> str:
    """Return the id of the CRI container that a snapshot is named after; "" for other keys."""
    found = _CONTAINER.fullmatch(key)
    return found[1] if found else ""


def workload_of(labels: Mapping[str, str], default: str) -> str:
    """Return the workload of a container's snapshot; `default` without a valid label."""
    name = labels.get(WORKLOAD_LABEL, default)
    return name if _WORKLOAD.fullmatch(name) else default


def lower_of(ancestors: Sequence[Snapshot]) -> Lower:
    """Return the layers below a snapshot with these ancestors, given the nearest first."""
    numbers: list[int] = []
    for ancestor in ancestors:
        if ancestor.chain_id:
            return Lower(tuple(numbers), ancestor.chain_id)
        numbers.append(ancestor.number)
    return Lower(tuple(numbers), "")


def mounts_of(
    snapshot: Snapshot, lower_directories: Sequence[Path], fs: Path, work: Path
) -> tuple[SnapshotMount, ...]:
    """Return the mounts of an active or view snapshot.

    Args:
        snapshot: The snapshot.
        lower_directories: Directories of the layers below, the uppermost first.
        fs: The snapshot's own files.
        work: Work directory of its overlay.
    """
    writable = snapshot.kind is SnapshotKind.ACTIVE
    if not lower_directories:
        return (SnapshotMount("bind", str(fs), ("rw" if writable else "ro", "rbind")),)
    if not writable and len(lower_directories) == 1:
        return (SnapshotMount("bind", str(lower_directories[0]), ("ro", "rbind")),)
    options = [f"lowerdir={':'.join(map(str, lower_directories))}", "index=off"]
    if writable:
        options = [f"workdir={work}", f"upperdir={fs}", *options]
    return (SnapshotMount("overlay", "overlay", tuple(options)),)


def chains_in_use(
    snapshots: Iterable[Snapshot], default_workload: str
) -> frozenset[tuple[str, str]]:
    """Return (chain, workload) of the remote snapshots that active and view snapshots lie on."""
    by_key = {snapshot.key: snapshot for snapshot in snapshots}
    below: dict[str, str] = {"": ""}

    def chain_below(key: str) -> str:
        passed = []
        while key not in below:
            passed.append(key)
            ancestor = by_key[key]
            if ancestor.chain_id:
                below[key] = ancestor.chain_id
            else:
                key = ancestor.parent
        below.update(dict.fromkeys(passed, below[key]))
        return below[key]

    return frozenset(
        (chain_id, workload_of(snapshot.labels, default_workload))
        for snapshot in by_key.values()
        if snapshot.kind is not SnapshotKind.COMMITTED
        and (chain_id := chain_below(snapshot.parent))
    )


def changed_labels(
    old: Mapping[str, str], new: Mapping[str, str], paths: Sequence[str]
) -> dict[str, str]:
    """Return the labels after an update of the fields `paths`, or of all fields without any.

    Raises: InvalidInputError for a field that cannot be changed.
    """
    labels = dict(old)
    for path in paths or ("labels",):
        name = path.removeprefix("labels.")
        if path == "labels":
            labels = dict(new)
        elif name == path:
            raise InvalidInputError(f"the field {path[:100]!r} of a snapshot cannot be changed")
        elif new.get(name):
            labels[name] = new[name]
        else:
            labels.pop(name, None)
    return labels


# ---- containerd's filters of lists --------------------------------------------------------------

Filter = Callable[[Snapshot], bool]

_QUOTED = r'"(?:[^"\\\n]|\\.)*"'
_NAME = rf"(?:{_QUOTED}|\w+)"
_SELECTOR = re.compile(
    rf"(?P<path>{_NAME}(?:\.{_NAME})*)(?:(?P<operator>==|!=|~=)(?P<value>{_QUOTED}|[^\s,\"]+))?"
)
_FILTER_CHARACTERS_MAX = 8192


def any_of(texts: Sequence[str]) -> Filter:
    """Return a filter that accepts a snapshot if at least one of `texts` does, or all without one.

    Raises: InvalidInputError.
    """
    filters = [_parse(text) for text in texts]
    return lambda snapshot: not filters or any(accept(snapshot) for accept in filters)


def _parse(text: str) -> Filter:
    if len(text) > _FILTER_CHARACTERS_MAX:
        raise InvalidInputError("a filter of a list is too long")
    selectors: list[Filter] = []
    position = 0
    while position < len(text):
        match = _SELECTOR.match(text, position)
        if match is None or text[match.end() : match.end() + 1] not in ("", ","):
            raise InvalidInputError(f"{text[:200]!r} is no filter of a list")
        path = [_unquoted(name) for name in re.findall(_NAME, match["path"])]
        selectors.append(_selector(path, match["operator"], _unquoted(match["value"] or "")))
        position = match.end() + 1
    return lambda snapshot: all(accept(snapshot) for accept in selectors)


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return from_line(text, str)
    except CorruptError:
        raise InvalidInputError(f"{text[:200]} in a filter of a list is quoted wrongly") from None


def _selector(path: Sequence[str], operator: str | None, value: str) -> Filter:
    if operator is None:
        return lambda snapshot: _field(snapshot, path) is not None
    if operator == "==":
        return lambda snapshot: _field(snapshot, path) == value
    if operator == "!=":
        return lambda snapshot: _field(snapshot, path) != value
    try:
        pattern = re.compile(value)
    except re.error as error:
        raise InvalidInputError(f"{value[:100]!r} is no regular expression: {error}") from None

    def matches(snapshot: Snapshot) -> bool:
        text = _field(snapshot, path)
        return text is not None and pattern.search(text) is not None

    return matches


def _field(snapshot: Snapshot, path: Sequence[str]) -> str | None:
    if path[0] == "labels":
        return snapshot.labels.get(".".join(path[1:]))
    fields = {"kind": snapshot.kind.value, "name": snapshot.key, "parent": snapshot.parent}
    return fields.get(path[0]) if len(path) == 1 else None
