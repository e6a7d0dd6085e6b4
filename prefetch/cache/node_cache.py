"""The node cache: the uncompressed tar streams of images, each by what proves its bytes.

Alone owns the folder `cache_dir/streams-3` (docs/format/cache.md). One folder per stream, called
by its frames (`stream_keys`), or by its digest where all of it was hashed; several processes share
it. A stream is filled as it is needed (`open_image`), or pulled whole (`new_stream`).

Threading: every method from any thread at once.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from msgspec import Struct

from bootseer.blob.tree import Blob
from bootseer.errors import BootseerError, CorruptError, InvalidInputError, from_oserror
from bootseer.linux.locks import remove_unused_lock, try_lock
from bootseer.linux.private_files import make_private_directory
from bootseer.linux.processes import boot_id
from bootseer.prefetch.cache.claims_mark import ClaimsMark
from bootseer.prefetch.cache.files import (
    HEADER_BYTES,
    SECTOR_BYTES,
    alone,
    decode_header,
    locked_if_there,
    sectors_of,
)
from bootseer.prefetch.cache.image_stream import ImageStream
from bootseer.prefetch.cache.new_stream import NewStream, remove_abandoned
from bootseer.prefetch.cache.presence import count_present
from bootseer.prefetch.cache.stream_cache import TRY_AGAIN_S, StreamCache
from bootseer.prefetch.cache.stream_keys import frames_key, is_stored, store_hex

__all__ = [
    "SECTOR_BYTES",
    "CachedStream",
    "NodeCache",
    "StreamCache",
    "StreamDetails",
    "sectors_of",
]

STREAMS = "streams-3"
"""Called by the version: what older releases kept is not believed, and goes with the trimming."""
_OLDER = "streams"
_KEY = re.compile(r"(?:sha256|blake3|frames|claimed):[0-9a-f]{64}")
_FOLDER = re.compile(r"(?:sha256|blake3|frames|claimed)-[0-9a-f]{64}")
_WHOLE = re.compile(r"(?:sha256|blake3)-[0-9a-f]{64}")
_SAME = ".same"
_LOCKS = frozenset((".pull", ".replay", ".fill"))
_LEFT_S = 3600.0
"""The age at which a file that is written in a moment has lost its writer."""


class CachedStream(Struct, frozen=True):
    """One stream's share of the cache, for `trim` and for people."""

    key: str
    size_bytes: int
    used_ns: int


class StreamDetails(Struct, frozen=True):
    """What a look into one stream's files tells."""

    stream_length: int
    present_bytes: int
    is_used: bool
    """Whether a process of this node uses it now."""


class NodeCache:
    """All cached streams below one folder."""

    def __init__(self, cache_dir: Path, *, try_again_s: float = TRY_AGAIN_S) -> None:
        """A disk that refused a write is tried again no sooner than `try_again_s` later."""
        self._try_again_s = try_again_s
        self._directory = cache_dir / STREAMS
        self._older = cache_dir / _OLDER
        self._boot = bytes.fromhex(boot_id().replace("-", "")) or os.urandom(16)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise InvalidInputError(f"{key!r} is not a digest like sha256:<64 hex digits>")
        return self._directory / key.replace(":", "-")

    def open_stream(self, key: str, stream_length: int) -> StreamCache:
        """What the cache has of a stream, made if it is new. Raises: BootseerError."""
        return self._open(self._path(key), stream_length)

    def _open(self, directory: Path, stream_length: int) -> StreamCache:
        stream = StreamCache(directory, stream_length, self._boot, try_again_s=self._try_again_s)
        # `trim` goes by the folder's time: the last use.
        with contextlib.suppress(OSError):
            os.utime(directory)
        return stream

    # ---- streams of images ----------------------------------------------------------------

    def claims_mark(self, claimant: str) -> ClaimsMark:
        """Return the mark of the image `claimant` (`stream_keys.claimant_of`) as it is now.
        Raises: BootseerError."""
        return ClaimsMark(self._directory, claimant)

    def open_image(
        self, blobs: Sequence[Blob], *, mark: ClaimsMark | None = None, is_local: bool = False
    ) -> list[ImageStream]:
        """The streams of an image. With a `mark` (`claims_mark`), also what was claimed of them for
        the image. `is_local`: this node made the index, of streams that it pulled.

        Raises: CorruptError where a stream is stored nowhere and the index is not this node's:
        the author of the index may not have had the stream; BootseerError.
        """
        opened: list[ImageStream] = []
        try:
            for blob in blobs:
                if is_stored(blob) or is_local:
                    proven = self._open(self._proven_path(blob), blob.stream_length)
                else:
                    raise CorruptError(
                        f"an index names the stream {blob.stream_digest}, which is stored nowhere; "
                        "index the image again"
                    )
                if mark is None or not is_stored(blob):
                    opened.append(ImageStream(proven))
                    continue
                path = self._path(mark.key(blob))
                opener = partial(self._open_claimed, path, blob.stream_length)
                opened.append(ImageStream(proven, opener))
        except BaseException:
            for stream in opened:
                stream.close()
            raise
        return opened

    def _open_claimed(self, path: Path, stream_length: int, make: bool) -> StreamCache | None:
        return self._open(path, stream_length) if make or path.is_dir() else None

    def _proven_path(self, blob: Blob) -> Path:
        """Where the blob's stream lies: by its frames, unless it is known which whole stream they
        make up."""
        if not is_stored(blob):
            return self._path(blob.stream_digest)
        path = self._path(frames_key(blob))
        with contextlib.suppress(OSError):
            whole = os.readlink(path.with_suffix(_SAME))
            if _WHOLE.fullmatch(whole):
                return self._directory / whole
        return path

    def note_same(self, blob: Blob, digest: str) -> None:
        """The blob's frames make up the stream `digest`: from now on they share what is cached.

        The caller MUST have packed that stream, all of which had that digest, into these frames.
        Raises: BootseerError.
        """
        path = self._path(frames_key(blob)).with_suffix(_SAME)
        target = self._path(digest).name
        try:
            make_private_directory(path.parent)
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        except OSError as error:
            raise from_oserror(error, f"note {path}") from error

    def make_durable(self, blobs: Sequence[Blob], claimant: str) -> None:
        """Have what the node has of these streams of an image on the disk, and marked so, unless
        somebody uses them; claims that are all proven by now are removed. Never raises: what is not
        marked is verified after a reboot."""
        for blob in blobs:
            with contextlib.suppress(BootseerError):
                mark = self.claims_mark(claimant)
                claimed = self._path(mark.key(blob))
                if claimed.is_dir() and self._is_all_proven(blob, claimed):
                    self._remove(claimed)
                for path in (self._proven_path(blob), claimed):
                    if (path / "present").exists():
                        self._open(path, blob.stream_length).close()

    def _is_all_proven(self, blob: Blob, claimed: Path) -> bool:
        stream = ImageStream(
            self._open(self._proven_path(blob), blob.stream_length),
            lambda make: self._open(claimed, blob.stream_length),
        )
        try:
            return next(stream.unproven(), None) is None
        finally:
            stream.close(durable=False)

    # ---- whole streams --------------------------------------------------------------------

    def open_whole(self, key: str) -> StreamCache | None:
        """The stream that was pulled whole and is called so, by its digest or by a key of
        `stream_keys`, if all of it is here; None otherwise.

        After a crash of the machine this verifies what has not been verified since.
        Raises: BootseerError.
        """
        return self._open_whole(self._path(key))

    def open_whole_blob(self, blob: Blob) -> StreamCache | None:
        """As `open_whole`, of the blob's stream, proven; one that is stored nowhere for an index
        that this node made. Raises: BootseerError."""
        return self._open_whole(self._proven_path(blob))

    def _open_whole(self, path: Path) -> StreamCache | None:
        try:
            with (path / "present").open("rb") as file:
                header = decode_header(file.read(HEADER_BYTES))
        except OSError:
            return None
        if header is None:
            return None
        stream = self._open(path, header.stream_length)
        if stream.holds(0, stream.stream_length):
            return stream
        stream.close()
        return None

    def new_stream(self) -> NewStream:
        """A place for a stream that arrives whole and in order. Raises: BootseerError."""
        remove_abandoned(self._directory)
        return NewStream(self._directory, self._boot, self._path, self.open_stream, self.make_room)

    def make_room(self, wanted_bytes: int) -> int:
        """Remove what no process uses, the longest unused first, until `wanted_bytes` are freed."""
        held_bytes = sum(stream.size_bytes for stream in self.streams())
        return self.trim(max(0, held_bytes - wanted_bytes))

    def pulling(self, key: str, deadline_s: float) -> AbstractContextManager[None]:
        """Alone on this node in pulling the stream; a process that waited looks (`open_whole`)
        whether it is here before it pulls. A killed holder lets go.

        Entering raises DeadlineError when another process is still at it after `deadline_s`.
        """
        return alone(self._path(key).with_suffix(".pull"), deadline_s, f"pulling {key}")

    def replay_lock(self, bundle: str, store_url: str) -> Path:
        """Of the servers that replay the bundle of this digest out of this store, one holds this
        file locked."""
        return self._path(bundle).with_suffix(f".{store_hex(store_url)}.replay")

    def fill_lock(self, index_digest: str) -> Path:
        """Of the servers that serve the tree of this index, the one that completes it in the
        background holds this file locked."""
        return self._path(index_digest).with_suffix(".fill")

    def streams(self) -> list[CachedStream]:
        """What is cached, the longest unused first."""
        found = []
        for entry in _entries(self._directory):
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

    # ---- looking after all of them --------------------------------------------------------

    def details(self, key: str) -> StreamDetails | None:
        """What is in a stream's files, None where there are none that can be read. Read-only, but
        for a lock in passing."""
        path = self._path(key)
        try:
            with (path / "present").open("rb") as file:
                header = decode_header(file.read(HEADER_BYTES))
                present = count_present(file.fileno(), header.stream_length) if header else 0
            with (path / "data").open("rb") as file:
                is_used = not try_lock(file.fileno())
        except OSError:
            return None
        if header is None:
            return None
        return StreamDetails(header.stream_length, present, is_used)

    def recheck(self, key: str) -> int:
        """Compare what is here of a stream with its checksums; how many bytes were damaged, and are
        fetched again when they are needed. Raises: BootseerError."""
        found = self.details(key)
        if found is None:
            return 0
        # Not a use: `trim` goes by those.
        stream = StreamCache(self._path(key), found.stream_length, self._boot)
        try:
            return stream.recheck()
        finally:
            stream.close()

    def trim(self, limit_bytes: int) -> int:
        """Remove streams that no process uses, the longest unused first, until the rest is within
        `limit_bytes`; what killed processes left goes first. Returns how many bytes were freed."""
        remove_abandoned(self._directory)
        self._remove_older()
        self._remove_left_over()
        streams = self.streams()
        total = sum(stream.size_bytes for stream in streams)
        freed = 0
        for stream in streams:
            if total - freed <= limit_bytes:
                break
            if self._remove(self._path(stream.key)):
                freed += stream.size_bytes
        for note in self._directory.glob(f"*{_SAME}"):
            # It leads to what was removed.
            if not note.exists():
                note.unlink(missing_ok=True)
        return freed

    def _remove_older(self) -> None:
        """Remove what an older release kept and no longer uses: nobody else will."""
        remove_abandoned(self._older)
        for entry in _entries(self._older):
            if _FOLDER.fullmatch(entry.name):
                self._remove(entry)
            elif entry.is_file():
                entry.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._older.rmdir()

    def _remove_left_over(self) -> None:
        """Remove what killed processes left: lock files that nobody holds, and what never became a
        stream."""
        oldest_s = time.time() - _LEFT_S
        for path in _entries(self._directory):
            if path.suffix in _LOCKS:
                remove_unused_lock(path)
            elif path.name.startswith(".new-"):
                with contextlib.suppress(OSError):
                    if path.lstat().st_mtime < oldest_s:
                        path.unlink()
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
