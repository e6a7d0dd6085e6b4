"""The node cache: tar streams of image layers on this node's disk, for all servers of the node.

Each stream has a folder below `cache_dir/streams`, named by what proves its bytes: `frames-<hex>`
for a stream that is filled frame by frame, `sha256-<hex>` or `blake3-<hex>` for one that was pulled
whole, `own-<hex>` for one that a registry sent in place of a lost blob and that serves a single
image. `bundle-<hex>` holds the frames of a bundle, which nothing proves, for a single image, too.
docs/format/cache.md describes the files and why an index's own word for a stream is no name here.

Thread-safe. Several processes may use one cache at once.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec import Struct

from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError, CorruptError, InvalidInputError
from bootseer.linux.locks import remove_unused_lock, try_lock
from bootseer.linux.processes import boot_id
from bootseer.prefetch.cache.files import alone, locked_if_there
from bootseer.prefetch.cache.stream import (
    TRY_AGAIN_S,
    CachedStream,
    present_bytes,
    read_starts,
    whole_starts,
)
from bootseer.prefetch.cache.stream_keys import (
    frame_starts,
    frames_key,
    is_stored,
    own_key,
    store_hex,
)
from bootseer.prefetch.cache.whole_stream import WholeStream, remove_abandoned

__all__ = ["CachedStream", "NodeCache", "StreamDetails", "StreamUse"]

STREAMS = "streams"
"""Name of the folder of all streams, below `cache_dir`."""
_KINDS = "sha256|blake3|frames|own|bundle"
_KEY = re.compile(rf"(?:{_KINDS}):[0-9a-f]{{64}}")
_FOLDER = re.compile(rf"(?:{_KINDS})-[0-9a-f]{{64}}")
_LOCKS = frozenset((".pull", ".replay", ".fill"))


class StreamUse(Struct, frozen=True):
    """Size and last use of one cached stream."""

    key: str
    size_bytes: int
    used_ns: int


class StreamDetails(Struct, frozen=True):
    """Contents of one stream's files."""

    stream_length: int
    present_bytes: int
    is_used: bool
    """Whether a process of this node uses the stream now."""


class NodeCache:
    """Open, add and remove the cached streams of one cache folder."""

    def __init__(self, cache_dir: Path, *, try_again_s: float = TRY_AGAIN_S) -> None:
        """A disk that refused a write is tried again no sooner than `try_again_s` later."""
        self._try_again_s = try_again_s
        self._directory = cache_dir / STREAMS
        self._boot = bytes.fromhex(boot_id().replace("-", "")) or os.urandom(16)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise InvalidInputError(f"{key!r} is not a digest like sha256:<64 hex digits>")
        return self._directory / key.replace(":", "-")

    def open_pieces(
        self, key: str, starts: Sequence[int], *, takes_frames: bool = True
    ) -> CachedStream:
        """Open the stream `key`, which is made if it is new. See `CachedStream` for the arguments.

        Raises: BootseerError.
        """
        directory = self._path(key)
        stream = CachedStream(
            directory,
            starts,
            self._boot,
            takes_frames=takes_frames,
            try_again_s=self._try_again_s,
        )
        # `trim` goes by the folder's time: the last use.
        with contextlib.suppress(OSError):
            os.utime(directory)
        return stream

    def has(self, key: str) -> bool:
        """Return whether the cache has any of the stream `key`."""
        return (self._path(key) / "data").exists()

    # ---- streams of images ----------------------------------------------------------------

    def open_blob(
        self, blob: Blob, *, vouched: Container[str] = (), owner: str | None = None
    ) -> CachedStream:
        """Open the stream of a blob of an image.

        A blob whose stream digest is in `vouched` is read from the stream that this node pulled
        under that digest, where all of it is here. `owner` (`stream_keys.owner_of`) names the
        image, for streams that a registry sent for it. Else the stream is the one of the blob's
        frames, and made if it is new.

        Raises: CorruptError if the blob has no frames and is not vouched for: the author of the
        index may not have had the stream; BootseerError.
        """
        is_vouched = blob.stream_digest in vouched
        if not is_stored(blob):
            if not is_vouched:
                raise CorruptError(
                    f"an index names the stream {blob.stream_digest}, which is stored nowhere; "
                    "index the image again"
                )
            starts = whole_starts(blob.stream_length)
            return self.open_pieces(blob.stream_digest, starts, takes_frames=False)
        stream = self.open_whole(blob.stream_digest) if is_vouched and blob.frames else None
        if stream is not None and stream.stream_length != blob.stream_length:
            stream.close()
            stream = None
        return stream or (owner and self.open_own(blob, owner)) or self.open_frames(blob)

    def open_frames(self, blob: Blob) -> CachedStream:
        """Open the stream that is filled with the blob's frames. Raises: BootseerError."""
        return self.open_pieces(frames_key(blob), frame_starts(blob))

    def open_own(self, blob: Blob, owner: str) -> CachedStream | None:
        """Open the stream that a registry sent for the image `owner` in place of the blob. Return
        None unless all of it is here. Raises: BootseerError."""
        return self.open_whole(own_key(blob, owner))

    def open_whole(self, key: str) -> CachedStream | None:
        """Open the stream that was pulled whole under `key`. Return None unless all of it is here.

        After a crash of the machine this compares the pieces that were not compared since.
        Raises: BootseerError.
        """
        starts = read_starts(self._path(key))
        if starts is None:
            return None
        stream = self.open_pieces(key, starts, takes_frames=False)
        if stream.holds(0, stream.count):
            return stream
        stream.close()
        return None

    def open_whole_blob(self, blob: Blob, *, vouched: Container[str] = ()) -> CachedStream | None:
        """Open the stream of a blob as `open_blob` does. Return None unless all of it is here.
        Raises: CorruptError, BootseerError."""
        stream = self.open_blob(blob, vouched=vouched)
        if stream.holds(0, stream.count):
            return stream
        stream.close()
        return None

    def make_durable(self, blobs: Sequence[Blob], *, vouched: Container[str] = ()) -> None:
        """Flush an image's streams to the disk and mark them clean, unless a process uses them.
        Never raises: a stream that is not marked is compared after a reboot."""
        for blob in blobs:
            keys = [frames_key(blob)] if is_stored(blob) else []
            if blob.stream_digest in vouched:
                keys.append(blob.stream_digest)
            for key in keys:
                with contextlib.suppress(BootseerError):
                    starts = read_starts(self._path(key))
                    if starts is not None:
                        self.open_pieces(key, starts).close()

    # ---- whole streams --------------------------------------------------------------------

    def new_stream(self) -> WholeStream:
        """Start a stream that arrives whole and in order. Other processes see it after `commit`.
        Raises: BootseerError."""
        remove_abandoned(self._directory)
        return WholeStream(
            self._directory, self._boot, self._path, self._open_length, self.make_room
        )

    def _open_length(self, key: str, length: int) -> CachedStream:
        return self.open_pieces(key, whole_starts(length), takes_frames=False)

    def make_room(self, wanted_bytes: int) -> int:
        """Remove unused streams, the longest unused first, until `wanted_bytes` are freed. Return
        the bytes freed."""
        held_bytes = sum(stream.size_bytes for stream in self.streams())
        return self.trim(max(0, held_bytes - wanted_bytes))

    def pulling(self, key: str, deadline_s: float) -> AbstractContextManager[None]:
        """Hold the node's lock for pulling the stream `key`. A process that waited must look
        (`open_whole`) whether the stream is here by now. A killed holder lets go.

        Entering raises DeadlineError if another process still holds the lock after `deadline_s`.
        """
        return alone(self._path(key).with_suffix(".pull"), deadline_s, f"pulling {key}")

    def replay_lock(self, bundle: str, store_url: str) -> Path:
        """Return the lock file of the one server that fetches the bundle of this digest out of this
        store for the others."""
        return self._path(bundle).with_suffix(f".{store_hex(store_url)}.replay")

    def fill_lock(self, index_digest: str) -> Path:
        """Return the lock file of the one server that completes the tree of this index in the
        background."""
        return self._path(index_digest).with_suffix(".fill")

    # ---- looking after all of them --------------------------------------------------------

    def streams(self) -> list[StreamUse]:
        """List the cached streams with their size on disk and time of last use, the longest unused
        first."""
        found = []
        for entry in _entries(self._directory):
            if not _FOLDER.fullmatch(entry.name):
                continue
            try:
                used_ns = entry.stat().st_mtime_ns
                size = sum(512 * (entry / name).stat().st_blocks for name in ("data", "sums"))
            except (FileNotFoundError, NotADirectoryError):
                continue
            found.append(StreamUse(entry.name.replace("-", ":"), size, used_ns))
        return sorted(found, key=lambda stream: stream.used_ns)

    def details(self, key: str) -> StreamDetails | None:
        """Return a stream's length, the bytes that are here and whether a process uses it; None if
        it has no files that can be read. Read-only, but for a lock in passing."""
        path = self._path(key)
        starts = read_starts(path)
        if starts is None:
            return None
        try:
            present = present_bytes(path, starts)
            with (path / "data").open("rb") as file:
                is_used = not try_lock(file.fileno())
        except OSError:
            return None
        return StreamDetails(starts[-1], present, is_used)

    def recheck(self, key: str) -> int:
        """Compare a stream with its checksums. Return the number of damaged bytes; they are fetched
        when they are read. Raises: BootseerError."""
        path = self._path(key)
        starts = read_starts(path)
        if starts is None:
            return 0
        # Not a use: `trim` goes by those.
        stream = CachedStream(path, starts, self._boot)
        try:
            return stream.check_all()
        finally:
            stream.close()

    def trim(self, limit_bytes: int) -> int:
        """Remove unused streams, the longest unused first, until all streams take at most
        `limit_bytes`.

        Also removes lock files, empty folders and unfinished streams of killed processes. Return
        the bytes freed.
        """
        remove_abandoned(self._directory)
        self._remove_left_over()
        streams = self.streams()
        total = sum(stream.size_bytes for stream in streams)
        freed = 0
        for stream in streams:
            if total - freed <= limit_bytes:
                break
            if self.remove(stream.key):
                freed += stream.size_bytes
        return freed

    def remove(self, key: str) -> bool:
        """Remove a stream, unless a process uses it. Return whether it was removed."""
        return self._remove(self._path(key))

    def _remove_left_over(self) -> None:
        """Remove lock files that nobody holds and folders without a stream: killed processes left
        them."""
        for path in _entries(self._directory):
            if path.suffix in _LOCKS:
                remove_unused_lock(path)
            elif _FOLDER.fullmatch(path.name) and not (path / "data").exists():
                self._remove(path)

    def _remove(self, directory: Path) -> bool:
        try:
            with locked_if_there(directory):
                with contextlib.suppress(FileNotFoundError):
                    fd = os.open(directory / "data", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        if not try_lock(fd):
                            return False
                    finally:
                        os.close(fd)
                # Who opens the stream waits for our lock before it looks for what is in the folder.
                shutil.rmtree(directory)
        except OSError:
            return False
        return True


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []
