"""How people name the source of an image: its kinds, told apart by the text alone.

Apart from `sources`, which opens them: most starts name an image of the store, and load none of
that. Stateless; any thread.
"""

from pathlib import Path

REGISTRY = "registry://"
DOCKER = "docker://"
OCI_LAYOUT = "oci:"
ARCHIVES = ("docker-archive:", "oci-archive:")


def is_source(text: str) -> bool:
    """Whether `text` says where an image is, rather than naming one in the store."""
    prefixes = (DOCKER, REGISTRY, OCI_LAYOUT, *ARCHIVES)
    return text.startswith(prefixes) or ("/" in text and Path(text).exists())
