"""Keys of blobs and tree indexes in a store, derived from their digests."""

POINTS = "points:"
"""Prefix of the digest of a gzip layer in a registry; the SHA-256 of its seek points follows."""


def blob_key(digest: str) -> str:
    """Return the store key of a blob, or for a digest `points:<hex>` of its seek points."""
    if digest.startswith(POINTS):
        return index_key(f"sha256:{digest.removeprefix(POINTS)}")
    return f"blobs/{digest.replace(':', '/', 1)}"


def index_key(digest: str) -> str:
    """Return the store key of the encoded tree `sha256:<hex>`."""
    return f"indexes/{digest.replace(':', '/', 1)}"
