"""Manifests and indexes of manifests: what they are called, and their digests and JSON. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from bootseer.base.documents import parse
from bootseer.errors import CorruptError

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
DOCUMENT_BYTES_MAX = 8 * 2**20
"""Registries refuse manifests above 4 MiB; a configuration with a long history may be larger."""
INDEX_TYPES = (INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFEST_TYPES = (MANIFEST_TYPE, "application/vnd.docker.distribution.manifest.v2+json")


class Document(Struct, frozen=True):
    """A manifest or an index of manifests, as it is stored."""

    digest: str
    media_type: str
    data: bytes


def digest_of(data: bytes, algorithm: str = "sha256") -> str:
    """The digest of `data`. Raises: CorruptError for an algorithm that OCI does not know."""
    if algorithm not in ("sha256", "sha512"):
        raise CorruptError(f"{algorithm[:20]!r} is no digest algorithm")
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


def fallback_tag(digest: str) -> str:
    """Where a registry without the referrers API keeps their list."""
    return digest.replace(":", "-", 1)


def parse_object(data: bytes, where: str) -> Mapping[str, Any]:
    """A JSON object from a registry. Raises: CorruptError."""
    try:
        document = parse(data, where, DOCUMENT_BYTES_MAX, is_foreign=True)
    except CorruptError:
        document = None
    if not isinstance(document, dict):
        raise CorruptError(f"{where} sent what is not a JSON object")
    return document
