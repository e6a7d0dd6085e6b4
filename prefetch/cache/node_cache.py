"""The node cache: streams of image layers on this node's disk, shared by all servers of the node.

Each stream has a folder below `cache_dir/streams`, named by what proves its bytes: `frames-<hex>`
for a stream that is filled frame by frame, `sha256-<hex>` or `blake3-<hex>` for one that was pulled
whole, and `own-<hex>` for one that a registry sent in place of a lost blob. `bundle-<hex>` holds
the unproven frames of a bundle. Streams of the last two kinds serve one image only.

An index states a digest of each blob's whole stream, but no check compares that digest with the
frames: the author of an index may write anything there, and the cache never believes it. Every
frame is verified, so the offsets and digests of all frames name the stream (docs/format/cache.md,
"Keys").

Thread-safe. Several processes may use one cache at once.
"""

import contextlib
import hashlib
import os
import re
import struct
from array import array
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.base.content_digest import ContentHasher
from bootseer.base.redact import public_url
from bootseer.blob.frames import FrameTable
from bootseer.blob.tree import Blob
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    from_oserror,
)
from bootseer.linux.locks import lock_file, lock_within, remove_unused_lock, try_lock
from bootseer.linux.private_files import make_private_directory
from bootseer.linux.processes import boot_id
from bootseer.linux.removal import remove_tree
from bootseer.prefetch.cache.stream import (
    LOCK_S,
    TRY_AGAIN_S,
    CachedStream,
    locked_if_there,
    present_bytes,
    read_starts,
    whole_starts,
)

if TYPE_CHECKING:
    from bootseer.prefetch.cache.whole_stream import WholeStream

__all__ = ["CachedStream", "NodeCache", "StreamDetails", "StreamUse"]

STREAMS = "streams"
"""Name of the folder of all streams, below `cache_dir`."""
NEW_PREFIX = "new-"
"""Beginning of the names of folders whose streams are not committed yet."""
_KINDS = "sha256|blake3|frames|own|bundle"
_KEY = re.compile(rf"(?:{_KINDS}):[0-9a-f]{{64}}")
_FOLDER = re.compile(rf"(?:{_KINDS})-[0-9a-f]{{64}}")
_ROOM_BYTES = 2**24
"""Bytes that are freed at a time on a full disk."""
_LOCKS = frozenset((".pull", ".replay", ".fill"))
_HEAD = struct.Struct("<16sQQ")
_MAGIC = b"bootseer frames\0"


def is_stored(blob: Blob) -> bool:
    """Return whether a blob has frames that can be fetched, or is empty.

    A blob without frames exists only on the node that pulled it.
    """
    return len(blob.frames) > 0 or blob.stream_length == 0


def frame_starts(blob: Blob) -> "array[int]":
    """Return the offset of each frame in the blob's stream, followed by the stream's length."""
    frames = blob.frames
    if isinstance(frames, FrameTable):
        return frames.stream_offsets
    end = frames[-1].stream_offset + frames[-1].stream_length if frames else 0
    return array("Q", [*(frame.stream_offset for frame in frames), end])


def frames_key(blob: Blob) -> str:
    """Return `frames:<hex>`: BLAKE3 over the stream offsets and digests of all frames."""
    frames = blob.frames
    if isinstance(frames, FrameTable):
        digests = bytes(frames.digests)
    else:
        digests = b"".join(frame.digest for frame in frames)
    hasher = ContentHasher(_HEAD.pack(_MAGIC, blob.stream_length, len(frames)))
    hasher.update(frame_starts(blob)[: len(frames)].tobytes())
    hasher.update(digests)
    return f"frames:{hasher.hexdigest()}"


def replacement_key(blob: Blob, image_key: str) -> str:
    """Return the key of the stream that a registry sent in place of a lost blob of one image."""
    text = f"{image_key} {frames_key(blob)}"
    return f"own:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def store_hex(store_url: str) -> str:
    """Return the name of a store in names of files: 16 hex digits of the SHA-256 of its URL.

    User, password and query of the URL are left out: they are secret, or change.
    """
    return hashlib.sha256(public_url(store_url).encode()).hexdigest()[:16]


def image_key_of(index_digest: str, store_url: str) -> str:
    """Return the key of an image, for cached bytes that serve this image only.

    The store is a part of the key: another store may have the same index, and a bundle written by
    other people.
    """
    return f"{index_digest} {store_hex(store_url)}"


@contextlib.contextmanager
def hold_lock_file(path: Path, timeout_s: float, doing: str) -> Iterator[None]:
    """Hold the lock file `path`, so that no other process of this node is `doing` the same.

    The file is removed with the lock. The lock of a killed process is released.
    Raises: DeadlineError if another process still holds it after `timeout_s`; BootseerError.
    """
    try:
        fd = lock_file(path, timeout_s)
    except TimeoutError as error:
        raise DeadlineError(f"another process was still {doing} after {timeout_s:g} s") from error
    except OSError as error:
        raise from_oserror(error, f"lock {path}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


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
    """Streams of one cache folder: opening, adding and removing them."""

    def __init__(self, cache_dir: Path, *, try_again_s: float = TRY_AGAIN_S) -> None:
        """Make the cache. `try_again_s`: pause before the next write to a disk that refused one."""
        self._try_again_s = try_again_s
        self.directory = cache_dir / STREAMS
        """Folder of all streams."""
        self.boot = bytes.fromhex(boot_id().replace("-", "")) or os.urandom(16)
        """Id of this boot of the machine."""

    def path_of(self, key: str) -> Path:
        """Return the folder of the stream `key`. Raises: InvalidInputError for other strings."""
        if not _KEY.fullmatch(key):
            raise InvalidInputError(f"{key!r} is not a digest like sha256:<64 hex digits>")
        return self.directory / key.replace(":", "-")

    def open_pieces(
        self, key: str, starts: Sequence[int], *, takes_frames: bool = True
    ) -> CachedStream:
        """Open or create the stream `key`. See `CachedStream`. Raises: BootseerError."""
        directory = self.path_of(key)
        stream = CachedStream(
            directory,
            starts,
            self.boot,
            takes_frames=takes_frames,
            try_again_s=self._try_again_s,
        )
        # `trim` takes the folder's time as that of the last use.
        with contextlib.suppress(OSError):
            os.utime(directory)
        return stream

    def has(self, key: str) -> bool:
        """Return whether the cache has a stream `key`, maybe in part."""
        return (self.path_of(key) / "data").exists()

    # ---- streams of images ----------------------------------------------------------------

    def open_blob(
        self, blob: Blob, *, vouched: Container[str] = (), image_key: str | None = None
    ) -> CachedStream:
        """Open the stream of a blob of an image.

        That is the first of these streams that the cache has whole. If it has neither of them, the
        stream of the blob's frames is opened, and created if it is new.

        1. the stream that this node pulled under the blob's stream digest, if it is in `vouched`;
        2. the stream that a registry sent for the image `image_key` (see `image_key_of`).

        Raises: CorruptError if the blob has no frames and is not vouched for, since the author of
        the index may never have had the stream; BootseerError.
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
        if stream is None and image_key is not None:
            stream = self.open_replacement(blob, image_key)
        return stream or self.open_frames(blob)

    def open_frames(self, blob: Blob) -> CachedStream:
        """Open the stream that is filled with the blob's frames. Raises: BootseerError."""
        return self.open_pieces(frames_key(blob), frame_starts(blob))

    def open_replacement(self, blob: Blob, image_key: str) -> CachedStream | None:
        """Open the stream that a registry sent in place of the blob, for one image.

        Return None unless all of it is present. Raises: BootseerError.
        """
        return self.open_whole(replacement_key(blob, image_key))

    def open_whole(self, key: str) -> CachedStream | None:
        """Open the stream that was pulled whole under `key`.

        Return None unless all of it is present. After a crash of the machine all pieces are
        compared first. Raises: BootseerError.
        """
        starts = read_starts(self.path_of(key))
        if starts is None:
            return None
        stream = self.open_pieces(key, starts, takes_frames=False)
        if stream.holds(0, stream.count):
            return stream
        stream.close()
        return None

    def make_durable(self, blobs: Sequence[Blob], *, vouched: Container[str] = ()) -> None:
        """Flush an image's streams to the disk and mark them clean, unless a process uses them.

        Never raises: a stream that is not marked is compared after a reboot.
        """
        for blob in blobs:
            keys = [frames_key(blob)] if is_stored(blob) else []
            if blob.stream_digest in vouched:
                keys.append(blob.stream_digest)
            for key in keys:
                with contextlib.suppress(BootseerError):
                    starts = read_starts(self.path_of(key))
                    if starts is not None:
                        self.open_pieces(key, starts).close()

    # ---- whole streams --------------------------------------------------------------------

    def new_stream(self) -> "WholeStream":
        """Start a stream that becomes visible with `commit`. Raises: BootseerError."""
        # Imported here, since most processes pull nothing.
        from bootseer.prefetch.cache.whole_stream import WholeStream

        self._remove_abandoned()
        return WholeStream(self)

    @contextlib.contextmanager
    def new_folders_locked(self) -> Iterator[None]:
        """Hold the lock for creating folders of new streams and for removing abandoned ones."""
        make_private_directory(self.directory)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            lock_within(fd, LOCK_S)
            yield
        finally:
            os.close(fd)

    def _remove_abandoned(self) -> None:
        """Remove the folders of new streams that killed processes left."""
        if not self.directory.is_dir():
            return
        with contextlib.suppress(OSError), self.new_folders_locked():
            for directory in self.directory.glob(f"{NEW_PREFIX}*"):
                with contextlib.suppress(OSError):
                    os.close(lock_file(directory / "lock", 0))
                    remove_tree(directory)

    def make_room(self) -> int:
        """Remove the longest unused streams, `_ROOM_BYTES` in all. Return the bytes freed."""
        held_bytes = sum(stream.size_bytes for stream in self.streams())
        return self.trim(max(0, held_bytes - _ROOM_BYTES))

    def pulling(self, key: str, deadline_s: float) -> AbstractContextManager[None]:
        """Hold the node's lock for pulling the stream `key`.

        A process that had to wait must check whether the stream has come meanwhile (`open_whole`).
        Entering raises DeadlineError if another process still holds the lock after `deadline_s`.
        """
        return hold_lock_file(self.path_of(key).with_suffix(".pull"), deadline_s, f"pulling {key}")

    def replay_lock(self, bundle: str, store_url: str) -> Path:
        """Return the path of the lock that a server holds while it fetches a bundle of a store.

        The other servers of the node follow the holder.
        """
        return self.path_of(bundle).with_suffix(f".{store_hex(store_url)}.replay")

    def fill_lock(self, index_digest: str) -> Path:
        """Return the path of the lock that a server holds while it fills the tree of an index."""
        return self.path_of(index_digest).with_suffix(".fill")

    # ---- all streams ----------------------------------------------------------------------

    def streams(self) -> list[StreamUse]:
        """List the cached streams, the longest unused first."""
        found = []
        for entry in _entries(self.directory):
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
        """Return the details of a stream; None if its files cannot be read. Writes nothing."""
        path = self.path_of(key)
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
        """Compare a stream with its checksums. Return the number of damaged bytes.

        Damaged bytes become absent, and are fetched when they are read. Raises: BootseerError.
        """
        path = self.path_of(key)
        starts = read_starts(path)
        if starts is None:
            return 0
        # Unlike `open_pieces`, this is no use, for which `trim` would keep the stream.
        stream = CachedStream(path, starts, self.boot)
        try:
            return stream.check_all()
        finally:
            stream.close()

    def trim(self, limit_bytes: int) -> int:
        """Remove the longest unused streams until all streams take at most `limit_bytes`.

        Also removes lock files, empty folders and unfinished streams of killed processes. Return
        the bytes freed.
        """
        self._remove_abandoned()
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
        return self._remove(self.path_of(key))

    def _remove_left_over(self) -> None:
        """Remove the lock files and empty folders that killed processes left."""
        for path in _entries(self.directory):
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
                # A process that opens the stream waits for this lock before it reads the folder.
                remove_tree(directory)
        except OSError:
            return False
        return True


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []
