"""A whole stream that arrives in order, before its length and digest are known.

Alone owns the folders `streams/new-*` (docs/format/cache.md): nothing of one is visible to readers
until `commit` gives it its name. Its writer holds its lock; one whose lock is free was left
by a killed process, and `remove_abandoned` takes it away.

Threading: one thread per `NewStream`.
"""

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from bootseer.errors import InvalidInputError, NoSpaceError, from_oserror
from bootseer.linux.locks import lock_file, lock_within
from bootseer.linux.private_files import make_private_directory
from bootseer.prefetch.cache.files import (
    FULL,
    HEADER_BYTES,
    LOCK_S,
    OPEN_FLAGS,
    SECTOR_BYTES,
    Header,
    write_all,
)
from bootseer.prefetch.cache.presence import PRESENT
from bootseer.prefetch.cache.stream_cache import StreamCache
from bootseer.prefetch.cache.sums import RECORD_STREAM_BYTES_MAX, append_sums, encode_sums

_log = logging.getLogger(__name__)

_PREFIX = "new-"
_COPY_BYTES = 2**20
ROOM_BYTES = 2**24
"""What is freed at once of a full disk."""


class NewStream:
    """Collects a stream. Made by `NodeCache.new_stream`; gone at the end of its `with` block
    unless it was committed."""

    def __init__(
        self,
        streams: Path,
        boot: bytes,
        path_of: Callable[[str], Path],
        open_stream: Callable[[str, int], StreamCache],
        make_room: Callable[[int], int],
    ) -> None:
        """`make_room` frees so many bytes of the disk, if it can, and returns how many it did.

        Raises: BootseerError.
        """
        self.length_bytes = 0
        """What was appended so far."""
        self._streams = streams
        self._boot = boot
        self._path_of = path_of
        self._open_stream = open_stream
        self._make_room = make_room
        self._written_bytes = 0
        self._tail = bytearray()
        self._directory = streams / f"{_PREFIX}{os.urandom(8).hex()}"
        self._fds: list[int] = []
        try:
            # Between folder and lock, a sweeper would take it for one of the dead.
            with _alone(streams):
                make_private_directory(self._directory)
                self._fds.append(lock_file(self._directory / "lock", LOCK_S))
            self._data_fd = os.open(self._directory / "data", OPEN_FLAGS, 0o600)
            self._fds.append(self._data_fd)
            flags = OPEN_FLAGS | os.O_APPEND
            self._sums_fd = os.open(self._directory / "sums", flags, 0o600)
            self._fds.append(self._sums_fd)
            # As every user of a stream has it: from its commit on, `trim` must leave it alone.
            lock_within(self._data_fd, LOCK_S, is_shared=True)
        except OSError as error:
            self.abort()
            raise from_oserror(error, f"keep a new stream in {streams}") from error

    def append(self, data: bytes | memoryview) -> None:
        """Keep the next bytes. Raises: NoSpaceError and others, as the disk refuses."""
        self.length_bytes += len(data)
        view = memoryview(data)
        if self._tail:
            room = RECORD_STREAM_BYTES_MAX - len(self._tail)
            self._tail += view[:room]
            view = view[room:]
            if len(self._tail) < RECORD_STREAM_BYTES_MAX:
                return
            self._write(memoryview(self._tail))
            self._tail = bytearray()
        whole = len(view) - len(view) % RECORD_STREAM_BYTES_MAX
        if whole:
            self._write(view[:whole])
        self._tail += view[whole:]

    def _write(self, data: memoryview) -> None:
        def write() -> None:
            write_all(self._data_fd, data, self._written_bytes)
            append_sums(self._sums_fd, encode_sums(self._written_bytes, data))

        try:
            self._with_room(write)
        except OSError as error:
            raise from_oserror(error, f"write to the cache in {self._streams}") from error
        self._written_bytes += len(data)

    def _with_room(self, write: Callable[[], None]) -> None:
        """Write, and where the disk is full make room and write again. No more room than that
        takes: a layer may say that it is small, and what others keep goes when bytes come.

        Raises: OSError.
        """
        while True:
            try:
                write()
            except OSError as error:
                if error.errno not in FULL or not (freed := self._make_room(ROOM_BYTES)):
                    raise
                _log.info("removed %d bytes that nobody uses: %s", freed, error)
            else:
                return

    def commit(self, digest: str) -> StreamCache:
        """Make it the stream called `digest`, whole at once, and give it opened.

        The caller MUST have verified that what was appended has this digest. What the cache
        has of this stream already, and may be serving, is completed where it is.
        Raises: BootseerError; then nothing has become visible that is not right.
        """
        if not self._fds:
            raise InvalidInputError("the new stream was committed or given up already")
        try:
            target = self._path_of(digest)
            self._write(memoryview(self._tail))
            self._tail = bytearray()
            self._with_room(self._mark_all)
            try:
                self._directory.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return self._complete(digest)
            # Its lock is the stream's now, which opening needs.
            os.close(self._fds.pop(0))
            return self._open_stream(digest, self.length_bytes)
        except OSError as error:
            raise from_oserror(error, f"keep the stream {digest} in {self._streams}") from error
        finally:
            self.abort()

    def _mark_all(self) -> None:
        sectors = -(-self.length_bytes // SECTOR_BYTES)
        header = Header(False, self._boot, self.length_bytes, False)
        fd = os.open(self._directory / "present", OPEN_FLAGS, 0o600)
        try:
            write_all(fd, header.encode(), 0)
            for start in range(0, sectors, _COPY_BYTES):
                marks = PRESENT * min(_COPY_BYTES, sectors - start)
                write_all(fd, marks, HEADER_BYTES + start)
        finally:
            os.close(fd)

    def _complete(self, digest: str) -> StreamCache:
        """Bring what an existing stream lacks."""
        stream = self._open_stream(digest, self.length_bytes)
        try:
            for offset, length in stream.missing(0, stream.stream_length):
                for start in range(offset, offset + length, _COPY_BYTES):
                    count = min(_COPY_BYTES, offset + length - start)
                    if not stream.write(start, os.pread(self._data_fd, count, start)):
                        raise NoSpaceError(
                            f"cannot complete {stream.directory}: the disk is full; free space or "
                            "set BOOTSEER_CACHE_DIR to a larger disk"
                        )
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self) -> None:
        """Forget it. Idempotent; nothing after `commit`. Never raises."""
        if not self._fds:
            return
        shutil.rmtree(self._directory, ignore_errors=True)
        while self._fds:
            # The lock, which comes first, is let go of last.
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def remove_abandoned(streams: Path) -> None:
    """Remove what killed writers left in `streams`. Never raises."""
    if not streams.is_dir():
        return
    with contextlib.suppress(OSError), _alone(streams):
        for directory in streams.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                os.close(lock_file(directory / "lock", 0))
                shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _alone(streams: Path) -> Iterator[None]:
    """Alone in making new folders and in looking for dead ones."""
    make_private_directory(streams)
    fd = os.open(streams, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        lock_within(fd, LOCK_S)
        yield
    finally:
        os.close(fd)
