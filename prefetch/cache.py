"""The node cache: the uncompressed tar streams of images, each by its digest.

Alone owns the folder `cache_dir/streams/` (see docs/format/cache.md). One folder per digest of a
stream, however it is stored elsewhere; several processes share it. A stream is filled piece by
piece as it is needed (`open_stream`), or pulled whole (`new_stream`).

Threading: every method from any thread at once.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec import Struct

from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.prefetch.cache_files import (
    HEADER_BYTES,
    SECTOR_BYTES,
    alone,
    boot_id,
    decode_header,
    locked,
    sectors_of,
)
from bootseer.prefetch.new_stream import NewStream, remove_abandoned
from bootseer.prefetch.presence import count_present
from bootseer.prefetch.stream_cache import StreamCache

__all__ = [
    "SECTOR_BYTES",
    "CachedStream",
    "NodeCache",
    "StreamCache",
    "StreamDetails",
    "sectors_of",
]

_DIGEST = re.compile(r"(?:sha256|blake3):[0-9a-f]{64}")
_FOLDER = re.compile(r"(?:sha256|blake3)-[0-9a-f]{64}")


class CachedStream(Struct, frozen=True):
    """One stream's share of the cache, for `trim` and for people."""

    digest: str
    size_bytes: int
    used_ns: int


class StreamDetails(Struct, frozen=True):
    """What a look into one stream's files tells."""

    stream_length: int
    present_bytes: int
    is_used: bool
    """By a process of this node, now."""


class NodeCache:
    """All cached streams below one folder."""

    def __init__(self, cache_dir: Path) -> None:
        self._directory = cache_dir / "streams"
        self._boot = boot_id()

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise InvalidInputError(f"{digest!r} is not a digest like sha256:<64 hex digits>")
        return self._directory / digest.replace(":", "-")

    def open_stream(self, digest: str, stream_length: int) -> StreamCache:
        """What the cache has of a stream, made if it is new. Raises: BootseerError."""
        directory = self._path(digest)
        stream = StreamCache(directory, stream_length, self._boot)
        # `trim` goes by the folder's time: the last use.
        with contextlib.suppress(OSError):
            os.utime(directory)
        return stream

    def make_durable(self, blobs: Sequence[Blob]) -> None:
        """Have what the node has of these streams on the disk, and marked so, unless somebody uses
        them. Never raises: what is not marked is verified after a reboot."""
        for blob in blobs:
            with contextlib.suppress(BootseerError):
                if (self._path(blob.stream_digest) / "present").exists():
                    self.open_stream(blob.stream_digest, blob.stream_length).close()

    def open_whole(self, digest: str) -> StreamCache | None:
        """The stream, if all of it is here; None otherwise.

        After a crash of the machine this verifies what has not been verified since.
        Raises: BootseerError.
        """
        try:
            with (self._path(digest) / "present").open("rb") as file:
                header = decode_header(file.read(HEADER_BYTES))
        except OSError:
            return None
        if header is None:
            return None
        stream = self.open_stream(digest, header.stream_length)
        if stream.has(0, stream.stream_length):
            return stream
        stream.close()
        return None

    def new_stream(self) -> NewStream:
        """A place for a stream that arrives whole and in order. Raises: BootseerError."""
        remove_abandoned(self._directory)
        return NewStream(self._directory, self._boot, self._path, self.open_stream, self.make_room)

    def make_room(self, wanted_bytes: int) -> int:
        """Remove what nobody uses, the longest unused first, until `wanted_bytes` are freed."""
        held_bytes = sum(stream.size_bytes for stream in self.streams())
        return self.trim(max(0, held_bytes - wanted_bytes))

    def pulling(self, digest: str, deadline_s: float) -> AbstractContextManager[None]:
        """Alone on this node in pulling the stream; whoever waited looks (`open_whole`) whether it
        is here before it pulls. A killed holder lets go.

        Entering raises DeadlineError when another process is still at it after `deadline_s`.
        """
        return alone(self._path(digest).with_suffix(".pull"), deadline_s, f"pulling {digest}")

    def replay_lock(self, bundle: str) -> Path:
        """Of the servers that replay the bundle of this digest, one holds this file locked."""
        return self._path(bundle).with_suffix(".replay")

    def fill_lock(self, index_digest: str) -> Path:
        """Of the servers that serve the tree of this index, the one that completes it in the
        background holds this file locked."""
        return self._path(index_digest).with_suffix(".fill")

    def streams(self) -> list[CachedStream]:
        """What is cached, the longest unused first."""
        found = []
        try:
            entries = list(self._directory.iterdir())
        except OSError:
            return []
        for entry in entries:
            if not _FOLDER.fullmatch(entry.name):
                continue
            try:
                used_ns = entry.stat().st_mtime_ns
                names = ("data", "present", "sums")
                size = sum(512 * (entry / name).stat().st_blocks for name in names)
            except (FileNotFoundError, NotADirectoryError):
                continue
            found.append(CachedStream(entry.name.replace("-", ":"), size, used_ns))
        return sorted(found, key=lambda stream: stream.used_ns)

    def details(self, digest: str) -> StreamDetails | None:
        """What is in a stream's files, None where there are none that can be read. Read-only, but
        for a lock in passing."""
        path = self._path(digest)
        try:
            with (path / "present").open("rb") as file:
                header = decode_header(file.read(HEADER_BYTES))
                present = count_present(file.fileno(), header.stream_length) if header else 0
            with (path / "data").open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_used = False
                except BlockingIOError:
                    is_used = True
        except OSError:
            return None
        if header is None:
            return None
        return StreamDetails(header.stream_length, present, is_used)

    def recheck(self, digest: str) -> int:
        """Compare what is here of a stream with its checksums; how many bytes were damaged, and are
        fetched again when they are needed. Raises: BootseerError."""
        found = self.details(digest)
        if found is None:
            return 0
        # Not a use: `trim` goes by those.
        stream = StreamCache(self._path(digest), found.stream_length, self._boot)
        try:
            return stream.recheck()
        finally:
            stream.close()

    def trim(self, limit_bytes: int) -> int:
        """Remove streams that nobody uses, the longest unused first, until the rest is within
        `limit_bytes`; what killed processes left goes first. Returns how many bytes were freed."""
        remove_abandoned(self._directory)
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
            with locked(directory):
                fd = os.open(directory / "data", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory)
                finally:
                    os.close(fd)
        except OSError:
            return False
        return True
