"""Copies a tree by sharing: blocks (reflink) or, where that was asked for, the files themselves.

Alone owns that copy: exact in every attribute, in parallel, into a new directory that nobody looks
at yet. Relative to open directories; follows no symbolic links. Owns its threads.
"""

import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bootseer.blob.frame_writer import usable_cpus
from bootseer.blob.stat_record import RECORD
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, from_oserror
from bootseer.snapshots.exact import made_digest, names_to_record
from bootseer.snapshots.restoring.node_trees import Build, NodeTrees, is_whole
from bootseer.snapshots.restoring.reflink import clone

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_THREADS_MAX = 8
# Directories that a thread does in one go: handing one over costs as much as linking ten files.
_AT_ONCE = 32


def copy_tree(source: Path, target: Path, *, hard: bool) -> None:
    """Make `target`, which must not exist, equal to the directory `source`.

    `hard`: files are the same ones, so that what is written to one of them in place is written to
    the other. Raises: BootseerError; what was made by then is left for the caller to remove.
    """
    try:
        _Copy(source, target, hard).run()
    except OSError as error:
        if isinstance(error, BootseerError):
            raise
        raise from_oserror(error, f"link {source} to {target}") from error


def link_tree(trees: NodeTrees, index_digest: str, tree: Tree, build: Build, target: Path) -> str:
    """Make `target`, which must not exist, equal to the node's extracted tree, file by file the
    same ones; its `exact.made_digest`. See `NodeTrees.using`.

    What makes sure that the tree is whole looks at the new names: once for both, and what it saw
    is what is there now, since linking to a file changes it.
    """
    recorded = names_to_record(tree)
    records = bytearray()

    def link(source: Path) -> bool:
        nonlocal records
        if not source.is_dir():
            return False
        copy_tree(source, target, hard=True)
        records = bytearray((tree.name_count + 1) * RECORD.size)
        if is_whole(target, tree, records):
            return True
        shutil.rmtree(target)
        return False

    with trees.using(index_digest, tree, build, link):
        return made_digest(tree, recorded, records)


class _Copy:
    def __init__(self, source: Path, target: Path, hard: bool) -> None:
        self._source = os.fsencode(source)
        self._target = os.fsencode(target)
        self._hard = hard
        self._is_root = os.geteuid() == 0
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
            name = os.path.join(self._target, path)
            self._finish(name, os.lstat(os.path.join(self._source, path)), path)

    def _copy_all(self, work: Iterable[tuple[bytes, list[os.DirEntry[bytes]]]]) -> None:
        for directory, entries in work:
            if self._hard:
                self._link_files(directory, entries)
            else:
                for entry in entries:
                    path = os.path.join(directory, entry.name)
                    self._copy_file(path, entry.stat(follow_symlinks=False))

    def _link_files(self, directory: bytes, entries: list[os.DirEntry[bytes]]) -> None:
        with contextlib.ExitStack() as stack:
            source = os.open(os.path.join(self._source, directory), _DIRECTORY)
            stack.callback(os.close, source)
            target = os.open(os.path.join(self._target, directory), _DIRECTORY)
            stack.callback(os.close, target)
            for entry in entries:
                name = entry.name
                os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)

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
        self._finish(name, status, path)

    @staticmethod
    def _clone(original: bytes, name: bytes) -> None:
        with contextlib.ExitStack() as stack:
            source = os.open(original, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, source)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(name, flags, 0o600)
            stack.callback(os.close, target)
            clone(source, target)

    def _finish(self, name: bytes, status: os.stat_result, path: bytes) -> None:
        """All attributes; times last."""
        if self._is_root:
            os.chown(name, status.st_uid, status.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            # After the owner, which takes set-user-ID bits away.
            os.chmod(name, stat.S_IMODE(status.st_mode))
        original = os.path.join(self._source, path)
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
