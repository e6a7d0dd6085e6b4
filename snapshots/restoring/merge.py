"""Moves an extracted tree into a directory that exists, name by name.

Alone owns the order of those moves. Everything works relative to open directories and follows no
symbolic link. Every step can be repeated: after a crash the same calls, on what is left of the
staged tree, end in the same result. The caller holds the target's lock.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from bootseer.blob.tree import Inode, Tree
from bootseer.linux.removal import remove_tree

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _mode(name: bytes, dir_fd: int) -> int:
    """The mode of a name, or 0 where there is none."""
    try:
        return os.lstat(name, dir_fd=dir_fd).st_mode
    except FileNotFoundError:
        return 0


def move_into(staged: int, target: int) -> None:
    """Every name in the directory `staged` moves into the directory `target` (both descriptors).

    A file replaces what has its name in one step. A directory moves as a whole where nothing is
    in its place, else name by name. `staged` is empty afterwards.
    """
    merged = [b""]
    # The list grows while it is gone through: trees are deeper than Python's stack and than there
    # are descriptors.
    for path in merged:
        with _below(staged, path) as source, _below(target, path) as place:
            for name_text in os.listdir(source):
                name = os.fsencode(name_text)
                if not _move(name, source, place):
                    merged.append(path + b"/" + name if path else name)
    for path in reversed(merged[1:]):
        parent, _, name = path.rpartition(b"/")
        with _below(staged, parent) as source:
            os.rmdir(name, dir_fd=source)


def _move(name: bytes, staged: int, target: int) -> bool:
    """Move a name; False for a directory that is to be moved name by name, and is in `target`."""
    there = _mode(name, target)
    if not stat.S_ISDIR(_mode(name, staged)):
        if stat.S_ISDIR(there):
            remove_tree(name, dir_fd=target)
        os.rename(name, name, src_dir_fd=staged, dst_dir_fd=target)
        return True
    if stat.S_ISDIR(there):
        return False
    if there:
        os.unlink(name, dir_fd=target)
    try:
        os.rename(name, name, src_dir_fd=staged, dst_dir_fd=target)
        return True
    except OSError as error:
        # Overlayfs cannot rename a directory that a lower layer knows.
        if error.errno != errno.EXDEV:
            raise
    os.mkdir(name, 0o700, dir_fd=target)
    return False


def delete(target: int, paths: Iterable[bytes]) -> None:
    """Remove relative `paths` below the directory `target`; what is missing already is no error.

    A directory goes with whatever appeared in it since: bytecode that was not there when the
    snapshot was made.
    """
    for path in sorted(paths, reverse=True):
        parent, _, name = path.rpartition(b"/")
        try:
            with _below(target, parent) as fd:
                if stat.S_ISDIR(_mode(name, fd)):
                    remove_tree(name, dir_fd=fd)
                else:
                    os.unlink(name, dir_fd=fd)
        except (FileNotFoundError, NotADirectoryError):
            continue  # done before, or its directory is none any more
        except OSError as error:
            # A symbolic link took its directory's place: nothing of ours lies behind it.
            if error.errno != errno.ELOOP:
                raise


@contextmanager
def _below(top: int, path: bytes) -> Iterator[int]:
    """The directory at `path` below `top`, opened component by component."""
    fd = os.dup(top)
    try:
        for part in path.split(b"/") if path else ():
            inner = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def set_directories(target: int, tree: Tree) -> None:
    """Give every directory of `tree` its attributes, deepest first; the last step of a merge,
    since every move into a directory changes its times. Missing ones are left out."""
    directories = [
        (path, number) for path, number in tree.walk() if stat.S_ISDIR(tree.mode(number))
    ]
    for path, number in reversed(directories):
        try:
            with _below(target, path) as fd:
                _set_directory(fd, tree.inode(number))
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed since, by a user who did not wait for the recovery


def _set_directory(fd: int, inode: Inode) -> None:
    now = os.fstat(fd)
    if os.geteuid() == 0 and (now.st_uid, now.st_gid) != (inode.uid, inode.gid):
        os.fchown(fd, inode.uid, inode.gid)
    if stat.S_IMODE(now.st_mode) != stat.S_IMODE(inode.mode):
        os.fchmod(fd, stat.S_IMODE(inode.mode))
    _set_xattrs(fd, dict(inode.xattrs))
    if now.st_mtime_ns != inode.mtime_ns:
        os.utime(fd, ns=(now.st_atime_ns, inode.mtime_ns))


def _set_xattrs(fd: int, wanted: dict[bytes, bytes]) -> None:
    """Set what is missing; extra ones in the user's own namespace go."""
    try:
        present = [os.fsencode(name) for name in os.listxattr(fd)]
    except OSError:
        return  # a file system without them
    for name in present:
        if name.startswith(b"user.") and name not in wanted:
            os.removexattr(fd, name)
    for name, value in wanted.items():
        try:
            if name not in present or os.getxattr(fd, name) != value:
                os.setxattr(fd, name, value)
        except OSError as error:
            # As an extraction does: what this file system or user may not have is left out.
            if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EACCES):
                raise
