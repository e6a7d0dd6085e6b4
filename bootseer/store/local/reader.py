"""A file of a `file://` backend, kept open for many reads.

Owns one descriptor, and closes it when the reader is not used any more. Thread-safe.
"""

import os
from collections.abc import Callable

from bootseer.errors import BootseerError
from bootseer.store.backend import FileInfo
from bootseer.transfer.attempt import Attempt

# A read that can be given up is made in calls of this size.
_STEP_BYTES = 8 << 20


class LocalReader:
    """An open file (see `abilities.opened`). Its descriptor is closed after the last use."""

    block_bytes = 0
    can_stop = True
    has_replicas = False

    def __init__(self, path: str, fd: int, translated: Callable[[OSError], BootseerError]) -> None:
        """Takes over the descriptor `fd`."""
        self._fd = fd
        self._path = path
        self._translated = translated

    def fileno(self) -> int:
        """As `HasDescriptor`."""
        return self._fd

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """As the protocol says; a call of the kernel that is under way is not given up."""
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
            raise self._translated(error) from error
        return done

    def current(self) -> FileInfo:
        """The file as it is now: it may have been written in place."""
        info = os.fstat(self._fd)
        return FileInfo(self._path, info.st_size, info.st_mtime_ns, False)

    def __del__(self) -> None:
        os.close(self._fd)
