"""A manifest's bytes: the JSON at `snapshots/<fingerprint>.json` (`docs/format/snapshot.md`).

Pure (no I/O). Alone owns the format and every check of it: what a store returns is hostile until
`decode` has returned.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bootseer.base.bounded_json import members_digest, parse_json
from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.snapshots.catalogue.manifest import (
    EARLIER_MAX,
    NOTHING_OUTSIDE,
    OUTSIDE_PATHS_MAX,
    Manifest,
    Outside,
    Stored,
    Target,
    checked_target,
    is_name,
    is_plain,
    text_of,
)
from bootseer.snapshots.setup.fingerprint import Part, fingerprint, published

FORMAT = "bootseer-snapshot"
VERSION = 1
LAYERED_VERSION = 2
"""Of a manifest with a target that takes content from earlier blobs. A release that does not know
them must not read it, since its garbage collector would delete them."""

# Bounds that no honest manifest comes near; deletions of a whole conda environment take 10 MB.
MANIFEST_BYTES_MAX = 128 * 1024 * 1024
TARGETS_MAX = 1000
PARTS_MAX = 100_000
DELETIONS_MAX = 4_000_000
PATH_BYTES_MAX = 1024 * 1024
SIZE_BYTES_MAX = 1 << 50
INDEX_BYTES_MAX = 4 << 30

_HEX = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"(?:sha256|blake3):[0-9a-f]{64}")


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON; the same manifest always gives the same bytes."""
    document = {
        "format": FORMAT,
        "version": LAYERED_VERSION if manifest.is_layered else VERSION,
        "fingerprint": manifest.fingerprint,
        "name": manifest.name,
        "created_ns": manifest.created_ns,
        "setup_ns": manifest.setup_ns,
        "node": manifest.node,
        "bootseer": manifest.version,
        "parts": [[part.name, part.value] for part in manifest.parts],
        "targets": [
            {
                "path": text_of(target.path),
                "whole": target.whole,
                "blob": {"digest": target.blob.digest, "size_bytes": target.blob.size_bytes},
                "index": {"digest": target.index.digest, "size_bytes": target.index.size_bytes},
                **_encoded_earlier(target),
                "file_count": target.file_count,
                "content_bytes": target.content_bytes,
                "deletions": [text_of(path) for path in target.deletions],
            }
            for target in manifest.targets
        ],
        **_encoded_outside(manifest.outside),
    }
    document["digest"] = members_digest(document, "digest")
    return json.dumps(document, indent=1, ensure_ascii=True).encode("ascii") + b"\n"


def _encoded_outside(outside: Outside) -> dict[str, Any]:
    if not outside.paths:
        return {}
    names = {"path_count": outside.path_count, "is_complete": outside.is_complete}
    return {"outside": {"paths": list(outside.paths), **names}}


def _encoded_earlier(target: Target) -> dict[str, Any]:
    if not target.earlier:
        return {}
    earlier = [{"digest": blob.digest, "size_bytes": blob.size_bytes} for blob in target.earlier]
    return {"earlier": earlier}


def decode(data: bytes, expected: str | None = None) -> Manifest:
    """The manifest in `data`, checked; `expected` is the key it was stored under.

    Raises: CorruptError, also where it is another snapshot's; UnknownFormatError for a version
    that this release does not know.
    """
    document = parse_json(data, "a snapshot manifest", MANIFEST_BYTES_MAX)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptError("this is not a snapshot manifest")
    version = document.get("version")
    if version not in (VERSION, LAYERED_VERSION) or isinstance(version, bool):
        raise UnknownFormatError(
            f"snapshot manifest version {str(version)[:20]} is not known to this release "
            f"(it reads {VERSION} and {LAYERED_VERSION}); use a newer Bootseer"
        )
    key = _text(document, "fingerprint", _HEX)
    parts = _parts(document)
    # The identity it claims: a manifest stored under another key, or edited, is refused by name.
    if not _is_key_of(key, parts) or (expected is not None and key != expected):
        raise CorruptError(f"snapshot manifest {expected or key} does not match its fingerprint")
    is_verified = "digest" in document
    if is_verified and not _is_digest_of(document):
        raise CorruptError(
            f"snapshot manifest {key} does not match its digest: it is damaged, or was edited"
        )
    targets = document.get("targets")
    if not isinstance(targets, list) or not 0 < len(targets) <= TARGETS_MAX:
        raise CorruptError("a snapshot manifest has no usable list of targets")
    name = _text(document, "name")
    if name and not is_name(name):
        raise CorruptError("a snapshot manifest has an unusable name")
    decoded = tuple(_target(target, version == LAYERED_VERSION) for target in targets)
    if len({target.path for target in decoded}) != len(decoded):
        raise CorruptError("a snapshot manifest names one target twice")
    return Manifest(
        fingerprint=key,
        parts=tuple(published(part) for part in parts),
        targets=decoded,
        created_ns=_number(document, "created_ns", 1 << 63),
        setup_ns=_number(document, "setup_ns", 1 << 63),
        node=_text(document, "node"),
        name=name,
        version=_text(document, "bootseer"),
        outside=_outside(document.get("outside")),
        is_verified=is_verified,
    )


def _outside(table: Any) -> Outside:
    if table is None:
        return NOTHING_OUTSIDE
    paths = table.get("paths") if isinstance(table, dict) else None
    if (
        not isinstance(paths, list)
        or len(paths) > OUTSIDE_PATHS_MAX
        or not all(isinstance(path, str) and len(path) <= PATH_BYTES_MAX for path in paths)
    ):
        raise CorruptError("a snapshot manifest has no usable 'outside'")
    count = _number(table, "path_count", SIZE_BYTES_MAX)
    return Outside(tuple(paths), table.get("is_complete") is True, count)


def _is_key_of(key: str, parts: Sequence[Part]) -> bool:
    try:
        return fingerprint(parts) == key
    except UnicodeEncodeError:
        return False


def _is_digest_of(document: Mapping[str, Any]) -> bool:
    try:
        return bool(document["digest"] == members_digest(document, "digest"))
    except RecursionError:
        return False


def _text(table: Mapping[str, Any], key: str, pattern: re.Pattern[str] | None = None) -> str:
    value = table.get(key)
    if not isinstance(value, str) or len(value) > PATH_BYTES_MAX:
        raise CorruptError(f"a snapshot manifest has no usable {key!r}")
    if pattern is not None and not pattern.fullmatch(value):
        raise CorruptError(f"a snapshot manifest has a malformed {key!r}")
    return value


def _number(table: Mapping[str, Any], key: str, limit: int) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise CorruptError(f"a snapshot manifest has no usable {key!r}")
    return value


def _parts(document: Mapping[str, Any]) -> tuple[Part, ...]:
    rows = document.get("parts")
    if not isinstance(rows, list) or len(rows) > PARTS_MAX:
        raise CorruptError("a snapshot manifest has no usable list of parts")
    parts = []
    for row in rows:
        if (
            not isinstance(row, list)
            or len(row) != 2
            or not all(isinstance(text, str) for text in row)
        ):
            raise CorruptError("a snapshot manifest has a malformed part")
        parts.append(Part(row[0], row[1]))
    return tuple(sorted(parts))


def _stored(table: Mapping[str, Any], key: str, limit: int) -> Stored:
    return _checked_stored(table.get(key), key, limit)


def _checked_stored(value: Any, what: str, limit: int) -> Stored:
    if not isinstance(value, dict):
        raise CorruptError(f"a snapshot manifest has no usable {what!r}")
    return Stored(_text(value, "digest", _DIGEST), _number(value, "size_bytes", limit))


def _earlier(table: Mapping[str, Any], blob: Stored) -> tuple[Stored, ...]:
    rows = table.get("earlier", [])
    if not isinstance(rows, list) or len(rows) > EARLIER_MAX:
        raise CorruptError(
            f"a snapshot manifest has no usable 'earlier': a list of at most {EARLIER_MAX} blobs"
        )
    earlier = tuple(_checked_stored(row, "earlier", SIZE_BYTES_MAX) for row in rows)
    if len({blob.digest, *(one.digest for one in earlier)}) != 1 + len(earlier):
        raise CorruptError("a snapshot manifest names one blob of a target twice")
    return earlier


def _target(table: Any, may_be_layered: bool) -> Target:
    if not isinstance(table, dict):
        raise CorruptError("a snapshot manifest has a malformed target")
    whole = table.get("whole")
    if not isinstance(whole, bool):
        raise CorruptError("a snapshot manifest does not say whether a target is whole")
    deletions = table.get("deletions")
    if not isinstance(deletions, list) or len(deletions) > DELETIONS_MAX:
        raise CorruptError("a snapshot manifest has no usable list of deletions")
    blob = _stored(table, "blob", SIZE_BYTES_MAX)
    return Target(
        path=checked_target(_bytes(_text(table, "path"))),
        whole=whole,
        blob=blob,
        index=_stored(table, "index", INDEX_BYTES_MAX),
        deletions=tuple(_relative(path) for path in deletions),
        file_count=_number(table, "file_count", SIZE_BYTES_MAX),
        content_bytes=_number(table, "content_bytes", SIZE_BYTES_MAX),
        earlier=_earlier(table, blob) if may_be_layered else (),
    )


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise CorruptError("a snapshot manifest has a malformed path") from None


def _relative(text: Any) -> bytes:
    if not isinstance(text, str) or len(text) > PATH_BYTES_MAX:
        raise CorruptError("a snapshot manifest has a malformed deletion")
    path = _bytes(text)
    if not is_plain(path.split(b"/")):
        raise CorruptError(f"a snapshot wants to delete {text[:200]!r}, outside its target")
    return path
