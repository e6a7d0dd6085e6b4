"""Streams in the node cache: pieces on the node's disk, with a checksum for each.

A stream is divided into pieces: the frames of its blob; or 256 KiB each, if it was pulled whole; or
the frames of a bundle. The file `data` holds each byte at its offset in the stream. The file `sums`
has one checksum for each piece, 0 if the piece is absent (docs/format/cache.md). A writer writes
the piece and then its checksum. Each process compares a piece with its checksum once, at its first
use. A piece that does not match becomes absent for all processes.

The page cache outlives a killed process, so kill -9 loses nothing. After a crash of the machine, a
checksum may be on the disk without its piece. Until `check_all` has run, a piece then counts as
present only after it has been compared.

Thread-safe, except that `close` must come last. Several processes may use one stream at once.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, pairwise
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from bootseer.errors import CorruptError, from_oserror
from bootseer.linux.disk_usage import UNWRITABLE
from bootseer.linux.locks import lock_file, lock_within, try_lock, unlock

_log = logging.getLogger(__name__)
_warned_folders: set[Path] = set()
"""Cache folders that this process has warned about, since their disk takes no more."""

OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
LOCK_S = 60.0
"""Deadline for short locks: the holder may wait for an fsync of gigabytes on a slow disk."""

WHOLE_PIECE_BYTES = 256 * 1024
"""Length of the pieces of a stream that was pulled whole: they are compared in less than a
millisecond each, and their checksums take 0.006 % of the stream's size."""

TRY_AGAIN_S = 5.0
"""Pause before the next write to a disk that refused one."""

_MAGIC = b"BSSTREAM"
_VERSION = 1
# magic, version, clean, boot id
_HEADER = struct.Struct("<8sII16s")
HEADER_BYTES = 64
# Two parts of the header that are written by themselves: a process must not undo what another one
# has written into the rest.
_TRUST = struct.Struct("<I16s")
_TRUST_OFFSET = 12
_REFUTED = struct.Struct("<I")
_REFUTED_OFFSET = 32
_NUMBER_BYTES = 8

_ADVICE_BYTES = 128 * 1024
"""The disk's default read-ahead: for one call of posix_fadvise, Linux reads no more than that."""
_COUNT_BYTES = 2**16


@contextlib.contextmanager
def locked_if_there(directory: Path) -> Iterator[None]:
    """Hold the lock for opening, closing or removing the stream in `directory`.

    Raises: FileNotFoundError if there is no such folder; TimeoutError, OSError.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = lock_file(Path("lock"), LOCK_S, folder=folder)
    finally:
        os.close(folder)
    try:
        yield
    finally:
        os.close(fd)


class _StreamHeader(NamedTuple):
    is_clean: bool
    boot: bytes

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, *self).ljust(HEADER_BYTES, b"\0")


def _decode_header(data: bytes | memoryview) -> _StreamHeader | None:
    if len(data) < _HEADER.size:
        return None
    magic, version, clean, boot = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        return None
    return _StreamHeader(clean == 1, boot)


def whole_starts(length: int) -> "array[int]":
    """Return the boundaries of the pieces of a stream of `length` bytes that was pulled whole."""
    return array("Q", [*range(0, length, WHOLE_PIECE_BYTES), length])


def checksum(content: bytes | memoryview) -> int:
    """Return the XXH3-64 of a piece with its lowest bit set, since 0 stands for an absent piece."""
    return xxh3_64_intdigest(content) | 1


def encode_sums(starts: Sequence[int], sums: Sequence[int], boot: bytes) -> bytes:
    """Return the content of the file `sums` for a stream whose pieces were all just written."""
    header = _StreamHeader(False, boot).encode()
    return header + array("Q", sums).tobytes() + _encode_starts(starts)


def read_starts(directory: Path) -> "array[int] | None":
    """Return the boundaries of the pieces of the stream in `directory`.

    Return None if they are missing or damaged, or do not fit the size of `data`.
    """
    try:
        with (directory / "sums").open("rb") as file:
            count, rest = divmod(
                os.fstat(file.fileno()).st_size - HEADER_BYTES - _NUMBER_BYTES, 2 * _NUMBER_BYTES
            )
            if rest or count < 0:
                return None
            file.seek(HEADER_BYTES + _NUMBER_BYTES * count)
            starts = array("Q", file.read(_NUMBER_BYTES * (count + 1)))
        data_bytes = (directory / "data").stat().st_size
    except OSError:
        return None
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != data_bytes:
        return None
    return starts if all(start < stop for start, stop in pairwise(starts)) else None


def present_bytes(directory: Path, starts: Sequence[int]) -> int:
    """Return how many bytes of the stream in `directory` have checksums. Raises: OSError."""
    with (directory / "sums").open("rb") as file:
        return _present_bytes(file.fileno(), starts)


def _encode_starts(starts: Sequence[int]) -> bytes:
    return (starts if isinstance(starts, array) else array("Q", starts)).tobytes()


def _present_bytes(fd: int, starts: Sequence[int]) -> int:
    # Holes of the file are skipped: an index may announce a stream of a terabyte.
    found = 0
    end = HEADER_BYTES + _NUMBER_BYTES * (len(starts) - 1)
    position = HEADER_BYTES
    while position < end:
        try:
            position = max(position, os.lseek(fd, position, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        stop = min(os.lseek(fd, position, os.SEEK_HOLE), end)
        while position < stop:
            block = os.pread(fd, min(_COUNT_BYTES, stop - position), position)
            sums = array("Q", block[: len(block) // _NUMBER_BYTES * _NUMBER_BYTES])
            if not sums:
                return found
            first = (position - HEADER_BYTES) // _NUMBER_BYTES
            lengths = map(int.__sub__, starts[first + 1 : first + len(sums) + 1], starts[first:])
            found += sum(compress(lengths, sums))
            position += _NUMBER_BYTES * len(sums)
    return found


class CachedStream:
    """Stream on this node's disk, maybe in part. `NodeCache` opens it; `close` it at the end."""

    def __init__(
        self,
        directory: Path,
        starts: Sequence[int],
        boot: bytes,
        *,
        takes_frames: bool = True,
        try_again_s: float = TRY_AGAIN_S,
    ) -> None:
        """Open the stream in `directory`. A new stream is created.

        `starts` are the offsets of the pieces, followed by the length of the stream, and `boot` the
        id of this boot of the machine. `takes_frames`: whether the pieces are the frames of a blob;
        False for a stream that was pulled whole.
        Raises: BootseerError if the folder cannot be made or opened.
        """
        self.directory = directory
        self.starts = starts
        self.count = len(starts) - 1
        """Number of pieces."""
        self.stream_length = starts[-1]
        """Size of the whole stream in bytes."""
        self.takes_frames = takes_frames
        self.is_full = False
        """Whether the disk refused the last write. Writes are tried again after a pause."""
        self._boot = boot
        self._try_again_s = try_again_s
        self._next_try_s = 0.0
        self._is_closed = False
        self._is_writing = False
        self._is_doubtful = False
        self._data_fd = self._sums_fd = -1
        self._map: mmap.mmap | None = None
        # One flag for each piece. Its pages take no memory before they are written.
        self._checked = bytearray(self.count)
        self._absent = memoryview(bytes(_NUMBER_BYTES)).cast("Q")
        self._sums: memoryview = self._absent
        self._reopening = threading.Lock()
        try:
            self._open_files(LOCK_S)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise from_oserror(error, f"open the cache in {directory}") from error
            self._warn_full(error)

    # ---- opening --------------------------------------------------------------------------

    def _open_files(self, timeout_s: float) -> None:
        """Open the files, and create them anew if they do not fit `starts`.

        Raises: TimeoutError if another process holds the lock for `timeout_s`; OSError. No file
        stays open then.
        """
        size = HEADER_BYTES + _NUMBER_BYTES * (2 * self.count + 1)
        boundaries = _encode_starts(self.starts)
        data_fd = sums_fd = -1
        # Held while the header is read, never during a transfer.
        lock_fd = lock_file(self.directory / "lock", timeout_s)
        try:
            data_fd = os.open(self.directory / "data", OPEN_FLAGS, 0o600)
            sums_fd = os.open(self.directory / "sums", OPEN_FLAGS, 0o600)
            header = _decode_header(os.pread(sums_fd, HEADER_BYTES, 0))
            boundaries_offset = size - len(boundaries)
            if (
                os.fstat(sums_fd).st_size != size
                or os.fstat(data_fd).st_size != self.stream_length
                or os.pread(sums_fd, len(boundaries), boundaries_offset) != boundaries
            ):
                # No other process may use a stream that is created anew.
                if not try_lock(data_fd):
                    raise BlockingIOError(errno.EAGAIN, "another process uses it")
                os.ftruncate(sums_fd, 0)
                os.ftruncate(sums_fd, size)
                os.ftruncate(data_fd, self.stream_length)
                write_all(sums_fd, boundaries, boundaries_offset)
                header = _StreamHeader(False, self._boot)
                write_all(sums_fd, header.encode(), 0)
            # Held while the stream is open: see `close` and `NodeCache.trim`.
            lock_within(data_fd, timeout_s, is_shared=True)
            mapped = mmap.mmap(sums_fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            for fd in (data_fd, sums_fd):
                if fd >= 0:
                    os.close(fd)
            raise
        finally:
            os.close(lock_fd)
        is_trusted = header is not None and (header.is_clean or header.boot == self._boot)
        self._is_doubtful = not is_trusted
        self._data_fd, self._sums_fd = data_fd, sums_fd
        table = memoryview(mapped)[HEADER_BYTES : HEADER_BYTES + _NUMBER_BYTES * self.count]
        self._sums = table.cast("Q")
        # Set last: a reader that sees the map uses all the other fields.
        self._map = mapped

    def _warn_full(self, error: OSError) -> None:
        self._next_try_s = time.monotonic() + self._try_again_s
        self.is_full = True
        # One warning per cache folder: a disk that is nearly full still takes some of the writes.
        if self.directory.parent not in _warned_folders:
            _warned_folders.add(self.directory.parent)
            _log.warning(
                "cannot write to %s: %s; image data is not cached until it can be written: free "
                "space or set BOOTSEER_CACHE_DIR to a larger disk",
                self.directory,
                error.strerror,
            )

    def _may_try_again(self) -> bool:
        """Return whether the pause after a refused write has ended. Open the files if necessary.

        Return False if the files still cannot be opened.
        """
        if time.monotonic() < self._next_try_s or not self._reopening.acquire(blocking=False):
            return False
        try:
            self._next_try_s = time.monotonic() + self._try_again_s
            if self._data_fd < 0 and not self._is_closed:
                # A reader waits for this thread, so that it does not wait for a lock.
                self._open_files(0)
            return True
        except OSError as error:
            _log.debug("cannot open the cache in %s yet: %s", self.directory, error)
            return False
        finally:
            self._reopening.release()

    # ---- present pieces -------------------------------------------------------------------

    def pieces(self, offset: int, length: int) -> tuple[int, int]:
        """Return the half-open range of the pieces that overlap `[offset, offset + length)`."""
        if length <= 0 or offset >= self.stream_length:
            return 0, 0
        first = bisect_right(self.starts, offset, 0, self.count) - 1
        return first, bisect_left(self.starts, offset + length, first + 1, self.count)

    def holds(self, first: int, stop: int) -> bool:
        """Return whether the pieces `[first, stop)` are present.

        Pieces are read only if a crash of the machine may have lost them. Reading may still find
        that a present piece is damaged.
        """
        if self._map is None:
            return first >= stop
        sums = self._sums
        for number in range(first, stop):
            if not sums[number]:
                return False
        return not self._is_doubtful or all(map(self._is_here, range(first, stop)))

    def holds_bytes(self, offset: int, length: int) -> bool:
        """Return whether all of `[offset, offset + length)` is present. See `holds`."""
        end = offset + length
        if end > self.stream_length or not self.count:
            return False
        # The common case first: a start calls this for each extent of its bundle.
        first = bisect_right(self.starts, offset, 0, self.count) - 1
        if end <= self.starts[first + 1] and not self._is_doubtful and self._map is not None:
            return self._sums[first] != 0
        return self.holds(*self.pieces(offset, length))

    def is_known_to_hold(self, first: int, stop: int) -> bool:
        """Return whether the pieces `[first, stop)` are known to be present. Reads nothing."""
        if self._map is None:
            return first >= stop
        if self._is_doubtful and 0 in self._checked[first:stop] and self.is_doubtful:
            return False
        return 0 not in self._sums[first:stop]

    def missing(self, offset: int, length: int) -> list[int]:
        """Return the absent pieces that overlap `[offset, offset + length)`, ascending."""
        return [n for n in range(*self.pieces(offset, length)) if not self._is_here(n)]

    def _is_here(self, number: int) -> bool:
        if self._map is None or not self._sums[number]:
            return False
        return bool(
            not self._is_doubtful
            or self._checked[number]
            or not self.is_doubtful
            or self._check(number)
        )

    def present_bytes(self) -> int:
        """Return how many bytes of the stream have checksums."""
        return _present_bytes(self._sums_fd, self.starts) if self._map is not None else 0

    # ---- reading and writing --------------------------------------------------------------

    def get(self, offset: int, length: int) -> bytes | memoryview | None:
        """Return the bytes of `[offset, offset + length)`.

        Return None unless all of them are present and match their checksums. Raises: OSError.
        """
        if self._map is None or offset + length > self.stream_length or not self.count:
            return None
        starts, sums, checked = self.starts, self._sums, self._checked
        # `pieces`, inlined: every read comes through here.
        first = bisect_right(starts, offset, 0, self.count) - 1
        if offset + length <= starts[first + 1]:
            stop = first + 1
            if not sums[first]:
                return None
            is_checked = checked[first]
        else:
            stop = bisect_left(starts, offset + length, first + 1, self.count)
            if 0 in sums[first:stop]:
                return None
            is_checked = 0 not in checked[first:stop]
        if is_checked:
            data = os.pread(self._data_fd, length, offset)
            if len(data) != length:
                raise OSError(errno.EIO, f"{self.directory}/data is too short")
            return data
        # One read of whole pieces: they are compared, and the wanted bytes are cut out of them.
        start = starts[first]
        try:
            content = memoryview(os.pread(self._data_fd, starts[stop] - start, start))
        except OSError:
            content = memoryview(b"")
        is_intact = True
        for number in range(first, stop):
            piece = content[starts[number] - start : starts[number + 1] - start]
            if not checked[number] and not self._compare(number, piece):
                is_intact = False
        return content[offset - start : offset - start + length] if is_intact else None

    def read(self, offset: int, length: int) -> bytes:
        """Return present bytes. Raises: CorruptError if absent or damaged; OSError."""
        data = self.get(offset, length)
        if data is None:
            raise CorruptError(
                f"{self.directory}/data is not as it was written: the disk has damaged it"
            )
        return bytes(data)

    def read_ahead(self, offset: int, length: int) -> None:
        """Ask the kernel to read bytes from the disk into memory, without waiting. Never raises."""
        for start in range(offset, offset + length, _ADVICE_BYTES):
            with contextlib.suppress(OSError):
                count = min(_ADVICE_BYTES, offset + length - start)
                os.posix_fadvise(self._data_fd, start, count, os.POSIX_FADV_WILLNEED)

    def put(self, number: int, content: bytes | memoryview) -> bool:
        """Write the verified content of a piece. Return False if the disk takes no more.

        Raises: ValueError if `content` does not have the length of the piece.
        """
        if len(content) != self.starts[number + 1] - self.starts[number]:
            raise ValueError(f"piece {number} of a stream has not {len(content)} bytes")
        if self.is_full and not self._may_try_again():
            return False
        try:
            self._begin_writing()
            write_all(self._data_fd, content, self.starts[number])
            self._write_sum(number, checksum(content))
        except OSError as error:
            self._warn_full(error)
            return False
        self._checked[number] = 1
        if self.is_full:
            self.is_full = False
            _log.info("%s can be written again: image data is cached", self.directory)
        return True

    def _begin_writing(self) -> None:
        """Mark the stream as not clean, durably, before the first write to it."""
        if self._is_writing:
            return
        header = _decode_header(os.pread(self._sums_fd, HEADER_BYTES, 0))
        if header is None or header.is_clean:
            self._write_trust(False, bytes(16) if self._is_doubtful else self._boot)
            os.fdatasync(self._sums_fd)
        self._is_writing = True

    def _write_trust(self, is_clean: bool, boot: bytes) -> None:
        if _decode_header(os.pread(self._sums_fd, HEADER_BYTES, 0)) is None:
            write_all(self._sums_fd, _StreamHeader(is_clean, boot).encode(), 0)
        else:
            write_all(self._sums_fd, _TRUST.pack(is_clean, boot), _TRUST_OFFSET)

    def _write_sum(self, number: int, value: int) -> None:
        # By pwrite: on a full disk, a write through the map raises SIGBUS.
        write_all(self._sums_fd, array("Q", [value]).tobytes(), HEADER_BYTES + 8 * number)

    # ---- comparing ------------------------------------------------------------------------

    def _check(self, number: int) -> bool:
        """Read a piece and compare it with its checksum."""
        start = self.starts[number]
        try:
            content = os.pread(self._data_fd, self.starts[number + 1] - start, start)
        except OSError:
            content = b""
        return self._compare(number, content)

    def _compare(self, number: int, content: bytes | memoryview) -> bool:
        """Return whether `content` has the checksum of the piece; if not, make the piece absent."""
        found = checksum(content)
        # Compared twice, since another process may be writing the checksum.
        if found == self._sums[number] or found == self._sums[number]:
            self._checked[number] = 1
            return True
        start, stop = self.starts[number], self.starts[number + 1]
        _log.warning(
            "bytes %d to %d of %s/data do not match their checksum: the disk has damaged them; "
            "they are fetched again",
            start,
            stop,
            self.directory,
        )
        with contextlib.suppress(OSError):
            self._write_sum(number, 0)
        return False

    def check_all(self, may_go_on: Callable[[], bool] = lambda: True) -> int:
        """Compare all pieces that this process has not compared yet.

        Damaged pieces become absent. At the end, the stream is trusted again if the machine had
        crashed. Return the number of damaged bytes. The check ends early once `may_go_on`, which is
        called before each piece, returns False. Readers need not wait for it.
        """
        damaged = 0
        for number in range(self.count if self._map is not None else 0):
            if not self._sums[number] or self._checked[number]:
                continue
            if not may_go_on():
                return damaged
            if not self._check(number):
                damaged += self.starts[number + 1] - self.starts[number]
        if self.is_doubtful and self._map is not None:
            # Trusted until the next crash, after which the machine has another boot id.
            with contextlib.suppress(OSError):
                self._write_trust(False, self._boot)
        return damaged

    @property
    def is_doubtful(self) -> bool:
        """Whether a crash of the machine may have lost pieces that have checksums."""
        if self._is_doubtful and self._map is not None:
            # Another process may have checked all pieces meanwhile.
            header = _decode_header(self._map[:HEADER_BYTES])
            self._is_doubtful = header is None or header.boot != self._boot
        return self._is_doubtful

    # ---- refuting -------------------------------------------------------------------------

    @property
    def is_refuted(self) -> bool:
        """Whether a process of the node has called `refute`."""
        mapped = self._map
        return mapped is not None and mapped[_REFUTED_OFFSET] == 1

    def refute(self) -> None:
        """Mark the content as wrong for all processes, durably.

        Never raises: if the disk cannot be written to, a warning is logged.
        """
        try:
            write_all(self._sums_fd, _REFUTED.pack(1), _REFUTED_OFFSET)
            # A crash of the machine must not undo the mark.
            os.fsync(self._sums_fd)
        except OSError as error:
            _log.warning(
                "cannot mark %s as wrong, so that other servers may use it: %s",
                self.directory,
                error,
            )

    # ---- fetching once --------------------------------------------------------------------

    def announce(self, first: int, stop: int) -> bool:
        """Tell the other processes of the node that this one fetches the pieces `[first, stop)`.

        Return False if another process has announced one of them. An announcement is a hint. It
        ends with `withdraw` or with the process.
        """
        try:
            self._lock_sums(fcntl.LOCK_EX | fcntl.LOCK_NB, first, stop)
        except OSError as error:
            # On a file system without byte-range locks, every process fetches.
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

    def withdraw(self, first: int, stop: int) -> None:
        """End an announcement. Never raises."""
        with contextlib.suppress(OSError):
            self._lock_sums(fcntl.LOCK_UN, first, stop)

    def _lock_sums(self, kind: int, first: int, stop: int) -> None:
        if self._sums_fd >= 0:
            offset = HEADER_BYTES + _NUMBER_BYTES * first
            fcntl.lockf(self._sums_fd, kind, _NUMBER_BYTES * (stop - first), offset)

    # ---- the end --------------------------------------------------------------------------

    def close(self, *, durable: bool = True) -> None:
        """Close the files. Idempotent.

        With `durable`, the last process that closes the stream flushes it to the disk and marks it
        clean. Without, that is left to `NodeCache.make_durable`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if durable and self._map is not None:
            try:
                self._make_durable()
            except (BlockingIOError, FileNotFoundError):
                pass  # Another process uses the stream and will do this, or has just removed it.
            except OSError as error:
                _log.warning("cannot make the cache in %s durable: %s", self.directory, error)
        mapped, sums = self._map, self._sums
        self._map, self._sums = None, self._absent
        if mapped is not None:
            sums.release()
            mapped.close()
        for fd in (self._data_fd, self._sums_fd):
            if fd >= 0:
                os.close(fd)
        self._data_fd = self._sums_fd = -1

    def _make_durable(self) -> None:
        header = _decode_header(os.pread(self._sums_fd, HEADER_BYTES, 0))
        if header is None or header.is_clean or self._is_doubtful:
            return
        self._lock_exclusively()
        # The long flush comes first, without any lock, so that no process waits for it.
        unlock(self._data_fd)
        self._sync()
        if os.fstat(self._data_fd).st_nlink:
            with locked_if_there(self.directory):
                self._lock_exclusively()
                self._sync()
                self._write_trust(True, header.boot)
                os.fsync(self._sums_fd)

    def _lock_exclusively(self) -> None:
        if not try_lock(self._data_fd):
            raise BlockingIOError

    def _sync(self) -> None:
        os.fsync(self._data_fd)
        os.fsync(self._sums_fd)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises: OSError."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        position += os.pwrite(fd, view[position:], offset + position)
