"""The digest in our own formats: of blobs, frames, files' contents, streams that no image names.

BLAKE3, 32 bytes: a cryptographic hash like SHA-256, but on CPUs without SHA instructions it is more
than ten times as fast, and every byte of an environment or an image goes through it several times.
What others name by SHA-256 (layers, manifests) keeps that name, and so do blobs that were stored
under one. Pure; releases the GIL.
"""

import hashlib
from typing import Protocol

from blake3 import blake3

ContentHasher = blake3
"""Takes bytes in pieces: `update(data)`, then `digest()`."""


def content_digest(data: bytes | bytearray | memoryview) -> bytes:
    """The 32 bytes that identify `data`."""
    return blake3(data).digest()


class Hasher(Protocol):
    """Takes bytes in pieces."""

    def update(self, data: bytes, /) -> object:
        """Adds the next piece."""

    def hexdigest(self) -> str:
        """Returns the digest of all pieces so far, as hex digits."""


def hasher_of(digest: str) -> Hasher:
    """What computes digests of the kind of `digest`, "blake3:..." or "sha256:..."."""
    return blake3() if digest.startswith("blake3:") else hashlib.sha256()
