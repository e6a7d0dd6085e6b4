"""What a snapshot is, what it shows, and whose tree must be served for that.

Pure (no I/O). Follows the semantics of containerd's own snapshotters (core/snapshots/snapshotter.go
and its overlayfs). What is ours: a committed snapshot may be *remote*. It has no directory; it and
everything below it is the tree of a chain (`index.chains`), lazily served.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from bootseer.base.documents import is_digest
from bootseer.errors import InvalidInputError

REF_LABEL = "containerd.io/snapshot.ref"
"""The chain that the snapshot is going to be; set by the client that unpacks an image."""
WORKLOAD_LABEL = "containerd.io/snapshot/bootseer.workload"
"""The label of a container's snapshot that names the workload whose record it replays."""

_DIGEST_GRAMMAR = re.compile(r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[A-Za-z0-9=_-]{1,255}")
_CONTAINER = re.compile(r"k8s\.io/[0-9]{1,19}/([0-9a-f]{64})")
_WORKLOAD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEY_CHARACTERS_MAX = 4096


class Kind(enum.StrEnum):
    """Committed snapshots are parents; active (writable) and view (read-only) ones are mounted."""

    VIEW = "view"
    ACTIVE = "active"
    COMMITTED = "committed"


class Usage(Struct, frozen=True):
    """What a snapshot itself takes on disk, without its parents."""

    size_bytes: int = 0
    inode_count: int = 0


class Snapshot(Struct, frozen=True):
    """One snapshot, as the database has it."""

    number: int
    """Never used again; names its directory."""
    key: str
    parent: str
    """The parent's key; "" where there is none."""
    kind: Kind
    labels: Mapping[str, str]
    created_ns: int
    updated_ns: int
    chain_id: str = ""
    """The chain of a remote snapshot; "" for an ordinary one."""
    usage: Usage = field(default_factory=Usage)


class Mount(Struct, frozen=True):
    """What is to be mounted for a snapshot, as containerd describes mounts."""

    kind: str
    source: str
    options: tuple[str, ...]


class Lower(Struct, frozen=True):
    """What lies below a snapshot: directories of its own, the nearest first, then a chain."""

    numbers: tuple[int, ...]
    chain_id: str


class ImageMount(Struct, frozen=True):
    """What a container waited for to lie on its image."""

    container: str
    """Its id."""
    directory: Path
    begin_ns: int
    duration_ns: int
    is_live: bool
    """It found the image mounted, by another container or before its snapshotter began."""


class TreeKey(Struct, frozen=True):
    """Names a served tree. Containers of one image share it unless their workloads differ."""

    index_digest: str
    workload: str
    owner: tuple[int, int] | None = None
    """The user and group as whose everything is shown; None: as it is stored."""


def check_key(key: str, what: str) -> str:
    """`key` if it can name a snapshot. Raises: InvalidInputError."""
    if not key or len(key) > _KEY_CHARACTERS_MAX or "\0" in key:
        raise InvalidInputError(f"{key[:100]!r} is no {what} of a snapshot")
    return key


def wanted_chain(labels: Mapping[str, str]) -> str | None:
    """The chain that the snapshot to be is labelled with, if it is one that can be served.

    Raises: InvalidInputError for a label that is no digest at all.
    """
    chain_id = labels.get(REF_LABEL)
    if chain_id is None:
        return None
    if not _DIGEST_GRAMMAR.fullmatch(chain_id):
        raise InvalidInputError(f"the label {REF_LABEL} is {chain_id[:100]!r}, which is no digest")
    return chain_id if is_digest(chain_id) else None


def chain_named(key: str) -> str:
    """The chain that a committed snapshot of an image is named after; "" for any other key.

    containerd's own names come as "NAMESPACE/NUMBER/NAME" (core/metadata/snapshot.go)."""
    name = key.rpartition("/")[2]
    return name if is_digest(name) else ""


def container_of(key: str) -> str:
    """The container of CRI that a snapshot is named after; "" for any other key."""
    found = _CONTAINER.fullmatch(key)
    return found[1] if found else ""


def workload_of(labels: Mapping[str, str], default: str) -> str:
    """The workload of a container's snapshot; `default` where its label is none that could be."""
    name = labels.get(WORKLOAD_LABEL, default)
    return name if _WORKLOAD.fullmatch(name) else default


def lower_of(ancestors: Sequence[Snapshot]) -> Lower:
    """What the snapshot with these ancestors, the nearest first, lies on."""
    numbers: list[int] = []
    for ancestor in ancestors:
        if ancestor.chain_id:
            return Lower(tuple(numbers), ancestor.chain_id)
        numbers.append(ancestor.number)
    return Lower(tuple(numbers), "")


def mounts_of(
    snapshot: Snapshot, lower_directories: Sequence[Path], fs: Path, work: Path
) -> tuple[Mount, ...]:
    """How an active or view snapshot is mounted over these directories, the uppermost first; `fs`
    and `work` are its own."""
    writable = snapshot.kind is Kind.ACTIVE
    if not lower_directories:
        return (Mount("bind", str(fs), ("rw" if writable else "ro", "rbind")),)
    if not writable and len(lower_directories) == 1:
        return (Mount("bind", str(lower_directories[0]), ("ro", "rbind")),)
    options = [f"lowerdir={':'.join(map(str, lower_directories))}", "index=off"]
    if writable:
        options = [f"workdir={work}", f"upperdir={fs}", *options]
    return (Mount("overlay", "overlay", tuple(options)),)


def chains_in_use(
    snapshots: Iterable[Snapshot], default_workload: str
) -> frozenset[tuple[str, str]]:
    """The chains that active and view snapshots show, each with a workload."""
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
        if snapshot.kind is not Kind.COMMITTED and (chain_id := chain_below(snapshot.parent))
    )


def changed_labels(
    old: Mapping[str, str], new: Mapping[str, str], paths: Sequence[str]
) -> dict[str, str]:
    """The labels after an update of the fields `paths`; of all fields where there are none.

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
