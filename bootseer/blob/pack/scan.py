"""Walk through a directory for packing: every name once, in the order of `Tree.walk`.

Also: exclude patterns, extended attributes to pack, and the search for holes. Directories are
opened relative to their parents, and symbolic links are never followed: a link that replaces a
directory during the walk is an error.
"""

import errno
import fnmatch
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from bootseer.base.display import quoted
from bootseer.errors import BootseerError, BusyError, NotFoundError, from_oserror

_log = logging.getLogger(__name__)

_HOLE_ALIGNMENT = 4096
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Labels of this host's security policy, and attributes of overlayfs: invalid on other machines.
_LOCAL_XATTRS = ("security.selinux", "trusted.overlay.", "user.overlay.", "system.nfs4_acl")


class ScannedName(Struct, frozen=True):
    """Name that the walk has found."""

    path: bytes
    fd: int
    """Descriptor of the name's directory, or of the directory itself for a directory. It is closed
    when the next entry is requested."""
    name: bytes
    status: os.stat_result


def excluder(patterns: Iterable[str | bytes]) -> Callable[[bytes], bool]:
    """Return the function that says whether a path is excluded.

    A pattern with "/" is matched against the whole path, any other against the last component. "*"
    also matches "/".
    """
    anywhere: list[str] = []
    whole: list[str] = []
    for pattern in patterns:
        text = os.fsdecode(pattern).strip("/")
        (whole if "/" in text else anywhere).append(fnmatch.translate(text))
    if not anywhere and not whole:
        return lambda path: False
    never = "(?!)"
    match_name = re.compile("|".join(anywhere) or never).match
    match_path = re.compile("|".join(whole) or never).match

    def excluded(path: bytes) -> bool:
        text = os.fsdecode(path)
        return bool(match_path(text) or match_name(text.rpartition("/")[2]))

    return excluded


def scan(
    root: str | bytes | os.PathLike[str],
    *,
    paths: Iterable[bytes] | None = None,
    exclude: Iterable[str | bytes] = (),
    one_file_system: bool = False,
) -> Iterator[ScannedName]:
    """Yield every name below `root`, and first the root itself.

    With `paths`, yield only these and the directories that lead to them, without the contents of a
    directory among them. Raises: NotFoundError, PermissionDeniedError, BusyError (a name changed
    during the walk), each naming the path.
    """
    excluded = excluder(exclude)
    wanted = None if paths is None else _by_directory(paths)
    shown = os.fsencode(root)
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise from_oserror(error, f"open the directory {os.fsdecode(shown)}") from error
    fds = [fd]
    try:
        status = os.fstat(fd)
        device = status.st_dev
        yield ScannedName(b"", fd, b"", status)
        stack = [(b"", iter(_names(fd, b"", shown, wanted)))]
        while stack:
            prefix, names = stack[-1]
            name = next(names, None)
            if name is None:
                stack.pop()
                os.close(fds.pop())
                continue
            path = prefix + name
            if excluded(path):
                continue
            try:
                status = os.stat(name, dir_fd=fds[-1], follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    if wanted is not None and path in wanted:
                        raise NotFoundError(f"{_show(shown, path)} is not a directory")
                    yield ScannedName(path, fds[-1], name, status)
                    continue
                if one_file_system and status.st_dev != device:
                    _log.warning("%s is on another file system and is left out", _show(shown, path))
                    continue
                fds.append(os.open(name, _OPEN_DIRECTORY, dir_fd=fds[-1]))
                status = os.fstat(fds[-1])
            except BootseerError:
                raise
            except OSError as error:
                raise _explain(error, shown, path, listed=wanted is None) from error
            yield ScannedName(path, fds[-1], b"", status)
            stack.append((path + b"/", iter(_names(fds[-1], path, shown, wanted))))
    finally:
        for fd in fds:
            os.close(fd)


def _show(root: bytes, path: bytes) -> str:
    return os.fsdecode(os.path.join(root, path) if path else root)


def _explain(error: OSError, root: bytes, path: bytes, *, listed: bool) -> BootseerError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and listed:
        return BusyError(f"{_show(root, path)} changed while being packed: try again")
    return from_oserror(error, f"read {_show(root, path)}")


def _names(
    fd: int, path: bytes, root: bytes, wanted: dict[bytes, set[bytes]] | None
) -> Sequence[bytes]:
    if wanted is not None:
        return sorted(wanted.get(path, ()))
    try:
        return sorted(map(os.fsencode, os.listdir(fd)))
    except OSError as error:
        raise from_oserror(error, f"list {_show(root, path)}") from error


def _by_directory(paths: Iterable[bytes]) -> dict[bytes, set[bytes]]:
    """Return the names to yield in each directory, including those of leading directories."""
    wanted: dict[bytes, set[bytes]] = {}
    for path in paths:
        parts = path.split(b"/")
        if path.startswith(b"/") or any(part in (b"", b".", b"..") for part in parts):
            if path in (b"", b"."):
                continue
            raise NotFoundError(f"{quoted(path)} is not a path relative to the packed directory")
        for i in range(len(parts) - 1, -1, -1):
            names = wanted.setdefault(b"/".join(parts[:i]), set())
            if parts[i] in names:
                break
            names.add(parts[i])
    return wanted


def xattrs_of(target: int | str) -> tuple[tuple[bytes, bytes], ...]:
    """Return the extended attributes of an open file or a path, sorted. Raises: OSError.

    A symbolic link is not followed. Attributes that are valid on this host only are left out.
    """
    follow = isinstance(target, int)
    try:
        names = os.listxattr(target, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            return ()
        raise
    if not names:
        return ()
    found = []
    for name in names:
        if not name.startswith(_LOCAL_XATTRS):
            found.append((os.fsencode(name), os.getxattr(target, name, follow_symlinks=follow)))
    return tuple(sorted(found))


def data_segments(fd: int, size: int) -> list[tuple[int, int]]:
    """Return the segments (offset, length) of a file that are not holes, in order.

    Segments begin and end on 4 KiB boundaries. Raises: OSError.
    """
    segments: list[tuple[int, int]] = []
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        # GNU tar reads only segments made of whole blocks.
        start -= start % _HOLE_ALIGNMENT
        end = min(end + -end % _HOLE_ALIGNMENT, size)
        if segments and start <= sum(segments[-1]):
            start = segments.pop()[0]
        if end > start:
            segments.append((start, end - start))
        position = max(end, position + 1)
    return segments
