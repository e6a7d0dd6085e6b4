"""Differences: between two snapshots, a snapshot and the disk, or the parts of two keys.

Everything but `snapshot_view` and `disk_view` is pure.
"""

import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.base.package_names import Package, package_of
from bootseer.blob.tree import Inode, Tree
from bootseer.errors import InvalidInputError, NotFoundError, from_oserror
from bootseer.linux.root_paths import resolve_in_root
from bootseer.snapshots.catalogue import load_tree
from bootseer.snapshots.key_parts import SECRETS, Part
from bootseer.snapshots.manifest import Manifest
from bootseer.snapshots.scan import NOTHING, STAGING_PREFIX
from bootseer.store import Store

_LISTED_MAX = 3


class Difference(Struct, frozen=True):
    """Part of a key that differs."""

    part: str
    stored: str | None
    """Value in the stored snapshot; None if it has no such part."""
    now: str | None
    note: str
    """Meaning of the difference in words; may be empty."""


def compare_parts(stored: Iterable[Part], now: Iterable[Part]) -> tuple[Difference, ...]:
    """Return the parts that differ, sorted by name. Pure.

    The part of the secrets is salted with all other parts except the former contents of the
    targets. So it is listed only if those other parts are equal, or one side has no such part.
    """
    before = {part.name: part.value for part in stored}
    after = {part.name: part.value for part in now}
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if SECRETS in before.keys() & after.keys() and any(
        name != SECRETS and not name.startswith("before ") for name in names
    ):
        names = [name for name in names if name != SECRETS]
    return tuple(
        Difference(name, before.get(name), after.get(name), _note(name, before, after))
        for name in names
    )


def _note(name: str, before: dict[str, str], after: dict[str, str]) -> str:
    stored, now = before.get(name), after.get(name)
    kind, _, what = name.partition(" ")
    if kind == "target":
        return "another list of targets"
    if stored is None:
        return "decides the result now, did not then"
    if now is None:
        return "decided the result then, does not now"
    if name == "interpreter":
        return _interpreter_note(stored, now)
    if kind == "before":
        if now == NOTHING:
            return f"{what} is missing or empty now"
        return f"{what} holds something {'already' if stored == NOTHING else 'else'}"
    return {
        "input": "its contents have changed",
        "exists": "it is there, or is of another kind",
        "wheels": "other wheels lie there",
        "env": "the variable has another value",
        SECRETS: "a declared variable or a hidden word has another value",
        "command": "the command is another one",
        "image": "the image is another one",
        "salt": "the salt is another one",
        "installation": "Python lies in another place",
        "settings": "these settings are others",
        "directory": "the working directory is another one",
    }.get(kind, "")


def _interpreter_note(stored: str, now: str) -> str:
    """Return the difference between two values of "implementation version abi", in words."""
    before, after = stored.split(), now.split()
    if len(before) < 2 or len(after) < 2 or before[0] != after[0]:
        return "another interpreter"
    if before[1].split(".")[:2] == after[1].split(".")[:2]:
        if before[2:] == after[2:] and before[1] != after[1]:
            return f"only the patch version differs: {before[1]} then, {after[1]} now"
        return "another ABI"
    return f"another version of Python: {before[1]} then, {after[1]} now"


def in_words(differences: Sequence[Difference]) -> str:
    """Return the differences in one line, the first few of many."""
    listed = [
        f"{one.part} ({one.note})" if one.note else one.part for one in differences[:_LISTED_MAX]
    ]
    more = len(differences) - len(listed)
    return "; ".join(listed) + (f"; and {more} more" if more else "")


class PackageChange(Struct, frozen=True):
    """Package whose version differs, or that only one side has."""

    package: Package
    before: str | None
    """Version; several, if there are several environments; None if the package is missing."""
    after: str | None


def _packages_in(trees: Iterable[Tree]) -> dict[Package, str]:
    """Return the version of each package in the trees; several versions are joined by ", "."""
    found: dict[Package, set[str]] = {}
    for tree in trees:
        for path, number in tree.walk():
            if path.endswith((b"-info", b".json")):
                package = package_of(path, stat.S_ISDIR(tree.mode(number)))
                if package is not None:
                    found.setdefault(package[0], set()).add(package[1])
    return {package: ", ".join(sorted(versions)) for package, versions in found.items()}


def _compare_packages(
    before: Mapping[Package, str], after: Mapping[Package, str]
) -> tuple[PackageChange, ...]:
    return tuple(
        PackageChange(package, before.get(package), after.get(package))
        for package in sorted({*before, *after})
        if before.get(package) != after.get(package)
    )


ADDED, REMOVED, CHANGED = "added", "removed", "changed"


class View(Struct, frozen=True):
    """Contents of directories, each as a tree."""

    trees: Mapping[bytes, Tree]
    """The trees of the targets by absolute path."""
    deletions: frozenset[bytes] = frozenset()
    """Absolute paths that a set-up removed."""
    partial: frozenset[bytes] = frozenset()
    """Targets of which only a difference is known: a name that is missing in their tree may exist
    nevertheless."""


class FileChange(Struct, frozen=True):
    """Name that differs, or that only one side has."""

    path: bytes
    """Absolute."""
    kind: str
    """ADDED, REMOVED or CHANGED."""
    what: tuple[str, ...] = ()
    """Differing attributes of a CHANGED name: content, kind, mode, owner, target (of a link),
    attributes, deletion."""
    before_bytes: int = 0
    after_bytes: int = 0


class ViewDifferences(Struct, frozen=True):
    """Differences between two views, sorted."""

    packages: tuple[PackageChange, ...]
    files: tuple[FileChange, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.packages and not self.files


def snapshot_view(store: Store, manifest: Manifest) -> View:
    """Return the view of a snapshot. Raises: as `catalogue.load_tree`."""
    return View(
        {target.path: load_tree(store, target) for target in manifest.targets},
        frozenset(
            target.path + b"/" + path for target in manifest.targets for path in target.deletions
        ),
        frozenset(target.path for target in manifest.targets if not target.whole),
    )


def disk_view(manifest: Manifest, directory: Path | None = None) -> View:
    """Return the contents of the snapshot's directories on this host, or of `directory`.

    `directory` stands in for the directory of a snapshot that has one. All contents are read.

    Raises: NotFoundError, PermissionDeniedError; InvalidInputError for a `directory` and a snapshot
    of several.
    """
    from bootseer.blob.pack.packing import tar_directory  # here: all others compare trees

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
            trees[path] = tar_directory(host, lambda data: None)
        except OSError as error:
            raise from_oserror(error, f"read {host}") from error
    return View(trees)


def compare(before: View, after: View) -> ViewDifferences:
    """Return the differences between two views. Times do not count. Pure."""
    then, now = _entries(before), _entries(after)
    unknown_before, unknown_after = before.partial - after.partial, after.partial - before.partial
    changes = []
    for path in sorted({*then, *now}):
        if then.get(path, now.get(path)) is None and (path in now) != (path in then):
            # A path that a set-up removed equals a missing one, if all of the target is known.
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
    packages = _compare_packages(
        _packages_in(before.trees.values()), _packages_in(after.trees.values())
    )
    if unknown_before or unknown_after:
        packages = tuple(change for change in packages if change.before and change.after)
    return ViewDifferences(packages, tuple(changes))


def _is_below(path: bytes, targets: frozenset[bytes]) -> bool:
    return any(path == target or path.startswith(target + b"/") for target in targets)


def _entries(view: View) -> dict[bytes, Inode | None]:
    """Return absolute path -> inode; None for a path that a set-up has removed."""
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
    """Return a value that changes with a file's content.

    Files that are mostly holes have no digest; their value is made of size and time.
    """
    if not stat.S_ISREG(inode.mode):
        return None
    return inode.digest or (inode.size_bytes, inode.mtime_ns)


def nearest(parts: Sequence[Part], manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the snapshot that differs least from `parts`.

    Snapshots of the same command and targets come first, then those with the fewest differing
    parts, then the newest. Pure.
    """
    wanted = {part.name: part.value for part in parts}

    def distance(manifest: Manifest) -> tuple[bool, bool, int, int]:
        stored = {part.name: part.value for part in manifest.parts}
        names = {name for name, _ in wanted.items() ^ stored.items()}
        is_other_target = any(name.startswith("target ") for name in names)
        return ("command" in names, is_other_target, len(names), -manifest.created_ns)

    return min(manifests, key=distance, default=None)
