"""How people name the source of an image: its kinds, told apart by the text alone.

Apart from `sources`, which opens them: most starts name an image of the store, and load none of
that. Stateless; any thread.
"""

import re
from pathlib import Path

REGISTRY = "registry://"
DOCKER = "docker://"
OCI_LAYOUT = "oci:"
ARCHIVES = ("docker-archive:", "oci-archive:")

_IN_REGISTRY = re.compile(r"(?:[^/]*[.:][^/]*|localhost)/.+")
"""A first part that can only be a host, as Docker tells hosts from names."""


def registry_name(reference: str) -> str | None:
    """Return the source `registry://...` of an image that is called as in a registry
    (`HOST/NAME:TAG`); None for another name, which does not tell where the image is."""
    return f"{REGISTRY}{reference}" if _IN_REGISTRY.fullmatch(reference) else None


def is_source(text: str) -> bool:
    """Whether `text` says where an image is, rather than naming one in the store."""
    prefixes = (DOCKER, REGISTRY, OCI_LAYOUT, *ARCHIVES)
    return text.startswith(prefixes) or ("/" in text and Path(text).exists())
