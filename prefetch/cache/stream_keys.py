"""What a stream is called in the node cache: by what proves its bytes. Pure.

An index says of each blob a digest of its whole stream. Nothing compares that with the frames, so
the author of the index may have written anything there, and the cache never believes it
(docs/format/cache.md, "Keys"). What is verified is every frame: the digests and lengths of all
frames name the stream. Who does not know them does not find it.
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
    """Whether a blob has frames to be fetched. One that has none lies on the node that pulled it
    alone, unless it is empty."""
    return len(blob.frames) > 0 or blob.stream_length == 0


def frames_key(blob: "Blob") -> str:
    """`frames:<hex>`: BLAKE3 over where each frame begins in the stream, and its digest."""
    # A command that starts a server needs the names of stores only.
    from bootseer.base.content_digest import ContentHasher
    from bootseer.blob.frames import FrameTable

    frames = blob.frames
    if isinstance(frames, FrameTable):
        offsets, digests = frames.stream_offsets[: len(frames)], frames.digests
    else:
        offsets = array("Q", (frame.stream_offset for frame in frames))
        digests = b"".join(frame.digest for frame in frames)
    hasher = ContentHasher(_HEAD.pack(_MAGIC, blob.stream_length, len(frames)))
    hasher.update(offsets.tobytes())
    hasher.update(digests)
    return f"frames:{hasher.hexdigest()}"


def store_hex(store_url: str) -> str:
    """What a store is called in names of files: 16 digits of the SHA-256 of its URL, without
    user, password and query: these may be secret, and change."""
    return hashlib.sha256(public_url(store_url).encode()).hexdigest()[:16]


def claimant_of(index_digest: str, store_url: str) -> str:
    """For whom claimed bytes are believed: the image with this index, of this store. Another store
    may have the same index, and bundles that others wrote."""
    return f"{index_digest} {store_hex(store_url)}"
