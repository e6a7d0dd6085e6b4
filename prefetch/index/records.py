"""The records of images and layers in a store, as JSON (docs/format/image.md).

Alone owns their codec. Pure. A store may be shared with people one does not trust, so a record is
taken apart with every value checked.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from bootseer.checked_json import (
    ANY_DIGEST,
    BLOB_DIGEST,
    SHA256,
    check_checksum,
    count_in,
    digest_in,
    list_in,
    object_in,
    parse,
    string_in,
    strings_in,
    with_checksum,
)
from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.structs import asdict

VERSION = 1
RECORD_BYTES_MAX = 64 * 2**20
INDEX_BYTES_MAX = 2**30
REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")
"""What can name an image."""

_IMAGE = "bootseer-image"
_LAYER = "bootseer-layer"
_LIST_MAX = 10_000
_NOTE_MAX = 2**20
"""Implied directories, or links, of one layer."""


class ImageConfig(Struct, frozen=True):
    """How a container of the image is started, and the digests of its uncompressed layers."""

    env: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    architecture: str = ""
    diff_ids: tuple[str, ...] = ()


class LayerRecord(Struct, frozen=True):
    """A layer in the store: its blob, and its tree with whiteouts still in it."""

    digest: str
    """Of the uncompressed tar, the `diff_id`; of a directory: the blob's digest."""
    blob_digest: str
    blob_size_bytes: int
    index_digest: str
    implied: tuple[bytes, ...] = ()
    """Paths of directories that the layer's tar does not name."""
    links: tuple[tuple[bytes, bytes], ...] = ()
    """Hard links to names of lower layers: (path, target)."""


class ImageLayer(Struct, frozen=True):
    """A layer as an image's record lists it."""

    digest: str
    blob_digest: str
    blob_size_bytes: int


class ImageRecord(Struct, frozen=True):
    """An indexed image. `index_digest` names its merged tree, which pins all of its bytes."""

    reference: str
    identity: str
    """Digest of the image's configuration, Docker's image ID; of a directory: of its stream."""
    index_digest: str
    index_size_bytes: int
    config: ImageConfig
    layers: tuple[ImageLayer, ...]
    size_bytes: int
    """Of all files' contents."""
    file_count: int
    """Names in the tree."""
    created_ns: int
    manifest_digest: str = ""
    """Of the platform's manifest in a registry; empty where it came from elsewhere."""


def encode_image(record: ImageRecord) -> bytes:
    """The bytes of a record."""
    return _encode(_IMAGE, asdict(record))


def decode_image(data: bytes, where: str) -> ImageRecord:
    """Raises: CorruptError, UnknownFormatError."""
    document = _document(data, _IMAGE, where)
    layers = tuple(
        ImageLayer(
            digest_in(layer, "digest", where, ANY_DIGEST),
            digest_in(layer, "blob_digest", where, BLOB_DIGEST),
            count_in(layer, "blob_size_bytes", where),
        )
        for layer in list_in(document, "layers", dict, _LIST_MAX, where)
    )
    reference = string_in(document, "reference", where)
    if not REFERENCE.fullmatch(reference):
        raise CorruptError(f"{where}: the reference names no image")
    return ImageRecord(
        reference,
        digest_in(document, "identity", where, ANY_DIGEST),
        digest_in(document, "index_digest", where, SHA256),
        count_in(document, "index_size_bytes", where, INDEX_BYTES_MAX),
        _config(object_in(document, "config", where), where),
        layers,
        count_in(document, "size_bytes", where, 2**63),
        count_in(document, "file_count", where),
        count_in(document, "created_ns", where, 2**63),
        _digest_or_none(document, "manifest_digest", where),
    )


def _digest_or_none(document: Mapping[str, Any], key: str, where: str) -> str:
    """ "" where there is none."""
    return digest_in(document, key, where) if document.get(key) else ""


def encode_layer(record: LayerRecord) -> bytes:
    """The bytes of a record: the same layer gives the same bytes. Paths are text with surrogate
    escapes, since names need not be UTF-8."""
    return _encode(_LAYER, {**asdict(record), **encode_notes(record.implied, record.links)})


def decode_layer(data: bytes, where: str) -> LayerRecord:
    """Raises: CorruptError, UnknownFormatError."""
    document = _document(data, _LAYER, where)
    return LayerRecord(
        digest_in(document, "digest", where),
        digest_in(document, "blob_digest", where, BLOB_DIGEST),
        count_in(document, "blob_size_bytes", where),
        digest_in(document, "index_digest", where, SHA256),
        *decode_notes(document, where),
    )


def encode_notes(implied: Sequence[bytes], links: Sequence[tuple[bytes, bytes]]) -> dict[str, Any]:
    """What a layer leaves to those below it, as JSON values."""
    return {
        "implied": [_text(path) for path in implied],
        "links": [[_text(path) for path in link] for link in links],
    }


def decode_notes(
    document: Mapping[str, Any], where: str
) -> tuple[tuple[bytes, ...], tuple[tuple[bytes, bytes], ...]]:
    """(implied, links) of `LayerRecord`. Raises: CorruptError."""
    links = list_in(document, "links", list, _NOTE_MAX, where)
    if any(len(link) != 2 or any(not isinstance(path, str) for path in link) for link in links):
        raise CorruptError(f"{where}: a link is not a pair of paths")
    return (
        tuple(path_bytes(p, where) for p in strings_in(document, "implied", _NOTE_MAX, where)),
        tuple((path_bytes(path, where), path_bytes(target, where)) for path, target in links),
    )


def _encode(kind: str, document: Mapping[str, Any]) -> bytes:
    members = with_checksum({"kind": kind, "version": VERSION, **document})
    text = json.dumps(members, indent=1)
    return text.encode("ascii") + b"\n"


def _document(data: bytes, kind: str, where: str) -> Mapping[str, Any]:
    document = parse(data, RECORD_BYTES_MAX, where)
    check_checksum(document, where)
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise CorruptError(f"{where} is not a record of the kind {kind}")
    if document.get("version") != VERSION:
        version = str(document.get("version"))[:20]
        raise UnknownFormatError(
            f"{where} has version {version}; this release reads version {VERSION}: use a newer one"
        )
    return document


def _config(document: Mapping[str, Any], where: str) -> ImageConfig:
    return ImageConfig(
        env=strings_in(document, "env", _LIST_MAX, where),
        entrypoint=strings_in(document, "entrypoint", _LIST_MAX, where),
        cmd=strings_in(document, "cmd", _LIST_MAX, where),
        working_dir=string_in(document, "working_dir", where),
        user=string_in(document, "user", where),
        architecture=string_in(document, "architecture", where),
        diff_ids=strings_in(document, "diff_ids", _LIST_MAX, where),
    )


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def path_bytes(text: str, where: str) -> bytes:
    """A path as it is in a tree. Raises: CorruptError."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise CorruptError(f"{where}: {text!r} is no path") from error
