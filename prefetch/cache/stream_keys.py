"""Keys of the streams in the node cache: a stream is named by what proves its bytes. Pure.

An index gives a digest of each blob's whole stream. Nothing compares that digest with the frames,
so the author of an index may write anything there, and the cache never believes it
(docs/format/cache.md, "Keys"). Every frame is verified: the offsets and digests of all frames name
the stream, and who does not know them does not find it.
"""

import hashlib
import struct
from array import array
from typing import TYPE_CHECKING

from bootseer.base.redact import public_url

if TYPE_CHECKING:
    from bootseer.blob.tree import Blob

_HEAD = struct.Struct("<16sQQ")
_MAGIC = b"bootseer frames\0"


def is_stored(blob: "Blob") -> bool:
    """Return whether a blob has frames to be fetched. A blob without frames lies only on the node
    that pulled it, unless it is empty."""
    return len(blob.frames) > 0 or blob.stream_length == 0


def frame_starts(blob: "Blob") -> "array[int]":
    """Return the offset of each frame in the blob's stream, and at the end the stream's length."""
    from bootseer.blob.frames import FrameTable

    frames = blob.frames
    if isinstance(frames, FrameTable):
        return frames.stream_offsets
    end = frames[-1].stream_offset + frames[-1].stream_length if frames else 0
    return array("Q", [*(frame.stream_offset for frame in frames), end])


def frames_key(blob: "Blob") -> str:
    """Return `frames:<hex>`: BLAKE3 over the offset of each frame in the stream, and its digest."""
    # A command that starts a server needs the names of stores only.
    from bootseer.base.content_digest import ContentHasher
    from bootseer.blob.frames import FrameTable

    frames = blob.frames
    if isinstance(frames, FrameTable):
        digests = bytes(frames.digests)
    else:
        digests = b"".join(frame.digest for frame in frames)
    hasher = ContentHasher(_HEAD.pack(_MAGIC, blob.stream_length, len(frames)))
    hasher.update(frame_starts(blob)[: len(frames)].tobytes())
    hasher.update(digests)
    return f"frames:{hasher.hexdigest()}"


def own_key(blob: "Blob", owner: str) -> str:
    """Return the key of the stream that a registry sent in place of a lost blob, for the image
    `owner` alone (see `owner_of`)."""
    text = f"{owner} {frames_key(blob)}"
    return f"own:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def store_hex(store_url: str) -> str:
    """Return the name of a store in names of files: 16 digits of the SHA-256 of its URL, without
    user, password and query, which may be secret, and change."""
    return hashlib.sha256(public_url(store_url).encode()).hexdigest()[:16]


def owner_of(index_digest: str, store_url: str) -> str:
    """Return the name of an image for bytes that serve this image alone: its index and its store.
    Another store may have the same index, and bundles that others wrote."""
    return f"{index_digest} {store_hex(store_url)}"
