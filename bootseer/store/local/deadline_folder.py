"""A folder whose calls end by a deadline where it lies on a network file system.

A hard-mounted server that is gone (NFS, Lustre, a FUSE file system) blocks a system call without
end. There each call runs in a helper thread, and its caller stops waiting when there was no
progress for the deadline. Folders on local disks are called directly.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from bootseer.errors import BootseerError, DeadlineError, InvalidInputError
from bootseer.linux.mount_table import MountPoint, mount_points
from bootseer.store.backend import FileInfo, HasDescriptor, Piece, Space, Writer
from bootseer.store.deadline import Call, DeadlineCaller, NoAnswerError
from bootseer.store.local.backend import LocalBackend, check_range
from bootseer.store.local.files import LocalWriter
from bootseer.store.paths import local_root
from bootseer.transfer.attempt import Attempt

Result = TypeVar("Result")

_DEADLINE_S = 60.0
_THREADS_MAX = 128
"""More parallel calls than any plan of ours makes; a call that is stuck keeps one."""
_STEP_BYTES = 1 << 20
"""What is read or written at once: progress is seen after each step."""
_SYNC_BYTES = 256 << 20
"""After so much a file is flushed, so that the flush at its end does not outlast the deadline."""
_SLOWEST_FLUSH_BYTES_PER_S = 4_000_000
_LINKS_MAX = 40
"""As Linux follows at most."""
_NETWORK = re.compile(
    r"nfs4?|lustre|ceph|cifs|smb3|smbfs|beegfs|gpfs|glusterfs|9p|virtiofs|afs|wekafs|panfs|pvfs2"
    r"|orangefs|coda|autofs|fuse|fuse\..*"
)
"""Types of file systems whose calls may wait for another machine, or for a program."""


def lies_on_network(path: str, mounts: Iterable[MountPoint]) -> bool:
    """Return whether a path leads to a network file system, by the table of mounts.

    Nothing on a network file system is touched: links are followed up to its border only.
    """
    kinds = {os.fsdecode(mount.path): os.fsdecode(mount.kind) for mount in mounts}
    left = [name for name in os.path.normpath(path).split("/") if name][::-1]
    at, links_count = "/", 0
    is_remote = bool(_NETWORK.fullmatch(kinds.get("/", "")))
    while left:
        name = left.pop()
        if name == "..":
            at = os.path.dirname(at)
            continue
        below = os.path.join(at, name)
        if _NETWORK.fullmatch(kinds.get(below, "")):
            return True
        if below in kinds:
            is_remote = False
        if is_remote:
            at = below
            continue
        try:
            target = os.readlink(below)
        except OSError:
            at = below
            continue
        links_count += 1
        if links_count > _LINKS_MAX:
            return False
        if target.startswith("/"):
            at = "/"
        left += [name for name in target.split("/") if name not in ("", ".")][::-1]
    return is_remote


class DeadlineFolder(LocalBackend):
    """Files beneath one folder, as `LocalBackend`, within a deadline."""

    def __init__(self, root: Path, *, deadline_s: float | None = None) -> None:
        super().__init__(root)
        self.deadline_s = deadline_s or _DEADLINE_S
        self._caller = DeadlineCaller(_THREADS_MAX, "bootseer-folder")
        self._is_remote: bool | None = None

    @classmethod
    def from_url(cls, url: str, *, deadline_s: float | None = None) -> "DeadlineFolder":
        """Return the backend of a bare path or a `file://` URL. Raises: InvalidInputError."""
        return cls(local_root(url), deadline_s=deadline_s)

    @property
    def _waits(self) -> bool:
        """Whether calls may wait for another machine; looked at once."""
        if self._is_remote is None:
            try:
                mounts = mount_points()
            except OSError:
                mounts = []
            self._is_remote = lies_on_network(self._root, mounts)
        return self._is_remote

    def within_deadline(
        self, verb: str, path: str, work: Callable[[], Result], *, more_s: float = 0.0
    ) -> Result:
        """Return what `work` returns. Raises: DeadlineError; what `work` raises."""
        if not self._waits:
            return work()
        return self.run(verb, path, lambda _: work(), more_s=more_s)

    def run(
        self, verb: str, path: str, work: Callable[[Call[Any]], Result], *, more_s: float = 0.0
    ) -> Result:
        """Return what `work` returns, which is told of its caller's waiting. Raises: as
        `within_deadline`."""
        try:
            result: Result = self._caller.run(work, self.deadline_s + more_s)
            return result
        except NoAnswerError as error:
            raise DeadlineError(
                f"cannot {verb} {self._name(path)}: {error}; is the server of its file system up?"
            ) from error

    def stat(self, path: str) -> FileInfo:
        stat = super().stat
        return self.within_deadline("look at", path, lambda: stat(path))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if not self._waits:
            return super().read(path, offset, length)
        opened = super().open_reader

        def read(call: Call[bytes]) -> bytes:
            pieces = []
            reader = opened(path)
            at, left = offset, reader.current().size_bytes - offset
            left = left if length is None else min(left, length)
            while left > 0 and not call.abandoned:
                piece = bytearray(min(left, _STEP_BYTES))
                count = reader.read_into(at, memoryview(piece), Attempt())
                call.progress()
                pieces.append(piece[:count])
                at, left = at + count, left - count
                if count < len(piece):
                    break
            return b"".join(pieces)

        check_range(offset, length)
        return self.run("read", path, read)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        if not self._waits:
            return super().read_into(path, offset, buffer, attempt)
        check_range(offset, None)
        return self.open_reader(path).read_into(offset, buffer, attempt or Attempt())

    def open_reader(self, path: str, *, is_checked: bool = False) -> HasDescriptor:
        opened = super().open_reader
        reader = self.within_deadline("read", path, lambda: opened(path, is_checked=is_checked))
        return _Reader(self, path, reader) if self._waits else reader

    def create(self, path: str, *, overwrite: bool = False) -> Writer:
        create = super().create
        writer = self.within_deadline("create", path, lambda: create(path, overwrite=overwrite))
        if not self._waits:
            return writer
        assert isinstance(writer, LocalWriter)
        return _Writer(self, path, writer)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        rename = super().rename
        self.within_deadline(
            f"rename {self._name(source)} to",
            target,
            lambda: rename(source, target, overwrite=overwrite),
        )

    def list(self, path: str) -> Iterator[FileInfo]:
        list_ = super().list
        return self.within_deadline("list", path, lambda: list_(path))

    def mkdir(self, path: str) -> None:
        mkdir = super().mkdir
        self.within_deadline("create", path, lambda: mkdir(path))

    def delete(self, path: str, *, recursive: bool = False) -> None:
        delete = super().delete
        self.within_deadline("delete", path, lambda: delete(path, recursive=recursive))

    def space(self) -> Space | None:
        return self.within_deadline("measure", "", super().space)

    def close(self) -> None:
        """Release threads."""
        self._caller.close()


class _Reader:
    """An open file of a `DeadlineFolder`. Any thread."""

    block_bytes = 0
    can_stop = True
    has_replicas = False

    def __init__(self, folder: DeadlineFolder, path: str, reader: HasDescriptor) -> None:
        self._folder = folder
        self._path = path
        self._reader = reader

    def fileno(self) -> int:
        """As `HasDescriptor`."""
        return self._reader.fileno()

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """As the protocol says. Bytes come by way of memory of the helper's own, so that a call
        that was left never touches `buffer`."""

        def fill(call: Call[int]) -> int:
            done = 0
            while done < len(buffer) and not call.abandoned:
                piece = memoryview(bytearray(min(_STEP_BYTES, len(buffer) - done)))
                count = self._reader.read_into(offset + done, piece, Attempt())
                call.progress()
                if not count or not attempt.put(done, buffer, piece[:count]):
                    break
                done += count
            return done

        try:
            return self._folder.run("read", self._path, fill)
        except BaseException:
            attempt.stop()
            raise

    def current(self) -> FileInfo:
        """As the protocol says."""
        return self._folder.run("look at", self._path, lambda _: self._reader.current())


class _Writer(Writer):
    """A new file of a `DeadlineFolder`. One thread."""

    def __init__(self, folder: DeadlineFolder, path: str, writer: LocalWriter) -> None:
        self._folder = folder
        self._path = path
        self._writer: LocalWriter | None = writer
        self._unsynced_bytes = 0

    def _run(self, work: Callable[[Call[Any], LocalWriter], object], more_s: float = 0.0) -> None:
        writer = self._writer
        if writer is None:
            raise InvalidInputError(f"cannot write {self._path}: closed")

        def run(call: Call[Any]) -> None:
            try:
                work(call, writer)
            finally:
                with call.handover:
                    is_left = call.abandoned
                if is_left:
                    # Its owner has gone on, and could not remove it while it was in use here.
                    writer.abort()

        try:
            self._folder.run("write", self._path, run, more_s=more_s)
        except DeadlineError:
            self._writer = None
            raise

    def write(self, data: Piece) -> None:
        view = memoryview(data).cast("B")

        def write(call: Call[Any], writer: LocalWriter) -> None:
            for start in range(0, len(view), _STEP_BYTES):
                if call.abandoned:
                    return
                writer.write_view(view[start : start + _STEP_BYTES])
                call.progress()

        self._run(write)
        self._unsynced_bytes += len(view)
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._run(lambda _, writer: writer.sync(), self._flush_s)
            self._unsynced_bytes = 0

    @property
    def _flush_s(self) -> float:
        """How much longer than the deadline a flush may take, which shows no progress."""
        return self._unsynced_bytes / _SLOWEST_FLUSH_BYTES_PER_S

    def close(self) -> None:
        if self._writer is not None:
            self._run(lambda _, writer: writer.close(), self._flush_s)
            self._writer = None

    def abort(self) -> None:
        self._end(LocalWriter.abort)

    def abandon(self) -> bool:
        # The file can be read as it is.
        self._end(LocalWriter.abandon)
        return True

    def _end(self, end: Callable[[LocalWriter], object]) -> None:
        if self._writer is not None:
            with contextlib.suppress(BootseerError):
                self._run(lambda _, writer: end(writer))
            self._writer = None
