"""Manifests and indexes of manifests: their types, digests and JSON, and the platform that suits
this machine. Pure but for asking what machine this is.
"""

import hashlib
import platform
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
# platform.machine() -> GOARCH, where they differ.
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "i686": "386",
    "loongarch64": "loong64",
}
# The variants of an architecture in the order of preference; others come last. Any machine runs
# what names no variant of amd64, and arm64 has only ever had v8.
_VARIANTS = {"amd64": ("", "v1"), "arm64": ("v8", ""), "arm": ("v7", "v6", "v5", "")}


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


def this_architecture() -> str:
    """What images call this machine's architecture."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def unsuitability(system: str, architecture: str, variant: str) -> int | None:
    """0 for the platform that suits this machine best, more for others; None: it does not run."""
    wanted = this_architecture()
    if architecture != wanted or system not in ("linux", ""):
        return None
    preferred = _VARIANTS.get(wanted, ())
    return preferred.index(variant) if variant in preferred else len(preferred)
