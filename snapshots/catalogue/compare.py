"""What two snapshots, or a snapshot and what is on disk, have not in common.

`compare` is pure; `snapshot_view` and `disk_view` read the store and the disk. Stateless; any
thread.
"""

import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.blob.pack.packing import tar_directory
from bootseer.blob.tree import Inode, Tree
from bootseer.errors import InvalidInputError, NotFoundError, from_oserror
from bootseer.linux.root_paths import resolve_in_root
from bootseer.snapshots.catalogue.catalogue import load_tree
from bootseer.snapshots.catalogue.manifest import Manifest
from bootseer.snapshots.catalogue.packages import PackageChange, compare_packages, packages_in
from bootseer.snapshots.setup.fingerprint import Part
from bootseer.snapshots.targets.scan import STAGING_PREFIX
from bootseer.store import Store

ADDED, REMOVED, CHANGED = "added", "removed", "changed"


class View(Struct, frozen=True):
    """Directories, each as a tree."""

    trees: Mapping[bytes, Tree]
    """The trees of the targets by absolute path."""
    deletions: frozenset[bytes] = frozenset()
    """Absolute paths that a set-up removed."""
    partial: frozenset[bytes] = frozenset()
    """Targets of which only a difference is known: what they lack may be there all the same, as
    far as a view that has everything is concerned."""


class FileChange(Struct, frozen=True):
    """A name that is not the same in both."""

    path: bytes
    """Absolute."""
    kind: str
    """ADDED, REMOVED or CHANGED."""
    what: tuple[str, ...] = ()
    """What differs where something CHANGED: content, kind, mode, owner, target (of a link),
    attributes, deletion."""
    before_bytes: int = 0
    after_bytes: int = 0


class Comparison(Struct, frozen=True):
    """All that differs, sorted."""

    packages: tuple[PackageChange, ...]
    files: tuple[FileChange, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.packages and not self.files


def snapshot_view(store: Store, manifest: Manifest) -> View:
    """A snapshot. Raises: as `catalogue.load_tree`."""
    return View(
        {target.path: load_tree(store, target) for target in manifest.targets},
        frozenset(
            target.path + b"/" + path for target in manifest.targets for path in target.deletions
        ),
        frozenset(target.path for target in manifest.targets if not target.whole),
    )


def disk_view(manifest: Manifest, directory: Path | None = None) -> View:
    """What lies on this host where the snapshot belongs, or, of a snapshot of one directory, in
    `directory`. All contents are read.

    Raises: NotFoundError, PermissionDeniedError; InvalidInputError for a `directory` and a
    snapshot of several.
    """
    paths = [target.path for target in manifest.targets]
    if directory is not None and len(paths) != 1:
        raise InvalidInputError(
            f"a snapshot of {len(paths)} directories cannot be compared with one; leave it out to "
            "compare with what is on disk"
        )
    trees = {}
    for path in paths:
        host = directory or resolve_in_root(Path("/"), path)
        if not host.is_dir():
            raise NotFoundError(f"{host} is not there to be compared; `snapshot restore` makes it")
        try:
            trees[path] = tar_directory(host, lambda data: None, one_file_system=True)
        except OSError as error:
            raise from_oserror(error, f"read {host}") from error
    return View(trees)


def compare(before: View, after: View) -> Comparison:
    """What differs between two views. Times do not count. Pure."""
    then, now = _entries(before), _entries(after)
    unknown_before, unknown_after = before.partial - after.partial, after.partial - before.partial
    changes = []
    for path in sorted({*then, *now}):
        if then.get(path, now.get(path)) is None and (path in now) != (path in then):
            # Removed by the one's set-up: the same as not being there at all, if that is known.
            if _is_below(path, before.partial & after.partial):
                changes.append(FileChange(path, CHANGED, ("deletion",)))
        elif path not in now:
            if not _is_below(path, unknown_after):
                changes.append(FileChange(path, REMOVED, (), _size(then[path])))
        elif path not in then:
            if not _is_below(path, unknown_before):
                changes.append(FileChange(path, ADDED, (), 0, _size(now[path])))
        elif what := _differences(then[path], now[path]):
            sizes = _size(then[path]), _size(now[path])
            changes.append(FileChange(path, CHANGED, what, *sizes))
    packages = compare_packages(
        packages_in(before.trees.values()), packages_in(after.trees.values())
    )
    if unknown_before or unknown_after:
        packages = tuple(change for change in packages if change.before and change.after)
    return Comparison(packages, tuple(changes))


def _is_below(path: bytes, targets: frozenset[bytes]) -> bool:
    return any(path == target or path.startswith(target + b"/") for target in targets)


def _entries(view: View) -> dict[bytes, Inode | None]:
    """Absolute path -> what is there; None: a set-up has removed it."""
    found: dict[bytes, Inode | None] = dict.fromkeys(view.deletions)
    for top, tree in view.trees.items():
        for path, number in tree.walk():
            if not path.startswith(STAGING_PREFIX) and b"/" + STAGING_PREFIX not in path:
                found[top + b"/" + path if path else top] = tree.inode(number)
    return found


def _size(inode: Inode | None) -> int:
    return inode.size_bytes if inode is not None and stat.S_ISREG(inode.mode) else 0


def _differences(before: Inode | None, after: Inode | None) -> tuple[str, ...]:
    if before is None or after is None:
        return () if before is after else ("deletion",)
    if stat.S_IFMT(before.mode) != stat.S_IFMT(after.mode):
        return ("kind",)
    pairs = (
        ("content", _content(before), _content(after)),
        ("mode", before.mode, after.mode),
        ("owner", (before.uid, before.gid), (after.uid, after.gid)),
        ("target", before.link_target, after.link_target),
        ("attributes", before.xattrs, after.xattrs),
        ("device", before.rdev, after.rdev),
    )
    return tuple(name for name, one, other in pairs if one != other)


def _content(inode: Inode) -> object:
    """What tells a file's content. One that is mostly holes has no digest: its size and time."""
    if not stat.S_ISREG(inode.mode):
        return None
    return inode.digest or (inode.size_bytes, inode.mtime_ns)


def nearest(parts: Sequence[Part], manifests: Iterable[Manifest]) -> Manifest | None:
    """Returns the snapshot that differs least from `parts`: one of the same command and targets if
    there is any, then with the fewest parts that differ, then the newest. Pure."""
    wanted = {part.name: part.value for part in parts}

    def distance(manifest: Manifest) -> tuple[bool, bool, int, int]:
        stored = {part.name: part.value for part in manifest.parts}
        names = {name for name, _ in wanted.items() ^ stored.items()}
        is_other_target = any(name.startswith("target ") for name in names)
        return ("command" in names, is_other_target, len(names), -manifest.created_ns)

    return min(manifests, key=distance, default=None)
