"""Streams that arrive whole and in order, before their digests are known.

Such a stream has a folder `new-<random>` (docs/format/cache.md) in the node cache until `commit`
gives the folder its final name. Readers ignore the folder until then. Its writer holds the folder's
lock; a folder whose lock is free was left by a killed process, and `NodeCache` removes it.

A `WholeStream` is for one thread.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from typing import Self

from bootseer.errors import InvalidInputError, NoSpaceError, from_oserror
from bootseer.linux.disk_usage import FULL
from bootseer.linux.locks import lock_file, lock_within
from bootseer.linux.private_files import make_private_directory
from bootseer.linux.removal import remove_tree
from bootseer.prefetch.cache.node_cache import NEW_PREFIX, NodeCache
from bootseer.prefetch.cache.stream import (
    LOCK_S,
    OPEN_FLAGS,
    WHOLE_PIECE_BYTES,
    CachedStream,
    checksum,
    encode_sums,
    whole_starts,
    write_all,
)

_log = logging.getLogger(__name__)


class WholeStream:
    """Stream that is being pulled. Removed at the end of its `with` block unless committed.

    Made by `NodeCache.new_stream`.
    """

    def __init__(self, cache: NodeCache) -> None:
        """Create the folder of the stream. Raises: BootseerError."""
        self.length_bytes = 0
        """Bytes appended so far."""
        self._cache = cache
        self._streams = streams = cache.directory
        self._written = 0
        self._sums: list[int] = []
        self._tail = bytearray()
        self._directory = streams / f"{NEW_PREFIX}{os.urandom(8).hex()}"
        self._fds: list[int] = []
        try:
            # A folder without a held lock looks abandoned.
            with cache.new_folders_locked():
                make_private_directory(self._directory)
                self._fds.append(lock_file(self._directory / "lock", LOCK_S))
            self._data_fd = os.open(self._directory / "data", OPEN_FLAGS, 0o600)
            self._fds.append(self._data_fd)
            # The lock that every user of a stream holds: after the commit `trim` must keep it.
            lock_within(self._data_fd, LOCK_S, is_shared=True)
        except OSError as error:
            self.abort()
            raise from_oserror(error, f"keep a new stream in {streams}") from error

    def append(self, data: bytes | memoryview) -> None:
        """Append the next bytes. Raises: NoSpaceError, BootseerError."""
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
        """Call `write`, and again after making room as long as the disk is full.

        Room is made for bytes that have come, since the announced size of a layer may be wrong.
        Raises: OSError.
        """
        while True:
            try:
                write()
            except OSError as error:
                if error.errno not in FULL or not (freed := self._cache.make_room()):
                    raise
                _log.info("removed %d bytes of unused streams: %s", freed, error)
            else:
                return

    def commit(self, key: str) -> CachedStream:
        """Make the stream visible under `key`, in one step, and return it opened.

        The caller MUST have verified that the appended bytes are the stream of that key. If the
        cache has a part of the stream already, which servers may have open, the missing pieces are
        added to it. Raises: BootseerError; even then, no wrong bytes have become visible.
        """
        if not self._fds:
            raise InvalidInputError("the new stream was already committed or aborted")
        try:
            target = self._cache.path_of(key)
            self._write(memoryview(self._tail))
            self._tail = bytearray()
            self._with_room(self._write_sums)
            try:
                self._directory.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return self._complete(key)
            # The folder's lock has become the lock of the stream, which `_open` takes.
            os.close(self._fds.pop(0))
            return self._open(key)
        except OSError as error:
            raise from_oserror(error, f"keep the stream {key} in {self._streams}") from error
        finally:
            self.abort()

    def _open(self, key: str) -> CachedStream:
        return self._cache.open_pieces(key, whole_starts(self.length_bytes), takes_frames=False)

    def _write_sums(self) -> None:
        fd = os.open(self._directory / "sums", OPEN_FLAGS, 0o600)
        try:
            write_all(
                fd, encode_sums(whole_starts(self.length_bytes), self._sums, self._cache.boot), 0
            )
        finally:
            os.close(fd)

    def _complete(self, key: str) -> CachedStream:
        """Write the pieces that the existing stream `key` lacks."""
        stream = self._open(key)
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
        """Remove the stream unless it was committed. Idempotent. Never raises."""
        if not self._fds:
            return
        with contextlib.suppress(OSError):
            remove_tree(self._directory)
        while self._fds:
            # The lock is the first in the list, so that it is released last.
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
