"""Extracted trees that a node keeps in `cache_dir/trees`, and reflink copies of them.

`cache_dir/trees` has a directory HEX for each index digest, which holds exactly that tree, and
HEX.lock. A process that links to a tree, or shows it through an overlay, holds the lock shared; a
tree is made and removed under the exclusive lock. A tree appears whole or not at all. Before each
use it is compared with its index, file by file, and a tree that was changed is extracted again.
"""

import contextlib
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bootseer.blob.tree import Tree
from bootseer.errors import (
    BootseerError,
    BusyError,
    NotFoundError,
    UnsupportedError,
    from_oserror,
)
from bootseer.linux.locks import lock_file, lock_within
from bootseer.linux.private_files import make_private_directory
from bootseer.linux.removal import remove_tree
from bootseer.settings.config import Settings
from bootseer.snapshots.scan import scan

logger = logging.getLogger(__name__)
_REMOVED_PREFIX = ".gone-"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KIND_BITS = stat.S_IFMT(0o177777)
_FICLONE = 0x40049409  # _IOW(0x94, 9, int), linux/fs.h
# Steps in which file systems keep times: most; SMB and NTFS; old NFS servers; exFAT; ext4 with
# inodes of 128 bytes; FAT.
_GRANULARITIES_NS = (1, 100, 1000, 10**6, 10**7, 10**9, 2 * 10**9)
_PROBE_NS = 1_234_567_891_234_567_891
# Number of attempts to use a tree, which other processes may remove meanwhile.
_LOOKS_MAX = 4


class FileTimes:
    """Times of files as the file system of a directory keeps them. Any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._granularity_ns = 0

    def are_same(self, found_ns: int, wanted_ns: int) -> bool:
        """Return whether a file whose time was set to `wanted_ns` has the time `found_ns`."""
        if found_ns == wanted_ns:
            return True
        if not self._granularity_ns:
            self._granularity_ns = _granularity_ns(self._directory)
        return found_ns == wanted_ns - wanted_ns % self._granularity_ns


def _granularity_ns(directory: Path) -> int:
    """Return the resolution of file times in the file system of a writable `directory`.

    1 if it cannot be determined.
    """
    path = directory / f".times-{os.getpid()}-{threading.get_ident()}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.utime(fd, ns=(_PROBE_NS, _PROBE_NS))
            found_ns = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
            path.unlink()
    except OSError:
        return 1
    for step_ns in _GRANULARITIES_NS:
        if found_ns == _PROBE_NS - _PROBE_NS % step_ns:
            return step_ns
    return 1


class NodeTrees:
    """Extracted trees of one node. Any thread; every process of the node."""

    def __init__(self, settings: Settings) -> None:
        self.directory = settings.cache_dir / "trees"
        # Images share the cache, and have the other half at least.
        self._limit_bytes = settings.cache_limit_bytes // 2
        self._deadline_s = settings.deadline_s
        self.times = FileTimes(self.directory)
        # Files are shared with their modes, and `admit_tree` may have removed privileges: a node
        # may need a tree of each kind.
        self._name_suffix = "" if settings.restore_privileges else "-unprivileged"

    def path(self, index_digest: str) -> Path:
        """Return the path of the tree, which need not exist."""
        return self.directory / f"{index_digest.partition(':')[2]}{self._name_suffix}"

    def has(self, index_digest: str) -> bool:
        """Return whether the tree exists; its contents are checked by `using`."""
        return self.path(index_digest).is_dir()

    @contextlib.contextmanager
    def using(
        self, index_digest: str, tree: Tree, build: Callable[[Path], object]
    ) -> Iterator[tuple[Path, int]]:
        """Yield the path of an extracted tree and the descriptor of its lock.

        `build` makes the tree if it is missing or damaged. The tree stays until all copies of the
        descriptor are closed.

        Raises: BusyError for a damaged tree that is in use; UnsupportedError if the extracted tree
        does not stay as it was; BootseerError.
        """
        path = self.path(index_digest)
        try:
            make_private_directory(self.directory)
            lock = self._lock(path, is_shared=True)
        except OSError as error:
            raise from_oserror(error, f"lock the extracted snapshot {path}") from error
        try:
            is_built = False
            for look in range(_LOOKS_MAX):
                if is_whole(path, tree, self.times):
                    break
                if look == _LOOKS_MAX - 1 or (is_built and path.is_dir()):
                    raise UnsupportedError(
                        f"the snapshot that was extracted to {path} is not as it should be; the "
                        "file system there does not keep sizes or times of files"
                    )
                # Under the exclusive lock no other process uses the tree, or makes it.
                os.close(lock)
                lock = -1
                lock = self._lock(path)
                if not is_whole(path, tree, self.times):
                    is_built = True
                    self._remove(path)
                    self.trim(keep=path)
                    build(path)
                lock_within(lock, self._deadline_s, is_shared=True)
            os.utime(lock)
            yield path, lock
        except OSError as error:
            raise from_oserror(error, f"use the extracted snapshot {path}") from error
        finally:
            if lock >= 0:
                os.close(lock)

    @contextlib.contextmanager
    def held(self, index_digest: str) -> Iterator[Path]:
        """Keep a tree that is here from being removed. Raises: BusyError, NotFoundError."""
        path = self.path(index_digest)
        try:
            lock = self._lock(path, is_shared=True)
        except OSError as error:
            raise from_oserror(error, f"lock the extracted snapshot {path}") from error
        try:
            if not path.is_dir():
                raise NotFoundError(f"the extracted snapshot {path} is gone")
            yield path
        finally:
            os.close(lock)

    def _lock(self, path: Path, *, is_shared: bool = False, wait: bool = True) -> int:
        """Return a locked descriptor of the lock file of `path`. Raises: BusyError, OSError."""
        name, timeout_s = path.with_suffix(".lock"), self._deadline_s if wait else 0.0
        try:
            return lock_file(name, timeout_s, is_shared=is_shared)
        except TimeoutError:
            raise BusyError(f"the extracted snapshot {path} is in use") from None

    def _remove(self, path: Path) -> None:
        """Rename a tree, then remove it, so that no part of it is visible. Raises: OSError."""
        gone = self.directory / f"{_REMOVED_PREFIX}{path.name[:16]}-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(gone)
        with contextlib.suppress(OSError):
            remove_tree(gone)

    def trim(self, limit_bytes: int | None = None, *, keep: Path | None = None) -> int:
        """Remove unused trees, least recently used first, until the rest is within the limit.

        The default limit is half of the cache's. `keep` is spared. Return the number of removed
        trees.
        """
        limit_bytes = self._limit_bytes if limit_bytes is None else limit_bytes
        found = []
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                if path.name.startswith(_REMOVED_PREFIX):
                    with contextlib.suppress(OSError):
                        remove_tree(path)
                elif path.suffix == ".lock" and path.with_suffix("") != keep:
                    with contextlib.suppress(OSError):
                        found.append((path.stat().st_mtime_ns, path.with_suffix("")))
        sizes = {path: _size_of(path) for _, path in found}
        total = sum(sizes.values())
        count = 0
        for _, path in sorted(found):
            if total <= limit_bytes:
                break
            try:
                lock = self._lock(path, wait=False)
            except (BusyError, OSError):
                continue
            try:
                self._remove(path)
                path.with_suffix(".lock").unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot remove the extracted snapshot %s: %s", path, error)
                continue
            finally:
                os.close(lock)
            total -= sizes[path]
            count += 1
        return count

    def can_reflink_to(self, directory: Path) -> bool:
        """Return whether files of the trees can share their blocks with files in `directory`."""
        with contextlib.suppress(OSError):
            make_private_directory(self.directory)
            if os.stat(self.directory).st_dev == os.stat(directory).st_dev:
                return can_reflink(self.directory)
        return False


def is_whole(path: Path, tree: Tree, times: FileTimes | None = None) -> bool:
    """Return whether a directory has exactly the tree's names, with sizes and times of files."""
    times = times or FileTimes(path.parent)
    try:
        top = os.open(path, _DIRECTORY_FLAGS)
    except OSError:
        return False
    try:
        device = os.fstat(top).st_dev
        # A stack of paths: any depth, one descriptor open at a time.
        stack = [(0, b"")]
        while stack:
            directory, prefix = stack.pop()
            fd = os.open(prefix, _DIRECTORY_FLAGS, dir_fd=top) if prefix else top
            try:
                below = _matching_directories(fd, directory, tree, device, times)
            finally:
                if fd != top:
                    os.close(fd)
            if below is None:
                return False
            for name, number in below:
                stack.append((number, prefix + b"/" + name if prefix else name))
    except OSError:
        return False
    finally:
        os.close(top)
    return True


def _matching_directories(
    fd: int, directory: int, tree: Tree, device: int, times: FileTimes
) -> list[tuple[bytes, int]] | None:
    """Return the directories in an open directory, by name and inode number of the tree.

    None if the directory differs from the tree. Each link waits for this call, so no objects are
    made except those of stat. Raises: OSError, also for a name that is missing.
    """
    names, inodes = tree.columns.names, tree.columns.name_inode
    first, end = tree.span(directory)
    # If the counts are equal and each name of the tree is found below, the names are the same.
    if len(os.listdir(fd)) != end - first:
        return None
    directories = []
    for i in range(first, end):
        name, number = names[i], inodes[i]
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if found.st_dev != device or not _is_same_file(found, tree, number, times):
            return None
        if stat.S_ISDIR(found.st_mode):
            directories.append((name, number))
    return directories


def _is_same_file(found: os.stat_result, tree: Tree, inode: int, times: FileTimes) -> bool:
    """Return whether a status matches the tree: the kind, and of a file also size and time."""
    c = tree.columns
    kind = c.mode[inode] & _KIND_BITS
    if found.st_mode & _KIND_BITS != kind:
        return False
    return kind != stat.S_IFREG or (
        found.st_size == c.size_bytes[inode]
        and times.are_same(found.st_mtime_ns, c.mtime_ns[inode])
    )


def _size_of(path: Path) -> int:
    """Return the bytes that a tree occupies, roughly: hard links count once each."""
    try:
        return sum(entry.size_bytes + 512 for entry in scan(path).values())
    except BootseerError:
        return 0


def _clone(source: int, target: int) -> None:
    """Make the empty file `target` share all blocks of `source` (both descriptors).

    Blocks are shared until one of the files is written: ioctl_ficlone(2) of XFS, btrfs and
    bcachefs. Raises: OSError.
    """
    fcntl.ioctl(target, _FICLONE, source)


def can_reflink(directory: Path) -> bool:
    """Return whether files can be cloned in the file system of `directory`, which is writable."""
    import tempfile  # here: it loads every kind of compression

    try:
        with (
            tempfile.TemporaryFile(dir=directory) as one,
            tempfile.TemporaryFile(dir=directory) as other,
        ):
            one.write(b"x" * 4096)
            one.flush()
            _clone(one.fileno(), other.fileno())
    except OSError:
        return False
    return True


_THREADS_MAX = 8
# Directories in one task of a thread: a task costs as much as linking ten files.
_DIRECTORIES_PER_TASK = 32


def copy_tree(source: Path, target: Path) -> None:
    """Make `target`, which must not exist, equal to the directory `source`.

    Raises: BootseerError; the caller removes the incomplete `target`.
    """
    try:
        _Copy(source, target).run()
    except OSError as error:
        raise from_oserror(error, f"link {source} to {target}") from error


class _Copy:
    """One call of `copy_tree`."""

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
        from concurrent.futures import ThreadPoolExecutor  # here: a mount needs none

        work = [pair for pair in zip(directories, files, strict=True) if pair[1]]
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _THREADS_MAX)) as pool:
            pieces = (
                work[i : i + _DIRECTORIES_PER_TASK]
                for i in range(0, len(work), _DIRECTORIES_PER_TASK)
            )
            for done in [pool.submit(self._copy_all, piece) for piece in pieces]:
                done.result()
        for first, path in self._links:
            os.link(first, path, follow_symlinks=False)
        for path in reversed(directories):
            original = os.path.join(self._source, path)
            _copy_attributes(original, os.path.join(self._target, path), os.lstat(original))

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
            self._clone_file(original, name)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(original), name)
        else:
            os.mknod(name, kind | 0o600, status.st_rdev)
        _copy_attributes(original, name, status)

    @staticmethod
    def _clone_file(original: bytes, name: bytes) -> None:
        with contextlib.ExitStack() as stack:
            source = os.open(original, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, source)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(name, flags, 0o600)
            stack.callback(os.close, target)
            _clone(source, target)


def _copy_attributes(original: bytes, name: bytes, status: os.stat_result) -> None:
    """Copy all attributes of `original`, whose status is `status`, to `name`; times last.

    Raises: OSError.
    """
    if os.geteuid() == 0:
        os.chown(name, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        # After the owner, which takes set-user-ID bits away.
        os.chmod(name, stat.S_IMODE(status.st_mode))
    for attribute in _xattrs(original):
        with contextlib.suppress(OSError):
            # Attributes that this user may not set are left out, as in an extraction.
            value = os.getxattr(original, attribute, follow_symlinks=False)
            os.setxattr(name, attribute, value, follow_symlinks=False)
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def _xattrs(path: bytes) -> Iterable[str]:
    with contextlib.suppress(OSError):
        return os.listxattr(path, follow_symlinks=False)
    return ()
