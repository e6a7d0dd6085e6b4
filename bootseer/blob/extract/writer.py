"""Writer of the names of an extraction that one process makes: directories, links, special files.

It also creates large files with their length, and sets the attributes that come last. Call
`make_large_files` before the tasks, `make_directories` before each task, `finish` after all tasks.
For one thread at a time.
"""

import errno
import logging
import os
import stat
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

from msgspec import Struct

from bootseer.blob.extract.plan import ExtractionPlan
from bootseer.blob.extract.sections import Section
from bootseer.blob.pack.stat_record import Records, put_directory, put_record
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, from_oserror

_log = logging.getLogger(__name__)

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_SUPPORTED = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EINVAL)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_MAX = 64


class ExtractionSettings(Struct, frozen=True):
    """Attributes of new files that depend on this process and the target file system."""

    owners: bool
    umask: int
    uid: int
    gid: int
    atime_ns: int
    """Access time, later than any mtime: otherwise relatime writes the inode at the first read."""


class TreeWriter:
    """State of one extraction in the process that makes directories, links and special files."""

    def __init__(
        self,
        tree: Tree,
        plan: ExtractionPlan,
        columns: Mapping[str, Section],
        root_fd: int,
        settings: ExtractionSettings,
    ) -> None:
        """Prepare to write below `root_fd`; `columns` are those of the workers."""
        self._tree = tree
        self._plan = plan
        self._root_fd = root_fd
        self._settings = settings
        c = tree.columns
        self._names, self._parents, self._inodes = c.names, c.name_parent, c.name_inode
        self._modes = columns["mode"]
        name_of = columns["directory_name"]
        assert not isinstance(name_of, bytes)
        self._name_of = name_of
        self._is_made = bytearray(tree.inode_count)
        self._is_made[0] = 1
        self._directories = DirectoryCache(c.names, c.name_parent, name_of, root_fd)
        self._has_warned_of_xattrs = False
        if not settings.owners and any(map(int.__ne__, c.mode, self._modes)):
            _log.warning("set-user-ID and set-group-ID bits are left out without owners")

    def close(self) -> None:
        """Close all directories."""
        self._directories.close()

    def make_directories(self, task: int) -> None:
        """Create the directories that a task writes into, with mode 0700 for now."""
        for i in self._plan.names(task):
            if not self._is_made[self._parents[i]]:
                self._make_directory(self._parents[i])

    def _make_directory(self, number: int) -> None:
        """Create a directory and all missing directories above it."""
        missing = []
        while not self._is_made[number]:
            missing.append(number)
            number = self._parents[self._name_of[number]]
        for number in reversed(missing):
            i = self._name_of[number]
            with self.naming(i):
                os.mkdir(self._names[i], 0o700, dir_fd=self._directories.get(self._parents[i]))
            self._is_made[number] = 1

    def make_large_files(self) -> None:
        """Create the large files at their full length; tasks write their parts."""
        sizes = self._tree.columns.size_bytes
        for i in self._plan.large:
            self._make_directory(self._parents[i])
            with self.naming(i):
                directory = self._directories.get(self._parents[i])
                fd = os.open(self._names[i], _CREATE, 0o600, dir_fd=directory)
                try:
                    os.ftruncate(fd, sizes[self._inodes[i]])
                finally:
                    os.close(fd)

    def finish(self) -> None:
        """Create the remaining names, and set the remaining attributes.

        That is: empty directories, attributes of large files, links and special files, and last the
        attributes of directories, the innermost first.
        """
        for i in self._plan.directories:
            self._make_directory(self._inodes[i])
        for i in self._plan.large:
            self._finish_name(i)
        for i in self._plan.with_xattrs:
            with self.naming(i):
                self._set_xattrs(*self._entry(i))
        for i in self._plan.others:
            with self.naming(i):
                self._make_other(i)
            self._finish_name(i)
        for i, first in self._plan.links:
            with self.naming(i):
                os.link(
                    self._names[first],
                    self._names[i],
                    src_dir_fd=self._directories.get(self._parents[first]),
                    dst_dir_fd=self._directories.get(self._parents[i]),
                    follow_symlinks=False,
                )
        for i in reversed(self._plan.directories):
            self._finish_name(i)
        self._finish(0, b".", self._root_fd)

    def record(self, recorded: bytes, records: Records) -> None:
        """Fill the records of names made or changed after the tasks, and of the root."""
        plan = self._plan
        late = chain(plan.large, plan.with_xattrs, plan.others, *plan.links)
        for put, names in ((put_directory, plan.directories), (put_record, late)):
            for i in filter(recorded.__getitem__, names):
                with self.naming(i):
                    directory = self._directories.get(self._parents[i])
                    status = os.stat(self._names[i], dir_fd=directory, follow_symlinks=False)
                    put(status, records, i)
        put_directory(os.fstat(self._root_fd), records, self._tree.name_count)

    @contextmanager
    def naming(self, i: int) -> Iterator[None]:
        """Add the path of name `i` to an OSError from the block."""
        try:
            yield
        except BootseerError:
            raise
        except OSError as error:
            raise self.error_at(i, error) from error

    def error_at(self, i: int, error: OSError) -> BootseerError:
        """Return the error to raise if name `i` could not be written."""
        path = self._tree.path(self._parents[i])
        shown = os.fsdecode(os.path.join(path, self._names[i]))
        return from_oserror(error, f"write {shown}")

    def _entry(self, i: int) -> tuple[int, bytes, int]:
        """Return the inode number, the name, and the descriptor of the directory of a name."""
        return self._inodes[i], self._names[i], self._directories.get(self._parents[i])

    def _finish_name(self, i: int) -> None:
        with self.naming(i):
            self._finish(*self._entry(i))

    def _finish(self, number: int, name: bytes, directory: int) -> None:
        """Set all attributes of a file or directory that has mode 0600 or 0700.

        Order matters: chown clears set-ID bits and capabilities, and utime must come last.
        """
        settings = self._settings
        columns = self._tree.columns
        uid, gid = columns.uid[number], columns.gid[number]
        if settings.owners and (uid, gid) != (settings.uid, settings.gid):
            os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)
        mode = self._modes[number]
        if not stat.S_ISLNK(mode):
            os.chmod(name, stat.S_IMODE(mode), dir_fd=directory)
        self._set_xattrs(number, name, directory)
        times = (settings.atime_ns, columns.mtime_ns[number])
        os.utime(name, ns=times, dir_fd=directory, follow_symlinks=False)

    def _set_xattrs(self, number: int, name: bytes, directory: int) -> None:
        columns = self._tree.columns
        if not columns.xattr[number]:
            return
        path = f"/proc/self/fd/{directory}/{os.fsdecode(name)}"
        for attribute, value in columns.xattr_sets[columns.xattr[number] - 1]:
            try:
                os.setxattr(path, attribute, value, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                if not self._has_warned_of_xattrs:
                    shown = os.fsdecode(attribute)
                    _log.warning("cannot set the extended attribute %s: %s", shown, error.strerror)
                self._has_warned_of_xattrs = True

    def _make_other(self, i: int) -> None:
        number, name, directory = self._entry(i)
        mode = self._modes[number]
        if stat.S_ISLNK(mode):
            os.symlink(self._tree.link_target(number), name, dir_fd=directory)
        else:
            rdev = self._tree.columns.rdev[number]
            os.mknod(name, mode & ~0o7777 | 0o600, rdev, dir_fd=directory)


class DirectoryCache:
    """Cache of directory descriptors by inode number; the most recently used ones stay open."""

    def __init__(
        self, names: list[bytes], parents: "array[int]", name_of: "array[int]", root_fd: int
    ) -> None:
        """Start with no open directory except the root.

        `name_of` has the index of each directory's name by inode number.
        """
        self._names = names
        self._parents = parents
        self._name_of = name_of
        self._root_fd = root_fd
        self._open: dict[int, int] = {}

    def get(self, number: int) -> int:
        """Return a descriptor, which stays open until other directories replace it in the cache.

        Raises: OSError.
        """
        if not number:
            return self._root_fd
        fds = self._open
        found = fds.pop(number, None)
        if found is not None:
            # A dict keeps its keys in the order of insertion: the first is the least recently used.
            fds[number] = found
            return found
        missing = []
        while number and number not in fds:
            missing.append(number)
            number = self._parents[self._name_of[number]]
        fd = self._root_fd
        if number:
            fd = fds[number] = fds.pop(number)
        for below in reversed(missing):
            fd = fds[below] = os.open(self._names[self._name_of[below]], _DIRECTORY, dir_fd=fd)
            if len(fds) > _OPEN_MAX:
                os.close(fds.pop(next(iter(fds))))
        return fd

    def close(self) -> None:
        """Close all descriptors except the root's."""
        while self._open:
            os.close(self._open.popitem()[1])
