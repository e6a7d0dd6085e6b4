"""Codec of the OCI artifacts that hold a store's objects beside an image in a registry.

An object is a blob in the image's repository and a small manifest. The manifest refers to the image
(`subject`), and its annotations contain the object's key. Registries copy annotations into the list
of an image's referrers, so that one list shows all keys. Malformed entries of a list are ignored.
Format: docs/format/oci.md. Pure.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from bootseer.errors import InvalidInputError
from bootseer.registry.documents import MANIFEST_TYPE, digest_of
from bootseer.store.paths import split_path

ARTIFACT_TYPE = "application/vnd.bootseer.store.v1"
OBJECT_TYPE = "application/vnd.bootseer.object.v1"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
"""Configuration of an artifact without one (image specification, "Guidance for an Empty
Descriptor")."""

_KEY = "org.bootseer.key"
_DIGEST = "org.bootseer.digest"
_SIZE = "org.bootseer.size"
_WRITTEN = "org.bootseer.written_ns"
_REPLACES = "org.bootseer.replaces"
_SHA256 = re.compile("sha256:[0-9a-f]{64}")
_NUMBER = re.compile("[0-9]{1,19}")


class OciObject(Struct, frozen=True):
    """Object of a store: its key, its blob and its manifest."""

    key: str
    digest: str
    size_bytes: int
    written_ns: int
    """Time of the write by the writer's clock."""
    replaces: bool
    """Whether the object was written to replace an existing one, not to be the first."""
    manifest_digest: str

    @property
    def is_immutable(self) -> bool:
        """Whether the key contains the object's digest, so that the object can never change."""
        return self.digest.partition(":")[2] in self.key

    @property
    def order(self) -> tuple[bool, int, str]:
        """Rank among the objects of one key; the greatest is the valid one.

        That is the newest replacement, or without replacements the oldest object, so that writers
        and readers agree on the first writer.
        """
        age = self.written_ns if self.replaces else -self.written_ns
        return (self.replaces, age, self.manifest_digest)


def encode_object(
    key: str,
    digest: str,
    size_bytes: int,
    written_ns: int,
    subject: Mapping[str, Any],
    *,
    replaces: bool = False,
) -> tuple[bytes, dict[str, Any]]:
    """Return the manifest of an object, and the descriptor by which lists of referrers name it."""
    annotations = {
        _KEY: key,
        _DIGEST: digest,
        _SIZE: str(size_bytes),
        _WRITTEN: str(written_ns),
        "org.opencontainers.image.created": _rfc3339(written_ns),
    }
    if replaces:
        annotations[_REPLACES] = "true"
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": EMPTY_TYPE, "digest": digest_of(EMPTY), "size": len(EMPTY)},
        "layers": [{"mediaType": OBJECT_TYPE, "digest": digest, "size": size_bytes}],
        "subject": dict(subject),
        "annotations": annotations,
    }
    data = json.dumps(manifest, sort_keys=True).encode()
    descriptor = {
        "mediaType": MANIFEST_TYPE,
        "digest": digest_of(data),
        "size": len(data),
        "artifactType": ARTIFACT_TYPE,
        "annotations": annotations,
    }
    return data, descriptor


def _rfc3339(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def decode_object(descriptor: Mapping[str, Any]) -> OciObject | None:
    """Return the object of a descriptor in a list of referrers; None for other descriptors."""
    annotations = descriptor.get("annotations")
    manifest_digest = descriptor.get("digest")
    if not isinstance(annotations, dict) or not isinstance(manifest_digest, str):
        return None
    if descriptor.get("artifactType") != ARTIFACT_TYPE:
        return None
    names = (_KEY, _DIGEST, _SIZE, _WRITTEN)
    values = [value for name in names if isinstance(value := annotations.get(name), str)]
    if len(values) < len(names):
        return None
    key, digest, size, written = values
    if not (_SHA256.fullmatch(digest) and _SHA256.fullmatch(manifest_digest)):
        return None
    if not (_NUMBER.fullmatch(size) and _NUMBER.fullmatch(written)):
        return None
    try:
        if not split_path(key):
            return None
    except InvalidInputError:
        return None
    replaces = annotations.get(_REPLACES) == "true"
    return OciObject(key, digest, int(size), int(written), replaces, manifest_digest)


def objects_by_key(descriptors: Iterable[Any]) -> dict[str, list[OciObject]]:
    """Return the objects in a list of referrers by key, the valid one of each key last."""
    found: dict[str, list[OciObject]] = {}
    for descriptor in descriptors:
        stored = decode_object(descriptor) if isinstance(descriptor, dict) else None
        if stored is not None:
            found.setdefault(stored.key, []).append(stored)
    for versions in found.values():
        versions.sort(key=lambda stored: stored.order)
    return found
