"""The JSON documents of an image, parsed and bounded: index, manifest, configuration.

Alone owns what is read of the OCI image specification (and Docker's schema 2, which differs only
in media types) and the choice of a platform. Pure: takes bytes, returns frozen objects. Nothing
in a document is believed: every type, count and size is checked, and digests are checked by
`verified` before a document is parsed.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from bootseer.base.checked_json import (
    check_digest,
    count_in,
    digest_in,
    list_in,
    object_in,
    parse,
    string_in,
    strings_in,
)
from bootseer.errors import CorruptError, InvalidInputError, NotFoundError, UnknownFormatError
from bootseer.prefetch.index.records import ImageConfig
from bootseer.registry.documents import DOCUMENT_BYTES_MAX, INDEX_TYPES
from bootseer.registry.platforms import this_architecture, unsuitability

LAYER_COUNT_MAX = 1000
"""Overlayfs stops at 500, Docker at 127."""
ENTRY_COUNT_MAX = 10_000
"""Of any other list."""
LAYER_BYTES_MAX = 2**40

_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1"


class Descriptor(Struct, frozen=True):
    """Points to bytes by digest and size; `tag` and `architecture` as an index annotates them."""

    digest: str
    size_bytes: int
    media_type: str = ""
    tag: str = ""
    system: str = ""
    architecture: str = ""
    variant: str = ""

    @property
    def is_index(self) -> bool:
        """Whether it points to another index."""
        return self.media_type in INDEX_TYPES


class Manifest(Struct, frozen=True):
    """One image: its configuration and its layers, the lowest first."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


def verified(data: bytes, expected: Descriptor, where: str) -> bytes:
    """`data` if it has the digest and size that `expected` gives. Raises: CorruptError."""
    algorithm = expected.digest.partition(":")[0]
    found = f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"
    if found != expected.digest or expected.size_bytes != len(data):
        raise CorruptError(f"{where}: {expected.digest} has other contents ({len(data)} bytes)")
    return data


def parse_index(data: bytes, where: str) -> tuple[Descriptor, ...]:
    """The manifests of an index. Raises: CorruptError, UnknownFormatError."""
    document = _document(data, where)
    _check_schema(document, where)
    entries = list_in(document, "manifests", dict, ENTRY_COUNT_MAX, where)
    return tuple(_descriptor(entry, where) for entry in entries)


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Raises: CorruptError, UnknownFormatError."""
    document = _document(data, where)
    _check_schema(document, where)
    layers = list_in(document, "layers", dict, LAYER_COUNT_MAX, where)
    return Manifest(
        _descriptor(object_in(document, "config", where), where),
        tuple(_descriptor(layer, where) for layer in layers),
    )


def parse_config(data: bytes, where: str) -> ImageConfig:
    """Raises: CorruptError; InvalidInputError where it configures no container image."""
    document = _document(data, where)
    rootfs = document.get("rootfs")
    if not isinstance(rootfs, dict) or rootfs.get("type") != "layers":
        raise InvalidInputError(f"{where} is an artifact without a root file system, not an image")
    run = object_in(document, "config", where)
    return ImageConfig(
        env=strings_in(run, "Env", ENTRY_COUNT_MAX, where),
        entrypoint=strings_in(run, "Entrypoint", ENTRY_COUNT_MAX, where),
        cmd=strings_in(run, "Cmd", ENTRY_COUNT_MAX, where),
        working_dir=string_in(run, "WorkingDir", where),
        user=string_in(run, "User", where),
        architecture=string_in(document, "architecture", where),
        diff_ids=tuple(
            check_digest(entry, where)
            for entry in strings_in(rootfs, "diff_ids", LAYER_COUNT_MAX, where)
        ),
    )


class ArchivedImage(Struct, frozen=True):
    """One entry of Docker's `manifest.json`: paths in the archive, and names."""

    config: str
    tags: tuple[str, ...]
    layers: tuple[str, ...]


def parse_archive_manifest(data: bytes, where: str) -> list[ArchivedImage]:
    """Raises: CorruptError."""
    entries = parse(data, DOCUMENT_BYTES_MAX, where)
    if not isinstance(entries, list) or len(entries) > ENTRY_COUNT_MAX:
        raise CorruptError(f"{where} is not a list of images")
    if not all(isinstance(entry, dict) for entry in entries):
        raise CorruptError(f"{where}: an image is not an object")
    return [
        ArchivedImage(
            string_in(entry, "Config", where),
            strings_in(entry, "RepoTags", ENTRY_COUNT_MAX, where),
            strings_in(entry, "Layers", LAYER_COUNT_MAX, where),
        )
        for entry in entries
    ]


def pick_platform(manifests: Sequence[Descriptor], where: str) -> Descriptor:
    """The one for this machine. Raises: NotFoundError, naming what there is."""
    fitting = [
        (rank, number)
        for number, m in enumerate(manifests)
        if (rank := unsuitability(m.system, m.architecture, m.variant)) is not None
    ]
    if fitting:
        return manifests[min(fitting)[1]]
    # A lone image without a platform needs no choice. BuildKit's attestations are marked
    # "unknown" and are no images.
    unmarked = [m for m in manifests if not m.architecture]
    if len(unmarked) == 1:
        return unmarked[0]
    there = sorted({f"{m.system}/{m.architecture}" for m in manifests if m.architecture})
    raise NotFoundError(
        f"{where} has no image for linux/{this_architecture()}, only for "
        f"{', '.join(there) or 'none'}"
    )


def _document(data: bytes, where: str) -> Mapping[str, Any]:
    document = parse(data, DOCUMENT_BYTES_MAX, where)
    if not isinstance(document, dict):
        raise CorruptError(f"{where} is not a JSON object")
    return document


def _check_schema(document: Mapping[str, Any], where: str) -> None:
    if document.get("schemaVersion") != 2:
        version = str(document.get("schemaVersion"))[:20]
        raise UnknownFormatError(f"{where}: schema version {version} is not read, only 2")


def _descriptor(entry: Mapping[str, Any], where: str) -> Descriptor:
    media_type = string_in(entry, "mediaType", where)
    if media_type.startswith(_SCHEMA_1):
        raise UnknownFormatError(f"{where}: Docker's image format of 2015 (schema 1) is not read")
    annotations = object_in(entry, "annotations", where)
    runs_on = object_in(entry, "platform", where)
    return Descriptor(
        digest_in(entry, "digest", where),
        count_in(entry, "size", where, LAYER_BYTES_MAX),
        media_type,
        tag=string_in(annotations, "org.opencontainers.image.ref.name", where),
        system=string_in(runs_on, "os", where),
        architecture=string_in(runs_on, "architecture", where),
        variant=string_in(runs_on, "variant", where),
    )
