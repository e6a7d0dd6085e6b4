"""`LocalWriter`: a new file of a local store. One that replaces another appears whole, in `close`.

Owns the file's descriptor and its folder's until it is closed. One thread at a time.
"""

import contextlib
import os
from collections.abc import Callable

from bootseer.errors import BootseerError, InvalidInputError
from bootseer.store.backend import Piece, Writer
from bootseer.store.local.beneath import file_mode, make_directory, sync_fd

TEMPORARY = ".tmp"
"""Where a file that replaces another one is written first; the Store keeps its own there too."""
CALL_BYTES_MAX = 1 << 30
"""Linux moves at most 0x7ffff000 bytes per call."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalWriter(Writer):
    """A file being written: under its own name (exclusive), or replacing it in `close`."""

    def __init__(
        self,
        root: str,
        parent: int,
        name: str,
        translated: Callable[[OSError], BootseerError],
        *,
        overwrite: bool,
    ) -> None:
        """Takes over the descriptor `parent` of its folder, unless it raises.

        Raises: OSError.
        """
        self._translated = translated
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
        view = memoryview(data).cast("B")
        try:
            while view:
                view = view[os.write(self._fd, view[:CALL_BYTES_MAX]) :]
        except OSError as error:
            raise self._translated(error) from error

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
            raise self._translated(error) from error
        self._release()

    def abort(self) -> None:
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._current, dir_fd=self._home)
        self._release()

    def abandon(self) -> None:
        if self._home == self._parent:
            self._release()
        else:
            self.abort()

    def _release(self) -> None:
        if self._fd < 0:
            return
        fds = {self._fd, self._parent, self._home}
        self._fd = -1
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        # A writer that was not finished leaves nothing half-written behind.
        if getattr(self, "_fd", -1) >= 0:
            self.abort()
