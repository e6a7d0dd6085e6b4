"""The digest inside our own formats: of frames, of files' contents, of streams that no image names.

BLAKE3, 32 bytes: a cryptographic hash like SHA-256, but on CPUs without SHA instructions it is more
than ten times as fast, and every byte of an environment or an image goes through it several times.
What others name by SHA-256 (blobs, layers, manifests) keeps that name. Pure; releases the GIL.
"""

from blake3 import blake3

ContentHasher = blake3
"""Takes bytes in pieces: `update(data)`, then `digest()`."""


def content_digest(data: bytes | bytearray | memoryview) -> bytes:
    """The 32 bytes that identify `data`."""
    return blake3(data).digest()
