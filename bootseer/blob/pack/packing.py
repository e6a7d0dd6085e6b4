"""Packing of a directory into a blob and its tree (`pack_tar` does it for a tar stream).

`pack.members` lays out the members, `pack.frame_writer` compresses them. The same input, level and
frame size give the same bytes, whatever the number of threads. Several calls may run in parallel.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import BinaryIO

from msgspec import Struct, field

from bootseer.base.display import quoted
from bootseer.blob.pack.frame_writer import FRAME_BYTES, FrameWriter, PlainWriter, StreamWriter
from bootseer.blob.pack.members import Members, plain_size
from bootseer.blob.pack.stat_record import bounded_time_ns
from bootseer.blob.pack.tar_packing import pack_tar
from bootseer.blob.tree import Blob, Extent, Inode, Tree
from bootseer.errors import BootseerError, BusyError, NotFoundError, from_oserror

__all__ = ["pack_directory", "pack_tar", "tar_directory"]

_log = logging.getLogger(__name__)

# O_NONBLOCK: opening must not block if a fifo has replaced the file.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_READ_ATTEMPTS = 3


class ReusedContent(Struct, frozen=True):
    """Place of a file's content in blobs that are stored already."""

    extents: tuple[Extent, ...]
    """Extents without holes, after `head`. Blobs are numbered as in the new tree, where 0 is the
    new blob."""
    digest: bytes
    status: os.stat_result
    """Status of the file when its content was compared."""
    head: bytes = b""
    """First bytes of the file if they are not in the blobs."""


class ReusedFiles(Struct, frozen=True):
    """Files of a directory whose content is in stored blobs."""

    blobs: Sequence[Blob] = ()
    files: Mapping[bytes, ReusedContent] = field(default_factory=dict)
    """Places by path; a hard-linked file has an entry for each of its names."""


class _ScannedName(Struct, frozen=True):
    """Name that the walk has found."""

    path: bytes
    fd: int
    """Descriptor of the name's directory, or of the directory itself for a directory. It is closed
    when the next entry is requested."""
    name: bytes
    status: os.stat_result


_NO_REUSED_FILES = ReusedFiles()
_NO_IDENTITIES: Mapping[bytes, tuple[int, int]] = MappingProxyType({})


def pack_directory(
    root: str | os.PathLike[str],
    sink: BinaryIO,
    *,
    paths: Iterable[bytes] | None = None,
    one_file_system: bool = False,
    others: ReusedFiles = _NO_REUSED_FILES,
    identities: Mapping[bytes, tuple[int, int]] = _NO_IDENTITIES,
    level: int = 3,
    frame_bytes: int = FRAME_BYTES,
    threads: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Tree:
    """Write the blob of the directory `root` to `sink` (buffered), and return its tree.

    Sockets are left out, with a warning.

    Args:
        root: The directory.
        sink: File to write to. After an error its content is unusable.
        paths: Paths to pack (relative, b"usr/lib/x"), with the directories that lead to them; a
            directory is packed without its contents. None packs everything.
        one_file_system: Whether to leave out directories on other file systems.
        others: Files in stored blobs. Files that have not changed since are not packed; the tree
            refers to the stored blobs.
        identities: Identity of files by path, where st_dev and st_ino do not identify hard links.
        level: zstd level.
        frame_bytes: Size of the uncompressed content of a frame.
        threads: Number of compression threads; None for one per CPU.
        on_progress: Function that is called with counts of uncompressed bytes done.

    Raises: NotFoundError, PermissionDeniedError (naming the file that cannot be read), BusyError
    (a file changed while being read), OSError of the sink.
    """
    with FrameWriter(
        sink, level=level, frame_bytes=frame_bytes, threads=threads, on_progress=on_progress
    ) as writer:
        entries = _walk(root, paths=paths, one_file_system=one_file_system)
        return _write(root, entries, writer, others, identities)


def tar_directory(
    root: str | os.PathLike[str],
    sink: Callable[[bytes], object],
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Tree:
    """Pass the tar stream of a directory on one file system to `sink`, and return its tree.

    The stream is that of the blob which `pack_directory` makes, and `pack_tar` of the stream makes
    the same blob. The tree differs from that of `pack_directory` in the blob only, which has no
    frames. Raises: as `pack_directory`.
    """
    entries = _walk(root, paths=None, one_file_system=True)
    return _write(root, entries, PlainWriter(sink, on_progress), _NO_REUSED_FILES, _NO_IDENTITIES)


def _write(
    root: str | os.PathLike[str],
    entries: Iterable[_ScannedName],
    writer: StreamWriter,
    others: ReusedFiles,
    identities: Mapping[bytes, tuple[int, int]],
) -> Tree:
    first_names: dict[tuple[int, int], tuple[int, bytes]] = {}
    members = Members(writer)
    for entry in entries:
        status = entry.status
        identity = identities.get(entry.path) or (status.st_dev, status.st_ino)
        known = first_names.get(identity)
        if known is not None:
            members.add_hard_link(entry.path, *known)
            continue
        try:
            number = _add(members, writer, entry, others.files.get(entry.path))
        except _ReadError as error:
            shown = os.fsdecode(os.path.join(os.fsencode(root), entry.path))
            raise error.explain(shown) from error.__cause__
        if number is not None and status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            first_names[identity] = (number, entry.path)
    return members.finish(others.blobs)


class _ReadError(Exception):
    """Raised if the source cannot be read, to distinguish it from an OSError of the sink."""

    def explain(self, shown: str) -> BootseerError:
        cause = self.__cause__
        if isinstance(cause, OSError) and cause.errno not in (errno.ENOENT, errno.ELOOP):
            return from_oserror(cause, f"read {shown}")
        return BusyError(f"{shown} changed while being packed: try again when nothing writes to it")


def _add(
    members: Members, writer: StreamWriter, entry: _ScannedName, elsewhere: ReusedContent | None
) -> int | None:
    status = entry.status
    mode = status.st_mode
    if stat.S_ISREG(mode):
        try:
            fd = os.open(entry.name, _OPEN_FILE, dir_fd=entry.fd)
        except OSError as error:
            raise _ReadError from error
        try:
            if (
                elsewhere is not None
                and (inode := _unchanged_inode(entry.path, fd, elsewhere.status)) is not None
            ):
                return members.add_elsewhere(
                    entry.path, inode, elsewhere.extents, elsewhere.digest, elsewhere.head
                )
            return _add_file(members, writer, entry.path, fd)
        finally:
            os.close(fd)
    if stat.S_ISSOCK(mode):
        _log.warning("the socket %s is left out", os.fsdecode(entry.path))
        return None
    try:
        target = b""
        if stat.S_ISDIR(mode):
            xattrs = _xattrs_of(entry.fd)
        else:
            xattrs = _xattrs_of(f"/proc/self/fd/{entry.fd}/{os.fsdecode(entry.name)}")
            if stat.S_ISLNK(mode):
                target = os.readlink(entry.name, dir_fd=entry.fd)
    except OSError as error:
        raise _ReadError from error
    return members.add_plain(entry.path, _inode(entry.path, status, xattrs, target))


def _inode(
    path: bytes,
    status: os.stat_result,
    xattrs: tuple[tuple[bytes, bytes], ...],
    target: bytes = b"",
) -> Inode:
    mode = status.st_mode
    mtime_ns = bounded_time_ns(status.st_mtime_ns)
    if mtime_ns != status.st_mtime_ns:
        _log.warning("the time of %s is after the year 2262, and is stored as 2262", quoted(path))
    is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    return Inode(
        mode,
        status.st_uid,
        status.st_gid,
        mtime_ns,
        status.st_size if stat.S_ISREG(mode) else plain_size(mode, target),
        status.st_rdev if is_device else 0,
        target,
        xattrs,
    )


def _unchanged_inode(path: bytes, fd: int, before: os.stat_result) -> Inode | None:
    """Return the open file's attributes; None if it has changed since `before` or has holes."""
    try:
        status = os.fstat(fd)
        if status.st_ino != before.st_ino or not _unchanged(fd, before):
            return None
        if status.st_blocks * 512 < status.st_size and _data_segments(fd, status.st_size) != [
            (0, status.st_size)
        ]:
            return None
        return _inode(path, status, _xattrs_of(fd))
    except OSError as error:
        raise _ReadError from error


def _add_file(members: Members, writer: StreamWriter, path: bytes, fd: int) -> int:
    try:
        for _ in range(_READ_ATTEMPTS):
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _ReadError
            if status.st_size >= writer.frame_bytes:
                break
            content = os.pread(fd, status.st_size + 1, 0)
            if len(content) == status.st_size and _unchanged(fd, status):
                return members.add_small(path, _inode(path, status, _xattrs_of(fd)), content)
        else:
            raise _ReadError
        segments = None
        # Fewer blocks than bytes mean holes, or a file system that compresses.
        if status.st_blocks * 512 < status.st_size:
            segments = _data_segments(fd, status.st_size)
            if segments == [(0, status.st_size)]:
                segments = None
        inode = _inode(path, status, _xattrs_of(fd))
    except OSError as error:
        raise _ReadError from error

    def read(offset: int, length: int) -> bytes:
        try:
            data = os.pread(fd, length, offset)
            while 0 < len(data) < length:
                more = os.pread(fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise _ReadError from error
        if len(data) != length:
            raise _ReadError
        return data

    number = members.add_large(path, inode, read, segments)
    if not _unchanged(fd, status):
        raise _ReadError
    return number


def _unchanged(fd: int, before: os.stat_result) -> bool:
    after = os.fstat(fd)
    return (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


# ---- the walk through a directory ---------------------------------------------------------------

# Directories are opened relative to their parents, and symbolic links are never followed: a link
# that replaces a directory during the walk is an error.

_HOLE_ALIGNMENT = 4096
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Labels of this host's security policy, and attributes of overlayfs: invalid on other machines.
_LOCAL_XATTRS = ("security.selinux", "trusted.overlay.", "user.overlay.", "system.nfs4_acl")


def _walk(
    root: str | bytes | os.PathLike[str],
    *,
    paths: Iterable[bytes] | None = None,
    one_file_system: bool = False,
) -> Iterator[_ScannedName]:
    """Yield every name below `root`, and first the root itself.

    With `paths`, yield only these and the directories that lead to them, without the contents of a
    directory among them. Raises: NotFoundError, PermissionDeniedError, BusyError (a name changed
    during the walk), each naming the path.
    """
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
        yield _ScannedName(b"", fd, b"", status)
        stack = [(b"", iter(_names(fd, b"", shown, wanted)))]
        while stack:
            prefix, names = stack[-1]
            name = next(names, None)
            if name is None:
                stack.pop()
                os.close(fds.pop())
                continue
            path = prefix + name
            try:
                status = os.stat(name, dir_fd=fds[-1], follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    if wanted is not None and path in wanted:
                        raise NotFoundError(f"{_show(shown, path)} is not a directory")
                    yield _ScannedName(path, fds[-1], name, status)
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
            yield _ScannedName(path, fds[-1], b"", status)
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


def _xattrs_of(target: int | str) -> tuple[tuple[bytes, bytes], ...]:
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


def _data_segments(fd: int, size: int) -> list[tuple[int, int]]:
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
