"""Copies a tree whose files share their blocks with those of the first (reflink).

Alone owns that copy: exact in every attribute, in parallel, into a new directory that no process
looks at yet. Follows no symbolic links. Owns its threads.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bootseer.blob.pack.frame_writer import usable_cpus
from bootseer.errors import from_oserror
from bootseer.snapshots.restoring.linking.node_trees import clone

_THREADS_MAX = 8
# Directories that a thread does in one go: handing one over costs as much as linking ten files.
_AT_ONCE = 32


def copy_tree(source: Path, target: Path) -> None:
    """Make `target`, which must not exist, equal to the directory `source`.

    Raises: BootseerError; what was made by then is left for the caller to remove.
    """
    try:
        _Copy(source, target).run()
    except OSError as error:
        raise from_oserror(error, f"link {source} to {target}") from error


class _Copy:
    def __init__(self, source: Path, target: Path) -> None:
        self._source = os.fsencode(source)
        self._target = os.fsencode(target)
        self._lock = threading.Lock()
        # (device, inode) of files with several names -> the first one's path.
        self._first: dict[tuple[int, int], bytes] = {}
        self._links: list[tuple[bytes, bytes]] = []

    def run(self) -> None:
        directories = [b""]
        files: list[list[os.DirEntry[bytes]]] = []
        os.mkdir(self._target, 0o700)
        for directory in directories:
            files.append([])
            with os.scandir(os.path.join(self._source, directory)) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        path = os.path.join(directory, entry.name)
                        os.mkdir(os.path.join(self._target, path), 0o700)
                        directories.append(path)
                    else:
                        files[-1].append(entry)
        work = [pair for pair in zip(directories, files, strict=True) if pair[1]]
        with ThreadPoolExecutor(min(usable_cpus(), _THREADS_MAX)) as pool:
            pieces = (work[i : i + _AT_ONCE] for i in range(0, len(work), _AT_ONCE))
            for done in [pool.submit(self._copy_all, piece) for piece in pieces]:
                done.result()
        for first, path in self._links:
            os.link(first, path, follow_symlinks=False)
        for path in reversed(directories):
            original = os.path.join(self._source, path)
            copy_attributes(original, os.path.join(self._target, path), os.lstat(original))

    def _copy_all(self, work: Iterable[tuple[bytes, list[os.DirEntry[bytes]]]]) -> None:
        for directory, entries in work:
            for entry in entries:
                path = os.path.join(directory, entry.name)
                self._copy_file(path, entry.stat(follow_symlinks=False))

    def _copy_file(self, path: bytes, status: os.stat_result) -> None:
        name = os.path.join(self._target, path)
        original = os.path.join(self._source, path)
        if status.st_nlink > 1:
            with self._lock:
                first = self._first.setdefault((status.st_dev, status.st_ino), name)
                if first != name:
                    self._links.append((first, name))
                    return
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG:
            self._clone(original, name)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(original), name)
        else:
            os.mknod(name, kind | 0o600, status.st_rdev)
        copy_attributes(original, name, status)

    @staticmethod
    def _clone(original: bytes, name: bytes) -> None:
        with contextlib.ExitStack() as stack:
            source = os.open(original, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, source)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(name, flags, 0o600)
            stack.callback(os.close, target)
            clone(source, target)


def copy_attributes(original: bytes, name: bytes, status: os.stat_result) -> None:
    """Give `name` all attributes of `original`, of which lstat showed `status`; times last.

    Raises: OSError.
    """
    if os.geteuid() == 0:
        os.chown(name, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        # After the owner, which takes set-user-ID bits away.
        os.chmod(name, stat.S_IMODE(status.st_mode))
    for attribute in _xattrs(original):
        with contextlib.suppress(OSError):
            # What this user may not set is left out, as an extraction does.
            value = os.getxattr(original, attribute, follow_symlinks=False)
            os.setxattr(name, attribute, value, follow_symlinks=False)
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def _xattrs(path: bytes) -> Iterable[str]:
    with contextlib.suppress(OSError):
        return os.listxattr(path, follow_symlinks=False)
    return ()
