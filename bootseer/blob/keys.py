"""Where content lies in a store: named by its digest, the same for images and environments."""


def blob_key(digest: str) -> str:
    """Where the blob `blake3:<hex>` lies."""
    return f"blobs/{digest.replace(':', '/', 1)}"


def index_key(digest: str) -> str:
    """Where the encoded tree `sha256:<hex>` lies."""
    return f"indexes/{digest.replace(':', '/', 1)}"
