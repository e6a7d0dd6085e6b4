"""One stream in the node cache: which of its bytes are here; reading and writing them.

Alone owns the file `data` of a stream and the life of its map (docs/format/cache.md). Content must
be verified before it comes in, and is compared with its checksums (`stream_check`) before it goes
out.

Several processes share a stream's files: `present` is mapped MAP_SHARED, and a sector's data is
written before its byte is set, so a process that sees the byte may read the data. The page cache
outlives a killed process, so kill -9 loses nothing; what a crash of the *machine* may have torn is
verified before it counts as present again, when it is asked for or by `verify_all`.

Threading: every method from any thread at once, but `close`, which comes last.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.errors import CorruptError, from_oserror
from bootseer.linux.locks import lock_within, try_lock, unlock
from bootseer.prefetch.cache.files import (
    HEADER_BYTES,
    LOCK_S,
    NO_DISK,
    OPEN_FLAGS,
    SECTOR_BYTES,
    Header,
    decode_header,
    locked,
    locked_if_there,
    write_all,
)
from bootseer.prefetch.cache.presence import Presence, map_bytes
from bootseer.prefetch.cache.stream_check import StreamCheck
from bootseer.prefetch.cache.sums import append_sums, encode_sums

_log = logging.getLogger(__name__)

TRY_AGAIN_S = 5.0
"""A disk that refused a write is tried again no sooner."""
"""A disk that has refused a write is asked again then: room is made while a server lives."""
_ADVICE_BYTES = 128 * 1024
"""Linux reads no more ahead for one call than a disk's read-ahead, 128 KiB where nobody set it."""


class StreamCache:
    """What this node has of one stream. Made by `NodeCache.open_stream`."""

    def __init__(
        self,
        directory: Path,
        stream_length: int,
        boot: bytes,
        *,
        try_again_s: float = TRY_AGAIN_S,
    ) -> None:
        """A disk that refused a write is tried again no sooner than `try_again_s` later.

        Raises: BootseerError when the folder cannot be made or opened.
        """
        self.directory = directory
        self.stream_length = stream_length
        self.is_full = False
        """The disk refused the last write: what comes in is not kept, but for a try at times."""
        self._boot = boot
        self._sector_count = -(-stream_length // SECTOR_BYTES)
        self._data_fd = self._sums_fd = -1
        self._is_closed = False
        self._has_warned = False
        self._try_again_s = try_again_s
        self._again_s = 0.0
        self._reopening = threading.Lock()
        self._before: tuple[Presence, StreamCheck] | None = None
        try:
            self._present, self._check = self._open_files(LOCK_S)
        except OSError as error:
            if error.errno not in NO_DISK:
                raise from_oserror(error, f"open the cache in {directory}") from error
            self._present, self._check = self._without_disk(error)

    # ---- opening --------------------------------------------------------------------------

    def _open_files(self, timeout_s: float) -> tuple[Presence, StreamCheck]:
        """Raises: TimeoutError where others hold the lock for `timeout_s`; OSError. Nothing is open
        then."""
        try:
            with locked(self.directory, timeout_s):
                self._data_fd = os.open(self.directory / "data", OPEN_FLAGS, 0o600)
                self._sums_fd = os.open(self.directory / "sums", OPEN_FLAGS | os.O_APPEND, 0o600)
                opened = self._open_present(self._boot)
                try:
                    # Held for as long as we use the stream; see `close` and `NodeCache.trim`.
                    lock_within(self._data_fd, timeout_s, is_shared=True)
                except BaseException:
                    for part in opened:
                        part.close()
                    raise
                return opened
        except BaseException:
            self._close_files()
            raise

    def _open_present(self, boot: bytes) -> tuple[Presence, StreamCheck]:
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
            except OSError:
                present.close()
                raise
            check = StreamCheck(
                self.directory, self.stream_length, present, self._data_fd, self._sums_fd
            )
            is_suspect = trusted.is_suspect if trusted else check.suspect_all()
            # Last: until the header is there, a process that finds the map makes it anew. Of a new
            # file the disk has this header or none: a first start need not wait for the disk.
            present.begin(Header(False, boot, self.stream_length, is_suspect), durable=not is_new)
            return present, check
        finally:
            os.close(fd)

    def _without_disk(self, error: OSError) -> tuple[Presence, StreamCheck]:
        """The stream of a cache that keeps nothing for now."""
        self._warn_full(error)
        size = map_bytes(self.stream_length)
        present = Presence(mmap.mmap(-1, size), self.stream_length)
        return present, StreamCheck(self.directory, self.stream_length, present, -1, -1)

    def _is_trusted(self, fd: int, header: Header, boot: bytes) -> bool:
        return (
            header.stream_length == self.stream_length
            and os.fstat(fd).st_size == map_bytes(self.stream_length)
            and os.fstat(self._data_fd).st_size == self.stream_length
            and (header.boot == boot or header.is_clean)
        )

    def _warn_full(self, error: OSError) -> None:
        self._again_s = time.monotonic() + self._try_again_s
        self.is_full = True
        # Once: a disk that is nearly full takes a write now and then.
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "cannot write to %s: %s; image data is not cached until it can be written: free "
                "space or set BOOTSEER_CACHE_DIR to a larger disk",
                self.directory,
                error.strerror,
            )

    def _may_try_again(self) -> bool:
        """Whether a write should be tried although the disk refused the last one. Opens the files
        if they could not be opened before."""
        if time.monotonic() < self._again_s or not self._reopening.acquire(blocking=False):
            return False
        try:
            self._again_s = time.monotonic() + self._try_again_s
            if self._data_fd < 0 and not self._is_closed:
                before = self._present, self._check
                # A reader waits for this: what others are doing here is not waited for.
                present, self._check = self._open_files(0)
                # Last: a reader that finds something here asks the check that belongs to it.
                self._present = present
                # A reader may use these still: closed at the end.
                self._before = before
            return True
        except OSError as error:
            _log.debug("cannot open the cache in %s yet: %s", self.directory, error)
            return False
        finally:
            self._reopening.release()

    # ---- what is here ---------------------------------------------------------------------

    def has(self, offset: int, length: int) -> bool:
        """Whether all of `[offset, offset + length)` is here, and as it was written: what this
        process has not compared with its checksums yet is read first."""
        if self._check.is_suspect:
            self._check.settle(offset, length)
        if self._present.lacks(offset, length):
            return False
        return (
            not self._check.is_due(offset, length) or self._check.read(offset, length) is not None
        )

    def holds(self, offset: int, length: int) -> bool:
        """As `has`, but believes the map, and reads only after a crash of the machine: for who
        wants no byte yet. What turns out to be damaged is absent when it is read."""
        if self._check.is_suspect:
            self._check.settle(offset, length)
        return not self._present.lacks(offset, length)

    def holds_now(self, offset: int, length: int) -> bool:
        """As `holds`, but never reads, and is False after a crash for what is to be verified yet:
        for who must be quick."""
        if self._check.is_suspect and self._present.doubts(offset, length):
            return False
        return not self._present.lacks(offset, length)

    def lacks_all(self, offset: int, length: int) -> bool:
        """Whether not one sector of `[offset, offset + length)` is here and verified."""
        return self._present.lacks_all(offset, length)

    def missing(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """The absent parts of `[offset, offset + length)` as (offset, length), sector-aligned
        but for the end of the stream, ascending; as `holds` has it."""
        self._check.settle(offset, length)
        yield from self._present.missing(offset, length)

    def here(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """The parts that are not missing, likewise."""
        self._check.settle(offset, length)
        yield from self._present.here(offset, length)

    def present_bytes(self) -> int:
        """How much of the stream is here."""
        return self._present.count_bytes()

    # ---- reading and writing --------------------------------------------------------------

    def get(self, offset: int, length: int) -> bytes | memoryview | None:
        """The bytes where `has` says that all of them are here, else None. Raises: OSError."""
        if self._check.is_suspect:
            self._check.settle(offset, length)
        if self._present.lacks(offset, length):
            return None
        data: bytes | memoryview | None
        if self._check.is_due(offset, length):
            data = self._check.read(offset, length)
        else:
            data = os.pread(self._data_fd, length, offset)
        if data is not None and len(data) != length:
            raise OSError(errno.EIO, f"{self.directory}/data is shorter than its map says")
        return data

    def read(self, offset: int, length: int) -> bytes:
        """The bytes, of which `has` or `holds` must have said that they are here. Raises: OSError;
        CorruptError where they turn out to be damaged."""
        data = self.get(offset, length)
        if data is None:
            raise CorruptError(
                f"{self.directory}/data is not as it was written: the disk has damaged it"
            )
        return bytes(data)

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
        if self.is_full and not self._may_try_again():
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
        self._check.wrote(start, len(whole))
        if self.is_full:
            self.is_full = False
            _log.info("%s can be written again: image data is cached", self.directory)
        return True

    def forget(self) -> None:
        """Nothing of it is believed any more, by no process."""
        self._present.clear(0, self.stream_length)

    # ---- fetching once --------------------------------------------------------------------

    def announce(self, offset: int, length: int) -> bool:
        """Tell the other processes of the node that this one fetches `[offset, offset + length)`;
        False when one of them does. A hint, which ends with `withdraw` or the process."""
        if self._sums_fd < 0:
            return True
        try:
            fcntl.lockf(self._sums_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, offset)
        except OSError as error:
            # Where the file system has no such locks, everybody fetches.
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

    def withdraw(self, offset: int, length: int) -> None:
        """It is here, or it failed. Never raises."""
        if self._sums_fd < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.lockf(self._sums_fd, fcntl.LOCK_UN, length, offset)

    # ---- verifying ------------------------------------------------------------------------

    def recheck(self) -> int:
        """As `StreamCheck.recheck`."""
        return self._check.recheck()

    def verify_all(self, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """As `StreamCheck.verify_all`."""
        self._check.verify_all(may_go_on)

    # ---- the end --------------------------------------------------------------------------

    def close(self, *, durable: bool = True) -> None:
        """Let go. The last user on the node makes everything durable and marks it clean, unless it
        is told to leave that to `NodeCache.make_durable`."""
        if self._is_closed:
            return
        self._is_closed = True
        if durable and self._data_fd >= 0:
            try:
                self._make_durable()
            except (BlockingIOError, FileNotFoundError):
                pass  # Another process uses it still, and will do this, or has just removed it.
            except OSError as error:
                _log.warning("cannot make the cache in %s durable: %s", self.directory, error)
        for part in (self._present, self._check, *(self._before or ())):
            part.close()
        self._close_files()

    def _make_durable(self) -> None:
        self._alone()
        # The long part. Who opens the stream meanwhile waits for none of it.
        unlock(self._data_fd)
        self._sync()
        if os.fstat(self._data_fd).st_nlink:
            with locked_if_there(self.directory):
                self._alone()
                self._sync()
                self._present.end()

    def _alone(self) -> None:
        """Raises: BlockingIOError when another process uses the stream."""
        if not try_lock(self._data_fd):
            raise BlockingIOError

    def _sync(self) -> None:
        os.fsync(self._data_fd)
        os.fsync(self._sums_fd)

    def _close_files(self) -> None:
        for fd in (self._data_fd, self._sums_fd):
            if fd >= 0:
                os.close(fd)
        self._data_fd = self._sums_fd = -1
