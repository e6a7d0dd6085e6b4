"""Names of image sources: prefixes, and functions that tell sources from names in a store.

Separate from `sources`, which most starts do not load, because they name an image of the store.
Stateless; any thread.
"""

import re
from pathlib import Path

REGISTRY = "registry://"
DOCKER = "docker://"
OCI_LAYOUT = "oci:"
ARCHIVES = ("docker-archive:", "oci-archive:")

_IN_REGISTRY = re.compile(r"(?:[^/]*[.:][^/]*|localhost)/.+")
"""The first part of the name can only be a host, by Docker's rule."""


def registry_name(reference: str) -> str | None:
    """Return the source `registry://...` of an image named `HOST/NAME:TAG`.

    Return None for a name without a host, from which no registry can be told.
    """
    return f"{REGISTRY}{reference}" if _IN_REGISTRY.fullmatch(reference) else None


def is_source(text: str) -> bool:
    """Return whether `text` names a source instead of an image in the store."""
    prefixes = (DOCKER, REGISTRY, OCI_LAYOUT, *ARCHIVES)
    return text.startswith(prefixes) or ("/" in text and Path(text).exists())
