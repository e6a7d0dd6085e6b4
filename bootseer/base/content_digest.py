"""BLAKE3 digests (32 bytes), which Bootseer's own formats use for blobs, frames and file contents.

BLAKE3 is a cryptographic hash like SHA-256. On CPUs without SHA instructions BLAKE3 is more than
ten times as fast, and every byte of an image or environment is hashed several times. Layers and
manifests keep the SHA-256 digests that registries gave them. Pure; releases the GIL.
"""

import hashlib
from typing import Protocol

from blake3 import blake3

ContentHasher = blake3
"""Incremental hasher: `update(data)` for each piece, then `digest()`."""


def content_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE3 digest of `data`, 32 bytes."""
    return blake3(data).digest()


class Hasher(Protocol):
    """Incremental hasher of `hashlib` or `blake3`."""

    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


def new_hasher(digest: str) -> Hasher:
    """Return a new hasher for the algorithm of `digest` ("blake3:..." or "sha256:...")."""
    return blake3() if digest.startswith("blake3:") else hashlib.sha256()
