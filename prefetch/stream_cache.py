"""One stream in the node cache: which of its bytes are here, read, write, verify after a crash.

Alone owns the file `data` of a stream and the life of its map (docs/format/cache.md). Content must
be verified before it comes in.

Several processes share a stream's files: `present` is mapped MAP_SHARED, and a sector's data is
written before its byte is set, so whoever sees the byte may read the data. The page cache outlives
a killed process, so kill -9 loses nothing; what a crash of the *machine* may have torn is verified
against the log of checksums before it is believed again, when it is asked for or by `verify_all`.

Threading: every method from any thread at once, but `close`, which comes last.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.errors import from_oserror
from bootseer.prefetch.cache_files import (
    FULL,
    HEADER_BYTES,
    OPEN_FLAGS,
    SECTOR_BYTES,
    Header,
    decode_header,
    locked,
    write_all,
)
from bootseer.prefetch.presence import Presence, map_bytes
from bootseer.prefetch.sums import (
    RECORD_BYTES,
    Sum,
    Sums,
    append_sums,
    encode_sums,
    matches,
)

_log = logging.getLogger(__name__)

_ADVICE_BYTES = 128 * 1024
"""Linux reads no more ahead for one call than a disk's read-ahead, 128 KiB where nobody set it."""
_VERIFY_BYTES = 8 * 2**20
"""What `verify_all` does between two looks at whether to go on."""

_LOG_BYTES_MAX = 2**28
"""Enough for 2 TB in whole records; what lies behind is fetched again after a crash."""

_RECHECK_BYTES = 4 * 2**20
"""Not present for others for as long as it takes to read that much."""


class StreamCache:
    """What this node has of one stream. Made by `NodeCache.open_stream`."""

    def __init__(self, directory: Path, stream_length: int, boot: bytes) -> None:
        """Raises: BootseerError when the folder cannot be made or opened."""
        self.directory = directory
        self.stream_length = stream_length
        self.is_full = False
        """The disk refused a write: what comes in is no longer kept."""
        self._sector_count = -(-stream_length // SECTOR_BYTES)
        self._sums: Sums | None = None
        self._marking = threading.Lock()
        self._data_fd = self._sums_fd = -1
        try:
            with locked(directory):
                self._data_fd = os.open(directory / "data", OPEN_FLAGS, 0o600)
                self._sums_fd = os.open(directory / "sums", OPEN_FLAGS | os.O_APPEND, 0o600)
                self._present = self._open_present(boot)
                # Held for as long as we use the stream; see `close` and `NodeCache.trim`.
                fcntl.flock(self._data_fd, fcntl.LOCK_SH)
        except OSError as error:
            self._close_files()
            raise from_oserror(error, f"open the cache in {directory}") from error
        self._is_suspect = self._present.is_suspect

    # ---- opening --------------------------------------------------------------------------

    def _open_present(self, boot: bytes) -> Presence:
        fd = os.open(self.directory / "present", OPEN_FLAGS, 0o600)
        try:
            is_new = os.fstat(fd).st_size == 0
            header = decode_header(os.pread(fd, HEADER_BYTES, 0))
            trusted = header if header and self._is_trusted(fd, header, boot) else None
            if trusted is None:
                # Nobody else may use what is made anew: BlockingIOError.
                self._alone()
                os.ftruncate(fd, 0)
                os.ftruncate(self._data_fd, self.stream_length)
            size = map_bytes(self.stream_length)
            os.ftruncate(fd, size)
            present = Presence(mmap.mmap(fd, size, mmap.MAP_SHARED), self.stream_length, os.dup(fd))
            try:
                present.make_room(0, SECTOR_BYTES)
            except OSError as error:
                present.close()
                if error.errno not in FULL:
                    raise
                self._warn_full(error)
                return Presence(mmap.mmap(-1, size), self.stream_length)
            is_suspect = trusted.is_suspect if trusted else self._suspect_all(present)
            # Last: until the header is there, whoever finds the map makes it anew. Of a new file
            # the disk has this header or none: a first start need not wait for the disk.
            present.begin(Header(False, boot, self.stream_length, is_suspect), durable=not is_new)
            return present
        finally:
            os.close(fd)

    def _is_trusted(self, fd: int, header: Header, boot: bytes) -> bool:
        return (
            header.stream_length == self.stream_length
            and os.fstat(fd).st_size == map_bytes(self.stream_length)
            and os.fstat(self._data_fd).st_size == self.stream_length
            and (header.boot == boot or header.is_clean)
        )

    def _suspect_all(self, present: Presence) -> bool:
        """Mark what was written once, in an empty map; whether that is anything."""
        size = os.fstat(self._sums_fd).st_size
        if size % RECORD_BYTES:
            os.ftruncate(self._sums_fd, size - size % RECORD_BYTES)
        found = False
        for one in self._read_sums():
            if self._has_room(present, one):
                present.mark_suspect(one.offset, one.length)
                found = True
        return found

    def _has_room(self, present: Presence, one: Sum) -> bool:
        """Whether the map takes marks there; without, these bytes are fetched again."""
        try:
            present.make_room(one.offset, one.length)
        except OSError as error:
            self._warn_full(error)
            return False
        return True

    def _warn_full(self, error: OSError) -> None:
        if not self.is_full:
            self.is_full = True
            _log.warning(
                "cannot write to %s: %s; image data is no longer cached: free space or set "
                "BOOTSEER_CACHE_DIR to a larger disk",
                self.directory,
                error.strerror,
            )

    # ---- what is here ---------------------------------------------------------------------

    def has(self, offset: int, length: int) -> bool:
        """Whether all of `[offset, offset + length)` is here. After a crash of the machine this
        may read it first, to verify it."""
        if self._is_suspect:
            self._verify(offset, length)
        return not self._present.lacks(offset, length)

    def has_verified(self, offset: int, length: int) -> bool:
        """As `has`, but False for what it would have to read first: for who must be quick."""
        if self._is_suspect and self._present.doubts(offset, length):
            return False
        return not self._present.lacks(offset, length)

    def missing(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """The absent parts of `[offset, offset + length)` as (offset, length), sector-aligned
        but for the end of the stream, ascending."""
        if self._is_suspect:
            self._verify(offset, length)
        yield from self._present.missing(offset, length)

    def present_bytes(self) -> int:
        """How much of the stream is here and verified."""
        return self._present.count_bytes()

    # ---- reading and writing --------------------------------------------------------------

    def read(self, offset: int, length: int) -> bytes:
        """The bytes, which `has` must have said are here. Raises: OSError."""
        data = os.pread(self._data_fd, length, offset)
        if len(data) != length:
            raise OSError(errno.EIO, f"{self.directory}/data is shorter than its map says")
        return data

    def read_ahead(self, offset: int, length: int) -> None:
        """Have the kernel bring bytes from the disk into memory, without waiting. Only a hint: it
        never fails, also not after `close`."""
        for start in range(offset, offset + length, _ADVICE_BYTES):
            with contextlib.suppress(OSError):
                count = min(_ADVICE_BYTES, offset + length - start)
                os.posix_fadvise(self._data_fd, start, count, os.POSIX_FADV_WILLNEED)

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Keep verified bytes of the stream; False when the disk takes no more.

        Sectors that `data` covers only in part are not marked, unless the stream ends there.

        Raises: ValueError for bytes outside the stream.
        """
        end_offset = offset + len(data)
        if offset < 0 or end_offset > self.stream_length:
            raise ValueError(f"[{offset}, {end_offset}) is outside a stream's {self.stream_length}")
        if self.is_full:
            return False
        first = -(-offset // SECTOR_BYTES)
        at_end = end_offset == self.stream_length
        end = self._sector_count if at_end else end_offset // SECTOR_BYTES
        if first >= end:
            return True
        start = first * SECTOR_BYTES
        whole = memoryview(data)[start - offset : min(end * SECTOR_BYTES, end_offset) - offset]
        try:
            self._present.make_room(start, len(whole))
            write_all(self._data_fd, whole, start)
            append_sums(self._sums_fd, encode_sums(start, whole))
        except OSError as error:
            self._warn_full(error)
            return False
        with self._marking:
            self._present.mark(start, len(whole))
        return True

    # ---- fetching once --------------------------------------------------------------------

    def claim(self, offset: int, length: int) -> bool:
        """Tell the other processes of the node that this one fetches `[offset, offset + length)`;
        False when one of them does. A hint, which ends with `disclaim` or the process."""
        try:
            fcntl.lockf(self._sums_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, offset)
        except OSError as error:
            # Where the file system has no such locks, everybody fetches.
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

    def disclaim(self, offset: int, length: int) -> None:
        """It is here, or it failed. Never raises."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._sums_fd, fcntl.LOCK_UN, length, offset)

    # ---- after a crash --------------------------------------------------------------------

    def recheck(self) -> int:
        """Compare all that is here with its checksums, as after a crash; how many bytes were
        damaged, which are absent from then on. Readers may go on meanwhile."""
        before = self.present_bytes()
        # Should we be killed meanwhile, the next one to open it goes on.
        self._present.is_suspect = True
        for start in range(0, self.stream_length, _RECHECK_BYTES):
            length = min(_RECHECK_BYTES, self.stream_length - start)
            with self._marking:
                self._present.suspect(start, length)
            self._verify(start, length)
        self._is_suspect = True
        self.verify_all()
        return max(0, before - self.present_bytes())

    def verify_all(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Verify all that was written before a crash of the machine, if there was one.

        `may_go_on` is asked now and then. Raises nothing: what cannot be read is absent.
        """
        position: int | None = 0
        while self._is_suspect and may_go_on():
            position = self._present.next_suspect(position or 0)
            if position is None:
                self._is_suspect = self._present.is_suspect = False
                return
            self._verify(position, min(_VERIFY_BYTES, self.stream_length - position))

    def _verify(self, offset: int, length: int) -> None:
        """Leave nothing suspect in `[offset, offset + length)`: what a record proves is present,
        the rest is absent. Several may do this at once: each only writes what is true."""
        if not self._present.doubts(offset, length):
            return
        with self._marking:
            if self._sums is None:
                self._sums = self._read_sums()
        for one in self._sums.covering(offset, length):
            # Another record may have proved these already.
            if (
                self._present.doubts(one.offset, one.length)
                and self._is_intact(one)
                and self._has_room(self._present, one)
            ):
                self._present.mark(one.offset, one.length)
        with self._marking:
            self._present.clear_suspects(offset, length)

    def _is_intact(self, one: Sum) -> bool:
        try:
            return matches(os.pread(self._data_fd, one.length, one.offset), one)
        except OSError:
            return False

    def _read_sums(self) -> Sums:
        size = os.fstat(self._sums_fd).st_size
        try:
            log = os.pread(self._sums_fd, min(size, _LOG_BYTES_MAX), 0)
        except OSError as error:
            _log.warning("cannot read %s/sums: %s", self.directory, error)
            log = b""
        return Sums(log, self.stream_length)

    # ---- the end --------------------------------------------------------------------------

    def close(self, *, durable: bool = True) -> None:
        """Let go. The last user on the node makes everything durable and marks it clean, unless it
        is told to leave that to `NodeCache.make_durable`."""
        if self._data_fd < 0:
            return
        if durable:
            try:
                self._make_durable()
            except BlockingIOError:
                pass  # Somebody else uses it still, and will do this.
            except OSError as error:
                _log.warning("cannot make the cache in %s durable: %s", self.directory, error)
        self._present.close()
        self._close_files()

    def _make_durable(self) -> None:
        self._alone()
        # The long part. Who opens the stream meanwhile waits for none of it.
        fcntl.flock(self._data_fd, fcntl.LOCK_UN)
        self._sync()
        if os.fstat(self._data_fd).st_nlink:
            with locked(self.directory):
                self._alone()
                self._sync()
                self._present.end()

    def _alone(self) -> None:
        """Raises: BlockingIOError when another process uses the stream."""
        fcntl.flock(self._data_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _sync(self) -> None:
        os.fsync(self._data_fd)
        os.fsync(self._sums_fd)

    def _close_files(self) -> None:
        for fd in (self._data_fd, self._sums_fd):
            if fd >= 0:
                os.close(fd)
        self._data_fd = self._sums_fd = -1
