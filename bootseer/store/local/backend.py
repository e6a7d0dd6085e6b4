"""Backend for a folder of a local or shared file system (`file://`).

New files and folders are private (0600, 0700); below an existing root they get the root's
permission bits. No operation leaves the root: symbolic links below it are never followed and never
listed. Calls have a deadline if the folder is on a network file system (`network`). Every method is
thread-safe and keeps no descriptor open.
"""

import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    from_oserror,
)
from bootseer.linux.mount_table import mount_points
from bootseer.linux.removal import remove_tree
from bootseer.store.backend import Backend, FileInfo, HasDescriptor, Space, Traits, Writer
from bootseer.store.deadline import (
    DEFAULT_DEADLINE_S,
    Call,
    DeadlineCaller,
    note_progress,
)
from bootseer.store.local.beneath import (
    make_directory,
    open_directory,
    publish_temporary,
    rename_exclusive,
    sync_fd,
)
from bootseer.store.local.files import CALL_BYTES_MAX, LocalReader, LocalWriter
from bootseer.store.local.marked_folder import is_marked
from bootseer.store.local.network import (
    STEP_BYTES,
    NetworkReader,
    NetworkWriter,
    lies_on_network,
)
from bootseer.store.paths import TEMPORARY, check_range, local_root, split_path
from bootseer.transfer.attempt import Attempt

Result = TypeVar("Result")

# O_NONBLOCK: opening a FIFO that a user left in the folder must not wait for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LocalBackend(Backend):
    """Files below one folder, which is created by the first write."""

    traits = Traits(one_step_rename=True, one_step_replace=True)

    def __init__(self, root: Path, *, deadline_s: float | None = None) -> None:
        self._root = os.path.normpath(root)
        self.url = Path(self._root).as_uri()
        # Whether the folder is marked as a store; None before the first use.
        self._is_marked: bool | None = None
        self.deadline_s = deadline_s or DEFAULT_DEADLINE_S
        self._is_remote: bool | None = None

    @property
    def root(self) -> str:
        """Path of the folder."""
        return self._root

    @classmethod
    def from_url(cls, url: str, *, deadline_s: float | None = None) -> Self:
        """Return the backend for a bare path or a `file://` URL. Raises: InvalidInputError."""
        return cls(local_root(url), deadline_s=deadline_s)

    # ---- deadlines ------------------------------------------------------------------------------

    @functools.cached_property
    def _caller(self) -> DeadlineCaller:
        """Helper threads, which a folder on a disk of this node does not need."""
        return DeadlineCaller("bootseer-folder")

    @property
    def is_of_this_node(self) -> bool:  # type: ignore[override]
        """Whether the folder is on a disk of this node."""
        return not self._waits

    @property
    def _waits(self) -> bool:
        """Whether the folder is on a network file system; found out once."""
        if self._is_remote is None:
            try:
                mounts = mount_points()
            except OSError:
                mounts = []
            self._is_remote = lies_on_network(self._root, mounts)
        return self._is_remote

    def within_deadline(self, verb: str, path: str, work: Callable[[], Result]) -> Result:
        """Return the result of `work`; on a network file system within the deadline.

        Raises: DeadlineError; as `work`.
        """
        return self._in_helper(verb, path, lambda _: work()) if self._waits else work()

    def _in_helper(
        self, verb: str, path: str, work: Callable[[Call[Any]], Result], *, more_s: float = 0.0
    ) -> Result:
        """Run `work` in a helper thread; see `network.RunWithinDeadline`."""
        result: Result = self._caller.run(
            work,
            self.deadline_s + more_s,
            f"{verb} {self._name(path)}",
            hint="; is the server of its file system up?",
        )
        return result

    # ---- operations -----------------------------------------------------------------------------

    def stat(self, path: str) -> FileInfo:
        return self.within_deadline("look at", path, lambda: self._stat(path))

    def _stat(self, path: str) -> FileInfo:
        names = split_path(path)
        try:
            if not names:
                info = os.stat(self._root)
            else:
                parent = open_directory(self._root, names[:-1])
                try:
                    info = os.stat(names[-1], dir_fd=parent, follow_symlinks=False)
                finally:
                    os.close(parent)
        except OSError as error:
            raise self._error(error, "look at", path) from error
        if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
            raise NotFoundError(f"cannot look at {self._name(path)}: neither a file nor a folder")
        return _info(path, info)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_range(offset, length)
        if not self._waits:
            return self._read(path, offset, length, CALL_BYTES_MAX)
        return self._in_helper(
            "read", path, lambda call: self._read(path, offset, length, STEP_BYTES, call)
        )

    def _read(
        self, path: str, offset: int, length: int | None, step: int, call: Call[Any] | None = None
    ) -> bytes:
        fd, size = self._open(path)
        try:
            end = size if length is None else min(size, offset + length)
            pieces = []
            while offset < end and not (call and call.abandoned):
                pieces.append(os.pread(fd, min(step, end - offset), offset))
                if not pieces[-1]:
                    break
                offset += len(pieces[-1])
                note_progress()
        except OSError as error:
            raise self._error(error, "read", path) from error
        finally:
            os.close(fd)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        check_range(offset)
        return self.open_reader(path).read_into(offset, buffer, attempt or Attempt())

    def open_reader(self, path: str, *, is_checked: bool = False) -> HasDescriptor:
        """Return a reader of the file, which stays open even if its name is deleted or replaced."""
        reader = self.within_deadline("read", path, lambda: self._reader(path, self._open(path)[0]))
        return NetworkReader(self._in_helper, path, reader) if self._waits else reader

    def _reader(self, path: str, fd: int) -> LocalReader:
        return LocalReader(path, fd, lambda error: self._error(error, "read", path))

    def create(self, path: str, *, overwrite: bool = False) -> Writer:
        writer = self.within_deadline("create", path, lambda: self._create(path, overwrite))
        return NetworkWriter(self._in_helper, path, writer) if self._waits else writer

    def _create(self, path: str, overwrite: bool) -> LocalWriter:
        names = self._names_of_file(path)
        try:
            self._check_there()
            parent = make_directory(self._root, names[:-1])
        except OSError as error:
            raise self._making_error(error, path) from error
        try:
            return LocalWriter(
                self._root,
                parent,
                names[-1],
                lambda error: self._error(error, "write", path),
                overwrite=overwrite,
            )
        except OSError as error:
            os.close(parent)
            raise self._error(error, "create", path) from error

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        verb = f"rename {self._name(source)} to"
        self.within_deadline(verb, target, lambda: self._rename(source, target, overwrite))

    def _rename(self, source: str, target: str, overwrite: bool) -> None:
        sources, targets = self._names_of_file(source), self._names_of_file(target)
        try:
            source_parent = open_directory(self._root, sources[:-1])
        except OSError as error:
            raise self._error(error, "rename", source) from error
        target_parent = -1
        try:
            # Check the source first, so that a missing one does not leave new folders behind.
            os.stat(sources[-1], dir_fd=source_parent, follow_symlinks=False)
            try:
                target_parent = make_directory(self._root, targets[:-1])
            except OSError as error:
                raise self._making_error(error, target) from error
            move = (source_parent, sources[-1], target_parent, targets[-1])
            if overwrite:
                os.replace(move[1], move[3], src_dir_fd=move[0], dst_dir_fd=move[2])
            else:
                (publish_temporary if sources[0] == TEMPORARY else rename_exclusive)(*move)
            sync_fd(target_parent)
            sync_fd(source_parent)
        except OSError as error:
            if isinstance(error, BootseerError):
                raise
            named = target if error.errno in (errno.EEXIST, errno.EISDIR) else source
            raise self._error(error, f"rename {self._name(source)} to", named) from error
        finally:
            os.close(source_parent)
            if target_parent >= 0:
                os.close(target_parent)

    def list(self, path: str) -> Iterator[FileInfo]:
        return self.within_deadline("list", path, lambda: self._list(path))

    def _list(self, path: str) -> Iterator[FileInfo]:
        prefix = path + "/" if path else ""
        try:
            directory = open_directory(self._root, split_path(path))
            try:
                fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
            finally:
                os.close(directory)
            try:
                found = list(_scan(fd, prefix))
            finally:
                os.close(fd)
        except OSError as error:
            raise self._error(error, "list", path) from error
        found.sort(key=lambda info: info.path)
        return iter(found)

    def mkdir(self, path: str) -> None:
        def make() -> None:
            try:
                os.close(make_directory(self._root, split_path(path)))
            except OSError as error:
                raise self._making_error(error, path) from error

        self.within_deadline("create", path, make)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self.within_deadline("delete", path, lambda: self._delete(path, recursive))

    def _delete(self, path: str, recursive: bool) -> None:
        names = self._names_of_file(path)
        try:
            parent = open_directory(self._root, names[:-1])
            try:
                _delete_name(parent, names[-1], recursive)
                sync_fd(parent)
            finally:
                os.close(parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._error(error, "delete", path) from error

    def space(self) -> Space | None:
        return self.within_deadline("measure", "", self._space)

    def _space(self) -> Space:
        path = self._root
        while not os.path.isdir(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)  # not created yet: use the nearest existing parent
        try:
            info = os.statvfs(path)
        except OSError as error:
            raise self._error(error, "measure", "") from error
        return Space(info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize)

    def close(self) -> None:
        """Release the helper threads."""
        if "_caller" in vars(self):
            self._caller.close()

    def _open(self, path: str) -> tuple[int, int]:
        """Return a descriptor and the size of a regular file."""
        names = self._names_of_file(path)
        try:
            parent = open_directory(self._root, names[:-1])
            try:
                fd = os.open(names[-1], _READ, dir_fd=parent)
            finally:
                os.close(parent)
        except OSError as error:
            raise self._error(error, "read", path) from error
        if self._is_marked is None:
            self._is_marked = is_marked(self._root)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise NotFoundError(f"cannot read {self._name(path)}: not a file")
        return fd, info.st_size

    def _error(self, error: OSError, verb: str, path: str) -> BootseerError:
        what = f"{verb} {self._name(path)}"
        if error.errno == errno.ENOTDIR and not os.path.isdir(self._root):
            return InvalidInputError(f"cannot {what}: {self._root} is not a folder")
        if error.errno == errno.ENOTEMPTY:
            return AlreadyExistsError(f"cannot {what}: the folder is not empty")
        if error.errno in (errno.EISDIR, errno.ENAMETOOLONG):
            return InvalidInputError(f"cannot {what}: {error.strerror}")
        if error.errno == errno.ELOOP:
            return NotFoundError(f"cannot {what}: a symbolic link, which a store never follows")
        if error.errno in (errno.ESTALE, errno.EHOSTDOWN, errno.EIO):
            return UnavailableError(f"cannot {what}: {error.strerror}")
        if error.errno == errno.ENOENT and self._is_gone():
            return UnavailableError(
                f"cannot {what}: {self._root} is not the folder that it was; is it mounted?"
            )
        return from_oserror(error, what)

    def _is_gone(self) -> bool:
        """Return whether the folder existed before and is missing now, as an unmounted share."""
        if self._is_marked is None:
            if os.path.isdir(self._root):
                self._is_marked = is_marked(self._root)
            return False
        return not os.path.isdir(self._root) or (self._is_marked and not is_marked(self._root))

    def _check_there(self) -> None:
        """Raise FileNotFoundError if a file would be created where a share was unmounted."""
        if self._is_marked and self._is_gone():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _making_error(self, error: OSError, path: str) -> BootseerError:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
            return InvalidInputError(
                f"cannot create {self._name(path)}: a name above it is a file or a symbolic link"
            )
        return self._error(error, "create", path)


def _delete_name(parent: int, name: str, recursive: bool) -> None:
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=parent)
    elif recursive:
        remove_tree(name, dir_fd=parent, on_entry=note_progress)
    else:
        os.rmdir(name, dir_fd=parent)


def _info(path: str, info: os.stat_result) -> FileInfo:
    is_dir = stat.S_ISDIR(info.st_mode)
    size_bytes = 0 if is_dir else info.st_size
    return FileInfo(path, size_bytes, info.st_mtime_ns, is_dir, version=str(info.st_ino))


def _scan(fd: int, prefix: str) -> Iterator[FileInfo]:
    with os.scandir(fd) as entries:
        for entry in entries:
            note_progress()
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted meanwhile
            if stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode):
                yield _info(prefix + entry.name, info)
