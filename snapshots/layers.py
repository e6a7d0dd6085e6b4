"""Layers of a container's root: the contents of overlayfs' upper directory.

An upper directory holds copies of changed files, whiteouts, and attributes of directories
(Documentation/filesystems/overlayfs.rst in Linux). `scan_before` and `scan_after` deduce the
contents of a target from the upper directory, and so need not look at each name: names in the upper
directory were written, and are looked at in the root itself; all other names are unchanged. If
something else may have changed the target (another mount, a renamed directory), the ordinary scan
is made. Reads only, follows no symbolic link. One thread.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, field

from bootseer.errors import BootseerError
from bootseer.linux import mount_table
from bootseer.snapshots.scan import STAGING_PREFIX, Entry, Scan, entry_of, open_below, scan

if TYPE_CHECKING:
    from bootseer.blob.tree import Tree

logger = logging.getLogger(__name__)
# The second prefix is used by mounts of ordinary users ("userxattr").
_PREFIXES = ("trusted.overlay.", "user.overlay.")
# Attributes of a directory that shows exactly what the layers have at its own path.
_HARMLESS = {"opaque", "origin", "impure", "nlink", "upper", "uuid", "protattr"}


class CannotTellError(Exception):
    """The layers do not tell the changes; an ordinary scan is needed."""


class Layers(Struct, frozen=True):
    """Overlay that is the root of a container."""

    root: Path
    """Mount point of the overlay."""
    upper: Path
    """Upper directory: every change since the overlay was mounted."""
    lower: Path
    """Lower directory of the overlay; read-only."""
    tree: Callable[[], "Tree"] | None = None
    """Function that returns the contents of `lower`, faster than its file system. May raise a
    BootseerError."""


class Written(NamedTuple):
    """Name in an upper directory."""

    mode: int
    uid: int
    gid: int
    inode: int
    ctime_ns: int
    """0 for a directory, whose ctime changes with its entries."""
    is_opaque: bool = False
    """Whether the lower directory is hidden (overlayfs' "opaque")."""
    is_empty: bool = False
    """Whether this is a directory without any name, ignored names included."""


WHITEOUT = Written(stat.S_IFCHR, 0, 0, 0, 0)
"""Name that was removed. All whiteouts are links of one file, so their attributes mean nothing."""


def _check_directory(upper: bytes) -> None:
    """Check that names missing in an upper directory show from the lower one of the same path.

    Raises: CannotTellError if they may not, because a directory was renamed ("redirect") or has an
    attribute of another kernel; OSError.
    """
    for name in _attributes(upper):
        for prefix in _PREFIXES:
            if name.startswith(prefix) and name.removeprefix(prefix) not in _HARMLESS:
                raise CannotTellError(f"{os.fsdecode(upper)} has the attribute {name}")


def _attributes(path: bytes) -> list[str]:
    return os.listxattr(path, follow_symlinks=False)


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(directory: bytes) -> bool:
    """Return whether a directory is opaque: nothing of the lower directory shows.

    False if it cannot be read.
    """
    for prefix in _PREFIXES:
        with contextlib.suppress(OSError):
            if os.getxattr(directory, f"{prefix}opaque", follow_symlinks=False) == b"y":
                return True
    return False


def written(
    upper: Path, is_ignored: Callable[[bytes], bool], *, names_max: int
) -> tuple[dict[bytes, Written], bool]:
    """Return path -> entry in the upper directory, without ignored paths and anything below them.

    Also return whether the entries are complete: about `names_max` names are read at most. Parents
    come before the names in them. Names that are removed meanwhile are left out.
    """
    top = os.fsencode(upper)
    found: dict[bytes, Written] = {}
    stack = [b""]
    while stack:
        if len(found) > names_max:
            return found, False
        above = stack.pop()
        names = 0
        for path, info in _entries(top, above):
            names += 1
            if is_ignored(path):
                continue
            if stat.S_ISDIR(info.st_mode):
                opaque = is_opaque(os.path.join(top, path))
                found[path] = Written(
                    info.st_mode, info.st_uid, info.st_gid, info.st_ino, 0, is_opaque=opaque
                )
                stack.append(path)
            elif _is_whiteout(info):
                found[path] = WHITEOUT
            else:
                found[path] = Written(
                    info.st_mode, info.st_uid, info.st_gid, info.st_ino, info.st_ctime_ns
                )
        if not names and above:
            found[above] = found[above]._replace(is_empty=True)
    return found, True


def _entries(top: bytes, above: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    try:
        with os.scandir(os.path.join(top, above)) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    path = above + b"/" + entry.name if above else entry.name
                    yield path, entry.stat(follow_symlinks=False)
    except OSError:
        return


# Device of an entry from a tree: no file was looked at, and none has this device.
_UNSEEN = 0


def scan_before(layers: Layers | None, target: Path) -> Scan:
    """Scan a target, through the served tree below it if there is one. See `scan.scan`.

    Entries from the tree have its inode numbers, and 0 as the device.
    """
    if layers is not None and layers.tree is not None:
        try:
            known = _scan_tree(layers.tree(), _below(layers, target))
            return _layered(layers, target, known)
        except (CannotTellError, BootseerError, OSError) as error:
            logger.info("scanning %s: %s", target, error)
    return scan(target)


def scan_after(layers: Layers | None, target: Path, before: Scan) -> Scan:
    """Scan a target after a set-up. `before` is a scan of the same directory from an earlier time.

    Unchanged names have the same entry as in `before`. See `scan.scan`.
    """
    if layers is None:
        return scan(target)
    try:
        return _layered(layers, target, before)
    except (CannotTellError, OSError) as error:
        logger.info("scanning %s: %s", target, error)
    return {
        path: before[path] if _is_unseen_and_same(before.get(path), entry) else entry
        for path, entry in scan(target).items()
    }


def hard_links(layers: Layers, target: Path, scanned: Scan) -> dict[bytes, tuple[int, int]]:
    """Return path -> (device, inode) in the upper directory, for written files with several names.

    In the root, the first name of a file that was copied up when it got another one still has the
    inode number of the lower file, and the other one has not.
    """
    below = _below(layers, target)
    try:
        _check_mounts(layers, below)
    except CannotTellError:
        return {}
    upper = os.path.join(os.fsencode(layers.upper), below)
    found = {}
    for path, entry in scanned.items():
        if entry.link_count > 1 and not stat.S_ISDIR(entry.mode):
            with contextlib.suppress(OSError):
                info = os.lstat(os.path.join(upper, path))
                found[path] = (info.st_dev, info.st_ino)
    return found


def _is_unseen_and_same(before: Entry | None, now: Entry) -> bool:
    # The ctimes of a served tree are its mtimes; a writer cannot set a ctime.
    return (
        before is not None
        and before.device == _UNSEEN
        and (before.mode, before.ctime_ns) == (now.mode, now.ctime_ns)
    )


def _below(layers: Layers, target: Path) -> bytes:
    path = os.fsencode(target.relative_to(layers.root.absolute()))
    return b"" if path == b"." else path


# ---- the lower tree ---------------------------------------------------------------------------
def _scan_tree(tree: "Tree", directory: bytes) -> Scan:
    """Return a scan of a directory of a served tree: paths, types, sizes, modes and times.

    Empty if there is no such directory. Pure, but for the loading of the tree.

    Raises: CannotTellError for a tree in which overlayfs would see more than files.
    """
    if any(b".overlay." in name for xattrs in tree.columns.xattr_sets for name, _ in xattrs):
        raise CannotTellError("the image has attributes of overlayfs")
    top = tree.resolve(directory)
    if top is None or not stat.S_ISDIR(tree.mode(top)):
        return {}
    columns = tree.columns
    names, inodes = columns.names, columns.name_inode
    modes, uids, gids = columns.mode, columns.uid, columns.gid
    sizes, times = columns.size_bytes, columns.mtime_ns

    def entry(number: int) -> Entry:
        mode, time_ns = modes[number], times[number]
        size = len(tree.link_target(number)) if stat.S_ISLNK(mode) else sizes[number]
        attributes = (mode, uids[number], gids[number], size, time_ns, time_ns, number + 1)
        return Entry(*attributes, _UNSEEN, _UNSEEN)

    found = {b"": entry(top)}
    stack = [(b"", top)]
    while stack:
        prefix, directory_number = stack.pop()
        for i in range(*tree.span(directory_number)):
            if names[i].startswith(STAGING_PREFIX):
                continue
            number = inodes[i]
            path = prefix + names[i]
            found[path] = one = entry(number)
            if stat.S_ISDIR(one.mode):
                stack.append((path + b"/", number))
            elif stat.S_ISCHR(one.mode) and not columns.rdev[number]:
                raise CannotTellError("the image has a whiteout of overlayfs")
    return found


# ---- the upper layer --------------------------------------------------------------------------
class _Touched(Struct):
    """Part of a target in which something was written."""

    seen: dict[bytes, Entry] = field(default_factory=dict)
    """Entries of the names in the upper directory, as the root shows them."""
    listed: dict[bytes, list[bytes]] = field(default_factory=dict)
    """Directory in the upper layer -> paths in it that come from the lower layer."""


def _layered(layers: Layers, target: Path, known: Scan) -> Scan:
    """Return the scan `known` with the changes in the upper directory.

    Raises: CannotTellError, OSError.
    """
    if not target.is_dir():
        return scan(target)
    below = _below(layers, target)
    _check_mounts(layers, below)
    upper = os.fsencode(layers.upper)
    for part in below.split(b"/") if below else ():
        _check_directory(upper)
        upper = os.path.join(upper, part)
        try:
            if not stat.S_ISDIR(os.lstat(upper).st_mode):
                raise CannotTellError(f"{os.fsdecode(upper)} is no directory")
        except FileNotFoundError:
            # Nothing was written below the target, nor renamed into it.
            if not known:
                raise CannotTellError(f"nothing is known of {target}") from None
            return known
    touched = _look(target, upper)
    return _merge_scans(known, touched.seen, touched.listed)


def _check_mounts(layers: Layers, below: bytes) -> None:
    """Check that nothing else is mounted at, above or below the target. Raises: CannotTellError."""
    root = os.fsencode(os.path.realpath(layers.root))
    target = os.path.join(root, below) if below else root
    for point in (mount.path for mount in mount_table.mount_points()):
        if point == root or not point.startswith(root + b"/"):
            continue
        if point == target or point.startswith(target + b"/") or target.startswith(point + b"/"):
            raise CannotTellError(f"something is mounted on {os.fsdecode(point)}")


def _look(target: Path, upper: bytes) -> _Touched:
    touched = _Touched()
    top = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(top)
        touched.seen[b""] = entry_of(status)
        stack = [b""]
        while stack:
            path = stack.pop()
            fd = open_below(top, path) if path else top
            try:
                stack += _look_into(touched, fd, path, os.path.join(upper, path), status.st_dev)
            finally:
                if fd != top:
                    os.close(fd)
    finally:
        os.close(top)
    return touched


def _look_into(
    touched: _Touched, fd: int, directory: bytes, upper: bytes, device: int
) -> list[bytes]:
    """Note the entries of a directory; return its subdirectories in which something was written."""
    _check_directory(upper)
    # In this order: a name that is copied up between the two calls counts as written.
    shown = [os.fsencode(name) for name in os.listdir(fd)]
    written = set(os.listdir(upper))
    lower = touched.listed[directory] = []
    found = []
    for name in shown:
        if name.startswith(STAGING_PREFIX):
            continue
        path = directory + b"/" + name if directory else name
        if name not in written:
            lower.append(path)
            continue
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            # Removed meanwhile; or a whiteout, which overlayfs lists in a directory that it does
            # not merge.
            continue
        touched.seen[path] = entry_of(info)
        if stat.S_ISDIR(info.st_mode) and info.st_dev == device:
            found.append(path)
    return found


def _merge_scans(
    known: Scan, seen: Mapping[bytes, Entry], listed: Mapping[bytes, Sequence[bytes]]
) -> Scan:
    """Return the contents of a directory from an earlier scan and the written names. Pure.

    `known`: the earlier scan. `seen`: everything that was written. `listed`: for each directory in
    `seen`, the paths in it that are not in `seen`: they are as they were, with everything below.

    Raises: CannotTellError for a listed path that is not known.
    """
    found = dict(seen)
    shown = {path for paths in listed.values() for path in paths}
    if not shown <= known.keys():
        raise CannotTellError(f"{next(iter(shown - known.keys()))!r} was not there")
    whole: set[bytes] = set()
    # Parents come before the names in them.
    for path, entry in known.items():
        if path in shown or path.rpartition(b"/")[0] in whole:
            found[path] = entry
            if stat.S_ISDIR(entry.mode):
                whole.add(path)
    return found
