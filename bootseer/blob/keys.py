"""Where content lies in a store: named by its digest, the same for images and environments."""

POINTS = "points:"
"""Digest of a blob that is a gzip layer in a registry: this, and the SHA-256 of its seek points."""


def blob_key(digest: str) -> str:
    """Returns the key of the blob `blake3:<hex>` in a store; of `points:<hex>` that of its seek
    points."""
    if digest.startswith(POINTS):
        return index_key(f"sha256:{digest.removeprefix(POINTS)}")
    return f"blobs/{digest.replace(':', '/', 1)}"


def index_key(digest: str) -> str:
    """Returns the key of the encoded tree `sha256:<hex>` in a store."""
    return f"indexes/{digest.replace(':', '/', 1)}"
