"""Makes the files of an extraction, through directory descriptors. `blob.extract` drives it.

`make_directories`, `make_large_files`, then `write_group` and `write_part` from any threads, then
`finish`. Few system calls per file: what the kernel does to create files is most of the time.
"""

import errno
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bootseer.blob.extract_plan import Node, Part, Place, Plan, content_length
from bootseer.blob.extract_source import Source
from bootseer.blob.read import ReadBlob
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, from_oserror

_log = logging.getLogger(__name__)

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REOPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_DIRECTORIES_PER_THREAD = 32
_NOT_SUPPORTED = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the process and the file system give to a file that we create."""

    owners: bool
    umask: int
    uid: int
    gid: int
    atime_ns: int
    """Later than any mtime, or relatime would write the inode again at the first read."""


@dataclass(slots=True)
class Skipped:
    """Counts of attributes that could not be set."""

    owners: int = 0
    xattrs: int = 0
    set_id_bits: int = 0


class Writer:
    """The state of one extraction."""

    def __init__(
        self,
        tree: Tree,
        read: ReadBlob,
        plan: Plan,
        root_fd: int,
        settings: Settings,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.skipped = Skipped()
        self._tree = tree
        self._read = read
        self._plan = plan
        self._root_fd = root_fd
        self._settings = settings
        self._on_progress = on_progress
        self._directories = {node.number: node for node in plan.directories}
        self._local = threading.local()
        self._fds: list[OrderedDict[int, int]] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._has_xattrs = bool(tree.columns.xattr_sets)

    def stop(self) -> None:
        """Make what still runs in other threads end soon."""
        self._stopped = True

    def close(self) -> None:
        """Close all directories. Only when no other thread is inside any more."""
        for fds in self._fds:
            for fd in fds.values():
                os.close(fd)
        self._fds.clear()

    def make_directories(self) -> None:
        """All of them, private for now."""
        for node in self._plan.directories:
            with self._naming(node):
                os.mkdir(node.name, 0o700, dir_fd=self._directory(node.parent))

    def make_large_files(self) -> None:
        """The files whose parts come later, at their full length."""
        for node in self._plan.large:
            with self._naming(node):
                fd = os.open(node.name, _CREATE, 0o600, dir_fd=self._directory(node.parent))
                try:
                    os.ftruncate(fd, self._tree.columns.size_bytes[node.number])
                finally:
                    os.close(fd)

    def write_part(self, part: Part) -> None:
        """Some bytes of a large file. Its attributes come in `finish`."""
        if self._stopped:
            return
        source = Source(self._tree, self._read, part.places)
        with self._naming(part.node):
            fd = os.open(part.node.name, _REOPEN, dir_fd=self._directory(part.node.parent))
            try:
                self._write(fd, part.places, source)
            finally:
                os.close(fd)
        if self._on_progress:
            self._on_progress(sum(place[3] for place in part.places))

    def write_group(self, group: Sequence[tuple[Node, list[Place]]]) -> None:
        """Whole files with their attributes."""
        source = Source(self._tree, self._read, [place for _, places in group for place in places])
        modes, sizes = self._tree.columns.mode, self._tree.columns.size_bytes
        written = 0
        # One `_naming` around all: entering it for each file shows at 100,000 files.
        with self._naming(group[0][0]) as current:
            for node, places in group:
                if self._stopped:
                    return
                current[0] = node
                number, parent, name = node
                mode = modes[number] & 0o777
                fd = os.open(name, _CREATE, mode, dir_fd=self._directory(parent))
                try:
                    end = self._write(fd, places, source)
                    if end != sizes[number]:
                        os.ftruncate(fd, sizes[number])
                    self._set_attributes(fd, number, mode & ~self._settings.umask)
                finally:
                    os.close(fd)
                written += content_length(places)
        if self._on_progress and written:
            self._on_progress(written)

    def finish(self) -> None:
        """Attributes of large files; links and special files; last the directories' attributes,
        the innermost first."""
        for node in self._plan.large:
            with self._naming(node):
                fd = os.open(node.name, _REOPEN, dir_fd=self._directory(node.parent))
                try:
                    self._set_attributes(fd, node.number, 0o600)
                finally:
                    os.close(fd)
        for node in self._plan.others:
            with self._naming(node):
                self._make_other(node, self._directory(node.parent))
        for link in self._plan.links:
            with self._naming(link.first):
                os.link(
                    link.first.name,
                    link.name,
                    src_dir_fd=self._directory(link.first.parent),
                    dst_dir_fd=self._directory(link.parent),
                    follow_symlinks=False,
                )
        for node in reversed(self._plan.directories):
            with self._naming(node):
                self._set_attributes(self._directory(node.number), node.number, None)
        self._set_attributes(self._root_fd, 0, None)

    @contextmanager
    def _naming(self, node: Node) -> Iterator[list[Node]]:
        """Give an OSError the path that it happened on: of `node`, or what replaces it in the
        list."""
        current = [node]
        try:
            yield current
        except BootseerError:
            raise
        except OSError as error:
            path = os.fsdecode(self._tree.path(current[0].number))
            raise from_oserror(error, f"write {path}") from error

    def _directory(self, number: int) -> int:
        """A descriptor of the directory with this inode number, open until 31 others have been
        used by this thread."""
        if not number:
            return self._root_fd
        fds: OrderedDict[int, int] | None = getattr(self._local, "fds", None)
        if fds is None:
            fds = self._local.fds = OrderedDict()
            with self._lock:
                self._fds.append(fds)
        fd = fds.get(number)
        if fd is not None:
            fds.move_to_end(number)
            return fd
        missing = []
        while number and number not in fds:
            missing.append(self._directories[number])
            number = missing[-1].parent
        fd = fds[number] if number else self._root_fd
        temporary = -1
        for node in reversed(missing):
            fd = os.open(node.name, _DIRECTORY, dir_fd=fd)
            if temporary >= 0:
                os.close(temporary)
            temporary = fd
        fds[missing[0].number] = fd
        if len(fds) > _OPEN_DIRECTORIES_PER_THREAD:
            os.close(fds.popitem(last=False)[1])
        return fd

    def _write(self, fd: int, places: Iterable[Place], source: "Source") -> int:
        """Write the places of one file; returns the end of the last."""
        end = 0
        for offset, blob, blob_offset, length in places:
            end = offset + length
            while length:
                view = source.view(blob, blob_offset, length)
                blob_offset += len(view)
                length -= len(view)
                while view:
                    count = os.pwrite(fd, view, offset)
                    offset += count
                    view = view[count:]
                if self._stopped:
                    return end
        return end

    def _set_attributes(self, fd: int, number: int, mode_now: int | None) -> None:
        """On an open file or directory. Order matters: chown clears set-ID bits and capabilities,
        chmod and setxattr change no times that utime would not set right."""
        settings = self._settings
        columns = self._tree.columns
        mode = stat.S_IMODE(columns.mode[number])
        uid, gid = columns.uid[number], columns.gid[number]
        if settings.owners:
            if (uid, gid) != (settings.uid, settings.gid):
                os.chown(fd, uid, gid)
        elif mode & 0o6000 or (uid, gid) != (settings.uid, settings.gid):
            mode = self._without_foreign_set_id(mode, uid, gid)
        if mode != mode_now:
            os.chmod(fd, mode)
        if self._has_xattrs and columns.xattr[number]:
            self._set_xattrs(fd, number)
        os.utime(fd, ns=(settings.atime_ns, columns.mtime_ns[number]))

    def _without_foreign_set_id(self, mode: int, uid: int, gid: int) -> int:
        """Without owners, a set-ID bit would hand our rights to a program meant for another's."""
        kept = mode
        if (uid, gid) != (self._settings.uid, self._settings.gid):
            with self._lock:
                self.skipped.owners += 1
        if uid != self._settings.uid:
            kept &= ~stat.S_ISUID
        if gid != self._settings.gid:
            kept &= ~stat.S_ISGID
        if kept != mode:
            with self._lock:
                if not self.skipped.set_id_bits:
                    _log.warning("set-user-ID and set-group-ID bits are left out without owners")
                self.skipped.set_id_bits += 1
        return kept

    def _set_xattrs(self, target: int | str, number: int) -> None:
        columns = self._tree.columns
        for name, value in columns.xattr_sets[columns.xattr[number] - 1]:
            try:
                os.setxattr(target, name, value, follow_symlinks=isinstance(target, int))
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                with self._lock:
                    if not self.skipped.xattrs:
                        _log.warning(
                            "cannot set the extended attribute %s: %s",
                            os.fsdecode(name),
                            error.strerror,
                        )
                    self.skipped.xattrs += 1

    def _make_other(self, node: Node, directory: int) -> None:
        settings = self._settings
        columns = self._tree.columns
        number = node.number
        mode = columns.mode[number]
        is_link = stat.S_ISLNK(mode)
        if is_link:
            os.symlink(self._tree.link_target(number), node.name, dir_fd=directory)
        else:
            os.mknod(node.name, mode & ~0o7777 | 0o600, columns.rdev[number], dir_fd=directory)
        uid, gid = columns.uid[number], columns.gid[number]
        permissions = stat.S_IMODE(mode)
        if (uid, gid) != (settings.uid, settings.gid):
            if settings.owners:
                os.chown(node.name, uid, gid, dir_fd=directory, follow_symlinks=False)
            else:
                permissions = self._without_foreign_set_id(permissions, uid, gid)
        if not is_link:
            os.chmod(node.name, permissions, dir_fd=directory)
        if columns.xattr[number]:
            self._set_xattrs(f"/proc/self/fd/{directory}/{os.fsdecode(node.name)}", number)
        os.utime(
            node.name,
            ns=(settings.atime_ns, columns.mtime_ns[number]),
            dir_fd=directory,
            follow_symlinks=False,
        )
