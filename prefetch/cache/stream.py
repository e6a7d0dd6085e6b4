"""A tar stream in the node cache: its pieces on the disk, and a checksum for each.

A stream is cut into pieces: the frames of its blob, 256 KiB each of a stream that was pulled whole,
the frames of a bundle. The file `data` holds the bytes, each at its own offset; the file `sums` has
one checksum for each piece, 0 for a piece that is absent (docs/format/cache.md). A writer writes
the piece and then its checksum. A process compares a piece with its checksum at its own first use
and remembers that; a piece that does not match becomes absent for all processes.

The page cache outlives a killed process, so kill -9 loses nothing. After a crash of the machine a
checksum may be there without the piece: then a piece counts as present once it has been compared.

Thread-safe, but `close`, which comes last. Several processes may use one stream at once.
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
from bootseer.linux.locks import lock_within, try_lock, unlock
from bootseer.prefetch.cache.files import (
    LOCK_S,
    NO_DISK,
    OPEN_FLAGS,
    locked,
    locked_if_there,
)

_log = logging.getLogger(__name__)
_warned_of: set[Path] = set()
"""Folders of caches that could not be written to, and of which this process has warned."""

WHOLE_PIECE_BYTES = 256 * 1024
"""Length of the pieces of a stream that was pulled whole: a first use compares a quarter of a
megabyte in less than a millisecond, and the checksums take 0.006 % of the stream."""

TRY_AGAIN_S = 5.0
"""Pause before the next write to a disk that refused one."""

_MAGIC = b"BSSTREAM"
_VERSION = 1
# magic, version, clean, boot id
_HEADER = struct.Struct("<8sII16s")
HEADER_BYTES = 64
# Written apart, so that no process takes back what another one says.
_TRUST = struct.Struct("<I16s")
_TRUST_OFFSET = 12
_REFUTED = struct.Struct("<I")
_REFUTED_OFFSET = 32
_NUMBER_BYTES = 8

_ADVICE_BYTES = 128 * 1024
"""Linux reads no more ahead for one call than a disk's read-ahead, 128 KiB where nobody set it."""
_COUNT_BYTES = 2**16


class _Header(NamedTuple):
    is_clean: bool
    boot: bytes

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, *self).ljust(HEADER_BYTES, b"\0")


def _decode_header(data: bytes | memoryview) -> _Header | None:
    if len(data) < _HEADER.size:
        return None
    magic, version, clean, boot = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        return None
    return _Header(clean == 1, boot)


def whole_starts(length: int) -> "array[int]":
    """Return the boundaries of the pieces of a stream of `length` bytes that was pulled whole."""
    return array("Q", [*range(0, length, WHOLE_PIECE_BYTES), length])


def checksum(content: bytes | memoryview) -> int:
    """Return the XXH3-64 of a piece, made odd: 0 stands for an absent piece."""
    return xxh3_64_intdigest(content) | 1


def encode_sums(starts: Sequence[int], sums: Sequence[int], boot: bytes) -> bytes:
    """Return the content of the file `sums` of a stream all of whose pieces were just written."""
    header = _Header(False, boot).encode()
    return header + array("Q", sums).tobytes() + _boundaries(starts)


def read_starts(directory: Path) -> "array[int] | None":
    """Return the boundaries of the pieces of the stream in `directory`; None if it has none, or
    none that fit its data."""
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
    """Return how many bytes of the stream in `directory` are here, by its file. Raises: OSError."""
    with (directory / "sums").open("rb") as file:
        return _present_bytes(file.fileno(), starts)


def _boundaries(starts: Sequence[int]) -> bytes:
    return (starts if isinstance(starts, array) else array("Q", starts)).tobytes()


def _present_bytes(fd: int, starts: Sequence[int]) -> int:
    """The same; goes past the file's holes, since an index may announce a terabyte."""
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
    """Pieces of one stream on this node's disk. Open it through `NodeCache`; close it."""

    def __init__(
        self,
        directory: Path,
        starts: Sequence[int],
        boot: bytes,
        *,
        takes_frames: bool = True,
        try_again_s: float = TRY_AGAIN_S,
    ) -> None:
        """Open the stream in `directory`, which is made if needed.

        Args:
            starts: The offset of each piece, and at the end the stream's length.
            boot: The id of this boot of the machine.
            takes_frames: Whether the pieces are the frames of a blob; False for a stream that was
                pulled whole.
            try_again_s: Pause before the next write to a disk that refused one.

        Raises: BootseerError if the folder cannot be made or opened.
        """
        self.directory = directory
        self.starts = starts
        self.count = len(starts) - 1
        """Number of the pieces."""
        self.stream_length = starts[-1]
        """Bytes of the whole stream."""
        self.takes_frames = takes_frames
        self.is_full = False
        """Whether the disk refused the last write. Writes are tried again now and then."""
        self._boot = boot
        self._try_again_s = try_again_s
        self._again_s = 0.0
        self._is_closed = False
        self._is_writing = False
        self._is_doubtful = False
        self._data_fd = self._sums_fd = -1
        self._map: mmap.mmap | None = None
        # Zeros that take no memory before they are written.
        self._checked = bytearray(self.count)
        self._absent = memoryview(bytes(_NUMBER_BYTES)).cast("Q")
        self._sums: memoryview = self._absent
        self._reopening = threading.Lock()
        try:
            self._open_files(LOCK_S)
        except OSError as error:
            if error.errno not in NO_DISK:
                raise from_oserror(error, f"open the cache in {directory}") from error
            self._warn_full(error)

    # ---- opening --------------------------------------------------------------------------

    def _open_files(self, timeout_s: float) -> None:
        """Raises: TimeoutError where others hold the lock for `timeout_s`; OSError. Nothing is open
        then."""
        size = HEADER_BYTES + _NUMBER_BYTES * (2 * self.count + 1)
        boundaries = _boundaries(self.starts)
        data_fd = sums_fd = -1
        try:
            with locked(self.directory, timeout_s):
                data_fd = os.open(self.directory / "data", OPEN_FLAGS, 0o600)
                sums_fd = os.open(self.directory / "sums", OPEN_FLAGS, 0o600)
                header = _decode_header(os.pread(sums_fd, HEADER_BYTES, 0))
                at = size - len(boundaries)
                if (
                    os.fstat(sums_fd).st_size != size
                    or os.fstat(data_fd).st_size != self.stream_length
                    or os.pread(sums_fd, len(boundaries), at) != boundaries
                ):
                    # Nobody else may use a stream that is made anew.
                    if not try_lock(data_fd):
                        raise BlockingIOError(errno.EAGAIN, "another process uses it")
                    os.ftruncate(sums_fd, 0)
                    os.ftruncate(sums_fd, size)
                    os.ftruncate(data_fd, self.stream_length)
                    write_all(sums_fd, boundaries, at)
                    header = _Header(False, self._boot)
                    write_all(sums_fd, header.encode(), 0)
                # Held for as long as the stream is open: see `close` and `NodeCache.trim`.
                lock_within(data_fd, timeout_s, is_shared=True)
                mapped = mmap.mmap(sums_fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            for fd in (data_fd, sums_fd):
                if fd >= 0:
                    os.close(fd)
            raise
        is_trusted = header is not None and (header.is_clean or header.boot == self._boot)
        self._is_doubtful = not is_trusted
        self._data_fd, self._sums_fd = data_fd, sums_fd
        table = memoryview(mapped)[HEADER_BYTES : HEADER_BYTES + _NUMBER_BYTES * self.count]
        self._sums = table.cast("Q")
        # Last: a reader that finds the map uses all the others.
        self._map = mapped

    def _warn_full(self, error: OSError) -> None:
        self._again_s = time.monotonic() + self._try_again_s
        self.is_full = True
        # Once for all streams of a cache: a disk that is nearly full takes a write now and then.
        if self.directory.parent not in _warned_of:
            _warned_of.add(self.directory.parent)
            _log.warning(
                "cannot write to %s: %s; image data is not cached until it can be written: free "
                "space or set BOOTSEER_CACHE_DIR to a larger disk",
                self.directory,
                error.strerror,
            )

    def _may_try_again(self) -> bool:
        """Whether to write although the disk refused the last write; opens the files if they could
        not be opened before."""
        if time.monotonic() < self._again_s or not self._reopening.acquire(blocking=False):
            return False
        try:
            self._again_s = time.monotonic() + self._try_again_s
            if self._data_fd < 0 and not self._is_closed:
                # A reader waits for this: locks of others are not waited for.
                self._open_files(0)
            return True
        except OSError as error:
            _log.debug("cannot open the cache in %s yet: %s", self.directory, error)
            return False
        finally:
            self._reopening.release()

    # ---- which pieces are here ------------------------------------------------------------

    def pieces(self, offset: int, length: int) -> tuple[int, int]:
        """Return the half-open range of the pieces that hold bytes of `[offset, offset + length)`.
        What lies behind the end of the stream is left out."""
        if length <= 0 or offset >= self.stream_length:
            return 0, 0
        first = bisect_right(self.starts, offset, 0, self.count) - 1
        return first, bisect_left(self.starts, offset + length, first + 1, self.count)

    def holds(self, first: int, stop: int) -> bool:
        """Return whether the pieces `[first, stop)` are here.

        Reads them only after a crash of the machine. A piece that turns out to be damaged later is
        absent when it is read.
        """
        if self._map is None:
            return first >= stop
        sums = self._sums
        for number in range(first, stop):
            if not sums[number]:
                return False
        return not self._is_doubtful or all(map(self._is_here, range(first, stop)))

    def holds_bytes(self, offset: int, length: int) -> bool:
        """Return whether `[offset, offset + length)` is here. See `holds`."""
        end = offset + length
        if end > self.stream_length or not self.count:
            return False
        # The common case first: a start asks this of each extent of its bundle.
        first = bisect_right(self.starts, offset, 0, self.count) - 1
        if end <= self.starts[first + 1] and not self._is_doubtful and self._map is not None:
            return self._sums[first] != 0
        return self.holds(*self.pieces(offset, length))

    def holds_now(self, first: int, stop: int) -> bool:
        """Return whether the pieces are known to be here, without reading: for a caller that must
        be quick."""
        if self._map is None:
            return first >= stop
        if self._is_doubtful and 0 in self._checked[first:stop] and self.is_doubtful:
            return False
        return 0 not in self._sums[first:stop]

    def missing(self, offset: int, length: int) -> list[int]:
        """Return the absent pieces of `[offset, offset + length)`, ascending. See `holds`."""
        return [n for n in range(*self.pieces(offset, length)) if not self._is_here(n)]

    def present(self) -> Iterator[int]:
        """Return the pieces that are here, ascending. See `holds`."""
        return filter(self._is_here, range(self.count))

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
        """Return the bytes of `[offset, offset + length)`; None unless all are here and match their
        checksums. Raises: OSError."""
        if self._map is None or offset + length > self.stream_length or not self.count:
            return None
        starts, sums, checked = self.starts, self._sums, self._checked
        # As `pieces` has it: each read comes here.
        first = bisect_right(starts, offset, 0, self.count) - 1
        if offset + length <= starts[first + 1]:
            stop = first + 1
            if not sums[first]:
                return None
            is_due = not checked[first]
        else:
            stop = bisect_left(starts, offset + length, first + 1, self.count)
            if 0 in sums[first:stop]:
                return None
            is_due = 0 in checked[first:stop]
        if not is_due:
            data = os.pread(self._data_fd, length, offset)
            if len(data) != length:
                raise OSError(errno.EIO, f"{self.directory}/data is too short")
            return data
        # One read for what is compared and what is wanted.
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
        """Return bytes that must be here. Raises: CorruptError if they are not, or are damaged;
        OSError."""
        data = self.get(offset, length)
        if data is None:
            raise CorruptError(
                f"{self.directory}/data is not as it was written: the disk has damaged it"
            )
        return bytes(data)

    def read_ahead(self, offset: int, length: int) -> None:
        """Ask the kernel to read bytes from the disk into memory, without waiting. Never fails,
        not even after `close`."""
        for start in range(offset, offset + length, _ADVICE_BYTES):
            with contextlib.suppress(OSError):
                count = min(_ADVICE_BYTES, offset + length - start)
                os.posix_fadvise(self._data_fd, start, count, os.POSIX_FADV_WILLNEED)

    def put(self, number: int, content: bytes | memoryview) -> bool:
        """Keep the verified content of a piece. Return False if the disk takes no more.

        Raises: ValueError if `content` has not the length of the piece.
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
        """Before the first write, have the disk know that the stream is not clean."""
        if self._is_writing:
            return
        header = _decode_header(os.pread(self._sums_fd, HEADER_BYTES, 0))
        if header is None or header.is_clean:
            self._write_trust(False, bytes(16) if self._is_doubtful else self._boot)
            os.fdatasync(self._sums_fd)
        self._is_writing = True

    def _write_trust(self, is_clean: bool, boot: bytes) -> None:
        if _decode_header(os.pread(self._sums_fd, HEADER_BYTES, 0)) is None:
            write_all(self._sums_fd, _Header(is_clean, boot).encode(), 0)
        else:
            write_all(self._sums_fd, _TRUST.pack(is_clean, boot), _TRUST_OFFSET)

    def _write_sum(self, number: int, value: int) -> None:
        # A write, not a store to the map: a full disk answers a store with SIGBUS.
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
        """Whether `content`, as the disk gave it, is the piece; else the piece is absent."""
        found = checksum(content)
        # Twice: another process may be writing the checksum.
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
        """Compare all pieces that this process has not compared yet, and end the doubt that a crash
        of the machine has left. Return the number of damaged bytes, which are absent from then on.

        `may_go_on` is asked before each piece. Readers may go on meanwhile.
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
            # Trusted until the next crash: then the machine has another boot id.
            with contextlib.suppress(OSError):
                self._write_trust(False, self._boot)
        return damaged

    @property
    def is_doubtful(self) -> bool:
        """Whether a crash of the machine may have lost pieces that no process has compared yet."""
        if self._is_doubtful and self._map is not None:
            # Another process may have ended it.
            header = _decode_header(self._map[:HEADER_BYTES])
            self._is_doubtful = header is None or header.boot != self._boot
        return self._is_doubtful

    # ---- refuting -------------------------------------------------------------------------

    @property
    def is_refuted(self) -> bool:
        """Whether some process has called `refute`."""
        mapped = self._map
        return mapped is not None and mapped[_REFUTED_OFFSET] == 1

    def refute(self) -> None:
        """Tell all processes, durably, that the content is wrong. Never raises: on a disk that
        takes nothing none is told."""
        try:
            write_all(self._sums_fd, _REFUTED.pack(1), _REFUTED_OFFSET)
            # A crash of the machine must not bring the old state back.
            os.fsync(self._sums_fd)
        except OSError as error:
            _log.warning("other servers of the image are not told that bytes are wrong: %s", error)

    # ---- fetching once --------------------------------------------------------------------

    def announce(self, first: int, stop: int) -> bool:
        """Tell the other processes of the node that this one fetches the pieces `[first, stop)`.
        Return False if another one does. A hint, which ends with `withdraw` or the process."""
        if self._sums_fd < 0:
            return True
        try:
            fcntl.lockf(
                self._sums_fd,
                fcntl.LOCK_EX | fcntl.LOCK_NB,
                _NUMBER_BYTES * (stop - first),
                HEADER_BYTES + _NUMBER_BYTES * first,
            )
        except OSError as error:
            # Where the file system has no such locks, everybody fetches.
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

    def withdraw(self, first: int, stop: int) -> None:
        """End an announcement. Never raises."""
        if self._sums_fd < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.lockf(
                self._sums_fd,
                fcntl.LOCK_UN,
                _NUMBER_BYTES * (stop - first),
                HEADER_BYTES + _NUMBER_BYTES * first,
            )

    # ---- the end --------------------------------------------------------------------------

    def close(self, *, durable: bool = True) -> None:
        """Close the files. The last user on the node flushes the stream to the disk and marks it
        clean, unless `durable` leaves that to `NodeCache.make_durable`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if durable and self._map is not None:
            try:
                self._make_durable()
            except (BlockingIOError, FileNotFoundError):
                pass  # Another process uses it still, and will do this, or has just removed it.
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
        self._alone()
        # The long part. Who opens the stream meanwhile waits for none of it.
        unlock(self._data_fd)
        self._sync()
        if os.fstat(self._data_fd).st_nlink:
            with locked_if_there(self.directory):
                self._alone()
                self._sync()
                self._write_trust(True, header.boot)
                os.fsync(self._sums_fd)

    def _alone(self) -> None:
        """Raises: BlockingIOError when another process uses the stream."""
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
