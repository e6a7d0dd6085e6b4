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


def name_of_source(source: str) -> str | None:
    """What the image in `source` is called in a store, where that can be told without asking the
    source: for a registry. Raises: InvalidInputError."""
    if not source.startswith(REGISTRY):
        return None
    from bootseer.prefetch.sources.registry import store_name
    from bootseer.registry.reference import parse_reference

    return store_name(parse_reference(source.removeprefix(REGISTRY)))
