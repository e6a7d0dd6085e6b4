"""The node cache: each blob's uncompressed tar stream, filled as it is needed.

Alone owns the folder `cache_dir/streams/` (see docs/format/cache.md). One folder per digest of a
stream, however it is stored elsewhere, holds `data`, a sparse file with the stream at its own
offsets, and `present`, a mapped file with one byte per 512-byte sector that says whether the
sector is there. Content must be verified before it comes in.

Several processes share a stream's files: `present` is mapped MAP_SHARED, and a sector's data is
written before its byte is set, so whoever sees the byte may read the data. The page cache outlives
a killed process, so kill -9 loses nothing; what a crash of the *machine* may have torn is thrown
away at the next open (other boot id and not marked clean).

Threading: every method from any thread at once, but `close`, which comes last.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bootseer.errors import InvalidInputError, from_oserror
from bootseer.private import make_private_directory

_log = logging.getLogger(__name__)

SECTOR_BYTES = 512
"""Tar's own unit: every file in a tar stream begins on a multiple of it."""

# magic, version, clean flag, boot id, stream length. Padded to 64 bytes.
_HEADER = struct.Struct("<8sII16sQ")
_HEADER_BYTES = 64
_CLEAN_OFFSET = 12
_MAGIC = b"BSPRESNT"
_VERSION = 1
_LOCK_S = 60.0
"""An fsync of gigabytes takes that long on a slow disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def sectors_of(offset: int, length: int) -> tuple[int, int]:
    """The half-open range of sectors that `[offset, offset + length)` touches."""
    return offset // SECTOR_BYTES, -(-(offset + length) // SECTOR_BYTES)


def boot_id() -> bytes:
    """16 bytes that change with every boot of this kernel."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


def _lock_within(fd: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(errno.ETIMEDOUT, "somebody keeps it locked") from None
            time.sleep(0.005)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Alone in opening, closing or removing the stream in `directory`, which is made if needed."""
    while True:
        # Each by itself: with `parents=True` only the last one would be private.
        for path in (directory.parent.parent, directory.parent, directory):
            make_private_directory(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(directory / "lock", flags, 0o600)
        try:
            # Held for as long as a header is looked at or one fsync takes, never for a transfer.
            _lock_within(fd, _LOCK_S)
            if os.fstat(fd).st_nlink:
                yield
                return
            # `trim` removed the folder while we waited: make it again.
        finally:
            os.close(fd)


class StreamCache:
    """What this node has of one stream. Made by `NodeCache.open_stream`."""

    def __init__(self, directory: Path, stream_length: int, boot: bytes) -> None:
        """Raises: BootseerError when the folder cannot be made or opened."""
        self.directory = directory
        self.stream_length = stream_length
        self.is_full = False
        """The disk refused a write: what comes in is no longer kept."""
        self._sector_count = -(-stream_length // SECTOR_BYTES)
        self._map_bytes = _HEADER_BYTES + self._sector_count
        self._data_fd = -1
        try:
            with _locked(directory):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._data_fd = os.open(directory / "data", flags, 0o600)
                self._map = self._open_map(flags, boot)
                # Held for as long as we use the blob; see `close` and `NodeCache.trim`.
                fcntl.flock(self._data_fd, fcntl.LOCK_SH)
        except OSError as error:
            if self._data_fd >= 0:
                os.close(self._data_fd)
            raise from_oserror(error, f"open the cache in {directory}") from error

    def _open_map(self, flags: int, boot: bytes) -> mmap.mmap:
        fd = os.open(self.directory / "present", flags, 0o600)
        try:
            header = os.pread(fd, _HEADER.size, 0)
            if not self._is_trusted(fd, header, boot):
                # Nobody else may use what is thrown away: BlockingIOError.
                fcntl.flock(self._data_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                os.ftruncate(self._data_fd, 0)
            os.ftruncate(self._data_fd, self.stream_length)
            try:
                # Writing to a hole of a mapped file on a full disk is SIGBUS: take the room now.
                os.posix_fallocate(fd, 0, self._map_bytes)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._warn_full(error)
                return mmap.mmap(-1, self._map_bytes)
            present = mmap.mmap(fd, self._map_bytes, mmap.MAP_SHARED)
            present[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, 0, boot, self.stream_length)
            # "Not clean" must be on disk before the first sector is marked.
            present.flush()
            return present
        finally:
            os.close(fd)

    def _is_trusted(self, fd: int, header: bytes, boot: bytes) -> bool:
        if len(header) < _HEADER.size:
            return False
        magic, version, clean, header_boot, length = _HEADER.unpack(header)
        return (
            magic == _MAGIC
            and version == _VERSION
            and length == self.stream_length
            and os.fstat(fd).st_size == self._map_bytes
            and os.fstat(self._data_fd).st_size == self.stream_length
            and (header_boot == boot or clean == 1)
        )

    def _warn_full(self, error: OSError) -> None:
        if not self.is_full:
            self.is_full = True
            _log.warning(
                "cannot write to %s: %s; image data is no longer cached: free space or set "
                "BOOTSEER_CACHE_DIR to a larger disk",
                self.directory,
                error.strerror,
            )

    def has(self, offset: int, length: int) -> bool:
        """Whether all of `[offset, offset + length)` is here."""
        first, end = sectors_of(offset, length)
        return self._map.find(b"\0", _HEADER_BYTES + first, _HEADER_BYTES + end) < 0

    def missing(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """The absent parts of `[offset, offset + length)` as (offset, length), sector-aligned
        but for the end of the stream, ascending."""
        first, end = sectors_of(offset, length)
        present = self._map
        position, stop = _HEADER_BYTES + first, _HEADER_BYTES + end
        while (gap := present.find(b"\0", position, stop)) >= 0:
            position = present.find(b"\1", gap, stop)
            if position < 0:
                position = stop
            start = (gap - _HEADER_BYTES) * SECTOR_BYTES
            stream_end = min((position - _HEADER_BYTES) * SECTOR_BYTES, self.stream_length)
            yield start, stream_end - start

    def read(self, offset: int, length: int) -> bytes:
        """The bytes, which `has` must have said are here. Raises: OSError."""
        data = os.pread(self._data_fd, length, offset)
        if len(data) != length:
            raise OSError(errno.EIO, f"{self.directory}/data is shorter than its map says")
        return data

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Keep verified bytes of the stream; False when the disk takes no more.

        Sectors that `data` covers only in part are not marked, unless the stream ends there.

        Raises: ValueError for bytes outside the stream.
        """
        length = len(data)
        end_offset = offset + length
        if offset < 0 or end_offset > self.stream_length:
            raise ValueError(f"[{offset}, {end_offset}) is outside a stream's {self.stream_length}")
        if self.is_full:
            return False
        first = -(-offset // SECTOR_BYTES)
        at_end = end_offset == self.stream_length
        end = self._sector_count if at_end else end_offset // SECTOR_BYTES
        if first >= end:
            return True
        view = memoryview(data)
        position = 0
        try:
            while position < length:
                position += os.pwrite(self._data_fd, view[position:], offset + position)
        except OSError as error:
            self._warn_full(error)
            return False
        self._map[_HEADER_BYTES + first : _HEADER_BYTES + end] = b"\1" * (end - first)
        return True

    def present_bytes(self) -> int:
        """How much of the stream is here."""
        return min(self._map[_HEADER_BYTES:].count(1) * SECTOR_BYTES, self.stream_length)

    def close(self) -> None:
        """Let go. The last user on the node makes everything durable and marks it clean."""
        if self._data_fd < 0:
            return
        try:
            with _locked(self.directory):
                fcntl.flock(self._data_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fsync(self._data_fd)
                self._map.flush()
                self._map[_CLEAN_OFFSET : _CLEAN_OFFSET + 4] = struct.pack("<I", 1)
                self._map.flush()
        except BlockingIOError:
            pass  # Somebody else uses it still, and will do this.
        except OSError as error:
            _log.warning("cannot make the cache in %s durable: %s", self.directory, error)
        self._map.close()
        os.close(self._data_fd)
        self._data_fd = -1


@dataclass(frozen=True, slots=True)
class CachedStream:
    """One stream's share of the cache, for `trim` and for people."""

    digest: str
    size_bytes: int
    used_ns: int


class NodeCache:
    """All cached streams below one folder."""

    def __init__(self, cache_dir: Path) -> None:
        self._directory = cache_dir / "streams"
        self._boot = boot_id()

    def _path(self, digest: str) -> Path:
        algorithm, _, name = digest.partition(":")
        if algorithm != "sha256" or len(name) != 64 or set(name) - set("0123456789abcdef"):
            raise InvalidInputError(f"{digest!r} is not a digest like sha256:<64 hex digits>")
        return self._directory / name

    def open_stream(self, digest: str, stream_length: int) -> StreamCache:
        """What the cache has of a stream, made if it is new. Raises: BootseerError."""
        directory = self._path(digest)
        stream = StreamCache(directory, stream_length, self._boot)
        # `trim` goes by the folder's time: the last use.
        os.utime(directory)
        return stream

    def streams(self) -> list[CachedStream]:
        """What is cached, the longest unused first."""
        found = []
        try:
            entries = list(self._directory.iterdir())
        except FileNotFoundError:
            return []
        for entry in entries:
            try:
                used_ns = entry.stat().st_mtime_ns
                size = sum(512 * (entry / name).stat().st_blocks for name in ("data", "present"))
            except (FileNotFoundError, NotADirectoryError):
                continue
            found.append(CachedStream(f"sha256:{entry.name}", size, used_ns))
        return sorted(found, key=lambda stream: stream.used_ns)

    def trim(self, limit_bytes: int) -> int:
        """Remove streams that nobody uses, the longest unused first, until the rest is within
        `limit_bytes`. Returns how many bytes were freed."""
        streams = self.streams()
        total = sum(stream.size_bytes for stream in streams)
        freed = 0
        for stream in streams:
            if total - freed <= limit_bytes:
                break
            if self._remove(self._path(stream.digest)):
                freed += stream.size_bytes
        return freed

    def _remove(self, directory: Path) -> bool:
        try:
            with _locked(directory):
                fd = os.open(directory / "data", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory)
                finally:
                    os.close(fd)
        except OSError:
            return False
        return True
