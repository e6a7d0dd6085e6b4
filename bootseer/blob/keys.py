"""Where content lies in a store: named by its digest, the same for images and environments."""


def blob_key(digest: str) -> str:
    """Returns the key of the blob `blake3:<hex>` in a store."""
    return f"blobs/{digest.replace(':', '/', 1)}"


def index_key(digest: str) -> str:
    """Returns the key of the encoded tree `sha256:<hex>` in a store."""
    return f"indexes/{digest.replace(':', '/', 1)}"
