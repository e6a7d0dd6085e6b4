"""Files on network file systems: detection, and readers and writers that end by a deadline.

A system call on a hard-mounted NFS or Lustre server that is down, or on a hung FUSE file system,
blocks for ever. Each call on such a file system runs in a helper thread, and its caller stops
waiting when there was no progress for the deadline.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from bootseer.errors import BootseerError, DeadlineError, InvalidInputError
from bootseer.linux.mount_table import MountPoint
from bootseer.store.backend import FileInfo, HasDescriptor, Piece, Writer
from bootseer.store.deadline import Call
from bootseer.store.local.files import LocalWriter
from bootseer.transfer.attempt import Attempt

Result = TypeVar("Result")

STEP_BYTES = 1 << 20
"""Size of one read or write; progress is reported after each."""
_SYNC_BYTES = 256 << 20
"""A file is flushed each time so many bytes were written, so that its last flush is short."""
_SLOWEST_FLUSH_BYTES_PER_S = 4_000_000
_LINKS_MAX = 40
"""Number of symbolic links that Linux follows at most."""
_NETWORK = frozenset(
    (
        *("nfs", "nfs4", "lustre", "ceph", "cifs", "smb3", "smbfs", "beegfs", "gpfs", "glusterfs"),
        *("9p", "virtiofs", "afs", "wekafs", "panfs", "pvfs2", "orangefs", "coda", "autofs"),
        "fuse",
    )
)
"""Types of file systems whose calls may wait for another machine or for a program."""


def _is_network(kind: str) -> bool:
    return kind in _NETWORK or kind.startswith("fuse.")


def lies_on_network(path: str, mounts: Iterable[MountPoint]) -> bool:
    """Return whether a path is on a network file system, according to the mount table.

    The function follows symbolic links, but makes no system call on a network file system.
    """
    kinds = {os.fsdecode(mount.path): os.fsdecode(mount.kind) for mount in mounts}
    left = [name for name in os.path.normpath(path).split("/") if name][::-1]
    at, links_count = "/", 0
    is_remote = _is_network(kinds.get("/", ""))
    while left:
        name = left.pop()
        if name == "..":
            at = os.path.dirname(at)
            continue
        below = os.path.join(at, name)
        if _is_network(kinds.get(below, "")):
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


class RunWithinDeadline(Protocol):
    """Function that returns the result of `work`, or raises DeadlineError about `verb` and `path`.

    `more_s` is added to the deadline.
    """

    def __call__(
        self, verb: str, path: str, work: Callable[[Call[Any]], Result], *, more_s: float = 0.0
    ) -> Result: ...


class NetworkReader:
    """Open file on a network file system. Any thread."""

    block_bytes = 0
    can_stop = True
    has_replicas = False

    def __init__(self, run: RunWithinDeadline, path: str, reader: HasDescriptor) -> None:
        self._within_deadline = run
        self._path = path
        self._reader = reader

    def fileno(self) -> int:
        """Return the file descriptor, which the reader owns and closes."""
        return self._reader.fileno()

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` from `offset`; see `Reader`.

        The helper thread reads into its own memory first, so that a call which was left behind
        never touches `buffer`.
        """

        def fill(call: Call[int]) -> int:
            done = 0
            while done < len(buffer) and not call.abandoned:
                piece = memoryview(bytearray(min(STEP_BYTES, len(buffer) - done)))
                count = self._reader.read_into(offset + done, piece, Attempt())
                call.progress()
                if not count or not attempt.put(done, buffer, piece[:count]):
                    break
                done += count
            return done

        try:
            return self._within_deadline("read", self._path, fill)
        except BaseException:
            attempt.stop()
            raise

    def current(self) -> FileInfo:
        """Return the attributes of the open file."""
        return self._within_deadline("look at", self._path, lambda _: self._reader.current())


class NetworkWriter(Writer):
    """New file on a network file system. One thread."""

    def __init__(self, run: RunWithinDeadline, path: str, writer: LocalWriter) -> None:
        self._within_deadline = run
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
                    # The caller has gone on, and could not remove the file while this call used it.
                    writer.abort()

        try:
            self._within_deadline("write", self._path, run, more_s=more_s)
        except DeadlineError:
            self._writer = None
            raise

    def write(self, data: Piece) -> None:
        view = memoryview(data).cast("B")

        def write(call: Call[Any], writer: LocalWriter) -> None:
            for start in range(0, len(view), STEP_BYTES):
                if call.abandoned:
                    return
                writer.write_view(view[start : start + STEP_BYTES])
                call.progress()

        self._run(write)
        self._unsynced_bytes += len(view)
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._run(lambda _, writer: writer.sync(), self._flush_s)
            self._unsynced_bytes = 0

    @property
    def _flush_s(self) -> float:
        """Time that a flush may take beyond the deadline, since it reports no progress."""
        return self._unsynced_bytes / _SLOWEST_FLUSH_BYTES_PER_S

    def close(self) -> None:
        if self._writer is not None:
            self._run(lambda _, writer: writer.close(), self._flush_s)
            self._writer = None

    def abort(self) -> None:
        self._end(LocalWriter.abort)

    def abandon(self) -> bool:
        # The file is readable as it is.
        self._end(LocalWriter.abandon)
        return True

    def _end(self, end: Callable[[LocalWriter], object]) -> None:
        if self._writer is not None:
            with contextlib.suppress(BootseerError):
                self._run(lambda _, writer: end(writer))
            self._writer = None
