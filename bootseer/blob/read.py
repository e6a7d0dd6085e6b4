"""Reads of a tree's files at any offset from their blobs, and verification of a whole tree.

The caller's `read` function brings stored bytes, from a local file, the store or a cache. Bytes are
returned only after the digest of their frame was verified. Thread-safe.
"""

import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeAlias

from bootseer.base.content_digest import ContentHasher, new_hasher
from bootseer.base.display import quoted
from bootseer.blob.frames import decode_frame, frames_for
from bootseer.blob.tree import ZEROS_HASHED_MAX, Inode, Tree
from bootseer.errors import CorruptError

ReadBlob: TypeAlias = Callable[[int, int, int], bytes]
"""Function `read(blob, offset, length)` that returns exactly these stored bytes of blob number
`blob` of the tree. For a blob without frames, which is stored nowhere, they are of its stream."""

_ZEROS = bytes(1024 * 1024)
_VERIFY_READ_BYTES = 4 * 1024 * 1024


class BlobReader:
    """Reader of the files of `tree` at any offset, with an LRU cache of decoded frames."""

    def __init__(self, tree: Tree, read: ReadBlob, cache_bytes: int = 16 * 1024 * 1024) -> None:
        self._tree = tree
        self._read = read
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def read(self, inode: int, offset: int, length: int) -> bytes:
        """Return the bytes `[offset, offset + length)` of a regular file, fewer only at its end.

        Raises: CorruptError for damaged bytes; any exception of the blob read function.
        """
        return self.read_extents(self._tree.inode(inode), offset, length)

    def read_extents(self, inode: Inode, offset: int, length: int) -> bytes:
        """Return bytes of a file as `read` does, for callers that have the inode already."""
        end = min(offset + length, inode.size_bytes)
        if offset < 0 or end <= offset:
            return b""
        pieces: list[bytes | memoryview] = []
        position = offset
        for extent in inode.extents:
            start = max(position, extent.file_offset)
            stop = min(end, extent.file_offset + extent.length)
            if start >= stop:
                continue
            pieces.append(bytes(start - position))
            shift = extent.blob_offset - extent.file_offset
            pieces.extend(self._stream(extent.blob, start + shift, stop - start))
            position = stop
        pieces.append(bytes(end - position))
        return b"".join(pieces)

    def _stream(self, blob: int, offset: int, length: int) -> Iterator[memoryview]:
        for number in frames_for(self._tree.blobs[blob], offset, length):
            start, content = self._frame(blob, number)
            yield memoryview(content)[max(0, offset - start) : offset + length - start]

    def _frame(self, blob: int, number: int) -> tuple[int, bytes]:
        """Return the stream offset and the content of a frame."""
        frame = self._tree.blobs[blob].frames[number]
        key = (blob, number)
        with self._lock:
            content = self._cached.get(key)
            if content is not None:
                self._cached.move_to_end(key)
                return frame.stream_offset, content
        content = decode_frame(frame, self._read(blob, frame.offset, frame.length))
        with self._lock:
            if key not in self._cached and len(content) <= self._cache_bytes:
                self._cached[key] = content
                self._cached_bytes += len(content)
            while self._cached_bytes > self._cache_bytes:
                _, dropped = self._cached.popitem(last=False)
                self._cached_bytes -= len(dropped)
        return frame.stream_offset, content


def verify(tree: Tree, read: ReadBlob, on_progress: Callable[[int], None] | None = None) -> None:
    """Verify the digests of every blob, every frame and every file.

    `on_progress` is called with the number of stored bytes done. Raises: CorruptError that names
    the damaged blob or file.
    """
    tree.validate()
    for number, blob in enumerate(tree.blobs):
        whole = new_hasher(blob.digest)
        for offset in range(0, blob.size_bytes, _VERIFY_READ_BYTES):
            length = min(_VERIFY_READ_BYTES, blob.size_bytes - offset)
            data = read(number, offset, length)
            if len(data) != length:
                raise CorruptError(f"the blob {blob.digest} is cut off at {offset + len(data)}")
            whole.update(data)
            if on_progress:
                on_progress(length)
        if whole.hexdigest() != blob.digest.partition(":")[2]:
            raise CorruptError(f"the blob {blob.digest} does not match its digest")
    reader = BlobReader(tree, read)
    # Files are read in the order of the stream, so that each frame is decoded once.
    for inode_number in sorted(range(tree.inode_count), key=lambda n: _first_byte(tree, n)):
        inode = tree.inode(inode_number)
        if not stat.S_ISREG(inode.mode) or inode.digest is None:
            continue
        if inode.size_bytes - sum(e.length for e in inode.extents) > ZEROS_HASHED_MAX:
            # Our writers give such files no digest; hashing a hole of 2**63 bytes would never end.
            raise CorruptError(
                f"{quoted(tree.path(inode_number))} has a digest, and holes too large"
            )
        hasher = ContentHasher()
        for offset in range(0, inode.size_bytes, len(_ZEROS)):
            hasher.update(reader.read_extents(inode, offset, len(_ZEROS)))
        if hasher.digest() != inode.digest:
            raise CorruptError(f"{quoted(tree.path(inode_number))} does not match its digest")


def _first_byte(tree: Tree, number: int) -> tuple[int, int]:
    extents = tree.inode(number).extents
    return (extents[0].blob, extents[0].blob_offset) if extents else (0, 0)
