"""A tar stream on its way into the node cache, whole and in order, before its digest is known.

Each such stream has a folder `new-<random>` (docs/format/cache.md), which no reader looks at until
`commit` gives it its name. Its writer holds the folder's lock; a folder whose lock is free was left
by a killed process, and `remove_abandoned` removes it.

A `WholeStream` is for one thread.
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
from bootseer.prefetch.cache.files import FULL, LOCK_S, OPEN_FLAGS
from bootseer.prefetch.cache.stream import (
    WHOLE_PIECE_BYTES,
    CachedStream,
    checksum,
    encode_sums,
    whole_starts,
    write_all,
)

_log = logging.getLogger(__name__)

_PREFIX = "new-"
ROOM_BYTES = 2**24
"""Bytes of a full disk that are freed at once."""


class WholeStream:
    """A stream that is being pulled. Made by `NodeCache.new_stream`; removed at the end of its
    `with` block unless it was committed."""

    def __init__(
        self,
        streams: Path,
        boot: bytes,
        path_of: Callable[[str], Path],
        open_stream: Callable[[str, int], CachedStream],
        make_room: Callable[[int], int],
    ) -> None:
        """`path_of` gives the folder of a key and `open_stream` opens a stream by its key and
        length. `make_room` frees so many bytes of the disk, if it can, and returns how many.

        Raises: BootseerError.
        """
        self.length_bytes = 0
        """Bytes appended so far."""
        self._streams = streams
        self._boot = boot
        self._path_of = path_of
        self._open_stream = open_stream
        self._make_room = make_room
        self._written = 0
        self._sums: list[int] = []
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
            # As every user of a stream has it: from its commit on, `trim` must leave it alone.
            lock_within(self._data_fd, LOCK_S, is_shared=True)
        except OSError as error:
            self.abort()
            raise from_oserror(error, f"keep a new stream in {streams}") from error

    def append(self, data: bytes | memoryview) -> None:
        """Keep the next bytes. Raises: NoSpaceError, BootseerError."""
        self.length_bytes += len(data)
        view = memoryview(data)
        if self._tail:
            room = WHOLE_PIECE_BYTES - len(self._tail)
            self._tail += view[:room]
            view = view[room:]
            if len(self._tail) < WHOLE_PIECE_BYTES:
                return
            self._write(memoryview(self._tail))
            self._tail = bytearray()
        whole = len(view) - len(view) % WHOLE_PIECE_BYTES
        if whole:
            self._write(view[:whole])
        self._tail += view[whole:]

    def _write(self, data: memoryview) -> None:
        try:
            self._with_room(lambda: write_all(self._data_fd, data, self._written))
        except OSError as error:
            raise from_oserror(error, f"write to the cache in {self._streams}") from error
        for start in range(0, len(data), WHOLE_PIECE_BYTES):
            self._sums.append(checksum(data[start : start + WHOLE_PIECE_BYTES]))
        self._written += len(data)

    def _with_room(self, write: Callable[[], None]) -> None:
        """Write; on a full disk make room and write again. No more room is made than that takes: a
        layer may say that it is small, and other streams go only when bytes come.

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

    def commit(self, key: str) -> CachedStream:
        """Give the stream its name `key`, and return it opened; other processes see all of it at
        once.

        The caller MUST have verified that what was appended is the stream of that key. If the cache
        has a part of the stream already, which servers may have open, that part is completed in
        place. Raises: BootseerError; then nothing wrong has become visible.
        """
        if not self._fds:
            raise InvalidInputError("the new stream was committed or given up already")
        try:
            target = self._path_of(key)
            self._write(memoryview(self._tail))
            self._tail = bytearray()
            self._with_room(self._write_sums)
            try:
                self._directory.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return self._complete(key)
            # Its lock is the stream's now, which opening needs.
            os.close(self._fds.pop(0))
            return self._open_stream(key, self.length_bytes)
        except OSError as error:
            raise from_oserror(error, f"keep the stream {key} in {self._streams}") from error
        finally:
            self.abort()

    def _write_sums(self) -> None:
        fd = os.open(self._directory / "sums", OPEN_FLAGS, 0o600)
        try:
            write_all(fd, encode_sums(whole_starts(self.length_bytes), self._sums, self._boot), 0)
        finally:
            os.close(fd)

    def _complete(self, key: str) -> CachedStream:
        """Bring what an existing stream lacks."""
        stream = self._open_stream(key, self.length_bytes)
        try:
            for number in stream.missing(0, stream.stream_length):
                start = stream.starts[number]
                content = os.pread(self._data_fd, stream.starts[number + 1] - start, start)
                if not stream.put(number, content):
                    raise NoSpaceError(
                        f"cannot complete {stream.directory}: the disk is full; free space or "
                        "set BOOTSEER_CACHE_DIR to a larger disk"
                    )
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self) -> None:
        """Remove the stream. Idempotent; does nothing after `commit`. Never raises."""
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
    """Hold the lock for making new folders and for looking for abandoned ones."""
    make_private_directory(streams)
    fd = os.open(streams, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        lock_within(fd, LOCK_S)
        yield
    finally:
        os.close(fd)
