"""Writer and reader of the `file://` backend.

A file that replaces another one appears whole, in `close`. Writers and readers own their
descriptors. A writer is for one thread at a time, a reader for any.
"""

import contextlib
import os
from collections.abc import Callable

from bootseer.errors import BootseerError, InvalidInputError
from bootseer.store.backend import FileInfo, Piece, Writer
from bootseer.store.local.beneath import file_mode, make_directory, sync_fd
from bootseer.store.paths import TEMPORARY
from bootseer.transfer.attempt import Attempt

CALL_BYTES_MAX = 1 << 30
"""Largest read or write per system call; Linux moves at most 0x7ffff000 bytes."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Size of one read(2): a read can be given up between two of them.
_STEP_BYTES = 8 << 20


class LocalWriter(Writer):
    """New file: created exclusively under its own name, or replacing that name in `close`."""

    def __init__(
        self,
        root: str,
        parent: int,
        name: str,
        translate: Callable[[OSError], BootseerError],
        *,
        overwrite: bool,
    ) -> None:
        """Create the file, and take over the descriptor `parent` of its folder if that succeeds.

        `translate` turns an OSError of a later call into a BootseerError. Raises: OSError.
        """
        self._translate = translate
        self._parent = parent
        self._name = name
        self._home, self._current = parent, name
        if overwrite:
            self._home = make_directory(root, [TEMPORARY])
            self._current = os.urandom(16).hex()
        try:
            self._fd = os.open(self._current, _CREATE, 0o600, dir_fd=self._home)
        except OSError:
            if overwrite:
                os.close(self._home)
            raise
        mode = file_mode(root)
        if mode != 0o600:
            os.fchmod(self._fd, mode)

    def write(self, data: Piece) -> None:
        if self._fd < 0:
            raise InvalidInputError(f"cannot write {self._name}: closed")
        self.write_view(memoryview(data).cast("B"))

    def write_view(self, view: memoryview) -> None:
        """Append the bytes of `view`; see `write`."""
        try:
            while view:
                view = view[os.write(self._fd, view[:CALL_BYTES_MAX]) :]
        except OSError as error:
            raise self._translate(error) from error

    def sync(self) -> None:
        """Flush the data written so far to the storage. Raises: as `write`."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._translate(error) from error

    def close(self) -> None:
        if self._fd < 0:
            return
        try:
            os.fsync(self._fd)
            if self._home != self._parent:
                os.replace(
                    self._current, self._name, src_dir_fd=self._home, dst_dir_fd=self._parent
                )
            sync_fd(self._parent)
        except OSError as error:
            self.abort()
            raise self._translate(error) from error
        self._release()

    def abort(self) -> None:
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._current, dir_fd=self._home)
        self._release()

    def abandon(self) -> bool:
        if self._home == self._parent:
            self._release()
        else:
            self.abort()
        return True

    def _release(self) -> None:
        if self._fd < 0:
            return
        fds = {self._fd, self._parent, self._home}
        self._fd = -1
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        # An unfinished file is removed.
        if getattr(self, "_fd", -1) >= 0:
            self.abort()


class LocalReader:
    """Open file (see `Backend.open_reader`), closed when the last reference is dropped."""

    block_bytes = 0
    can_stop = True
    has_replicas = False

    def __init__(self, path: str, fd: int, translate: Callable[[OSError], BootseerError]) -> None:
        """Take over the descriptor `fd`; `translate` turns an OSError into a BootseerError."""
        self._fd = fd
        self._path = path
        self._translate = translate

    def fileno(self) -> int:
        """Return the file descriptor, which the reader owns and closes."""
        return self._fd

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` from `offset`; see `Reader`. A running system call is not interrupted."""
        done = 0
        try:
            while done < len(buffer):
                with attempt.lock:
                    if attempt.is_given_up:
                        break
                    piece = buffer[done : done + _STEP_BYTES]
                    count = os.preadv(self._fd, [piece], offset + done)
                if not count:
                    break
                done += count
                attempt.done_bytes = done
        except OSError as error:
            raise self._translate(error) from error
        return done

    def current(self) -> FileInfo:
        """Return the present attributes of the open file, which may have been written in place."""
        info = os.fstat(self._fd)
        version = str(info.st_ino)
        return FileInfo(self._path, info.st_size, info.st_mtime_ns, False, version=version)

    def __del__(self) -> None:
        os.close(self._fd)
