"""A snapshot's manifest: what it was made from, and which blobs restore it.

Pure (no I/O). Alone owns the JSON at `snapshots/<fingerprint>.json` (`docs/format/snapshot.md`)
and every check of it: what a store returns is hostile until `decode` has returned.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bootseer.errors import CorruptError, InvalidInputError, UnknownFormatError
from bootseer.snapshots.setup.fingerprint import Part, fingerprint

FORMAT = "bootseer-snapshot"
VERSION = 1

# Bounds that no honest manifest comes near; deletions of a whole conda environment take 10 MB.
MANIFEST_BYTES_MAX = 256 * 1024 * 1024
TARGETS_MAX = 1000
PARTS_MAX = 100_000
DELETIONS_MAX = 5_000_000
PATH_BYTES_MAX = 1024 * 1024
SIZE_BYTES_MAX = 1 << 50
INDEX_BYTES_MAX = 4 << 30

_HEX = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Stored:
    """An object of the store, named by its digest."""

    digest: str
    """`sha256:<hex>` of its bytes."""
    size_bytes: int

    @property
    def hex(self) -> str:
        """The digest's 64 hex digits."""
        return self.digest.removeprefix("sha256:")


@dataclass(frozen=True, slots=True)
class Target:
    """One directory that the set-up made or changed."""

    path: bytes
    """Absolute, as the job sees it (inside its root)."""
    whole: bool
    """There was nothing before: the blob holds all of it. Else it holds the difference."""
    blob: Stored
    index: Stored
    """The blob's tree."""
    deletions: tuple[bytes, ...]
    """Relative paths that the set-up removed, sorted."""
    file_count: int
    """Names in the blob, directories included."""
    content_bytes: int
    """Sum of the sizes of its regular files."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One snapshot."""

    fingerprint: str
    """Its key: 64 hex digits."""
    parts: tuple[Part, ...]
    """What the key was computed from, sorted."""
    targets: tuple[Target, ...]
    created_ns: int
    setup_ns: int
    """How long the set-up command took: what a restore saves."""
    node: str
    name: str = ""
    """Given by the user, or empty."""
    version: str = ""
    """Of the Bootseer that made it."""

    @property
    def file_count(self) -> int:
        return sum(target.file_count for target in self.targets)

    @property
    def content_bytes(self) -> int:
        return sum(target.content_bytes for target in self.targets)

    @property
    def stored_bytes(self) -> int:
        return sum(target.blob.size_bytes + target.index.size_bytes for target in self.targets)


def is_name(text: str) -> bool:
    """Whether `text` may name a snapshot. 64 hex digits are a key, not a name."""
    return bool(_NAME.fullmatch(text)) and not _HEX.fullmatch(text)


def text_of(path: bytes) -> str:
    """A path in JSON: bytes that are not UTF-8 become surrogates and come back unchanged."""
    return path.decode("utf-8", "surrogateescape")


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON; the same manifest always gives the same bytes."""
    document = {
        "format": FORMAT,
        "version": VERSION,
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
                "file_count": target.file_count,
                "content_bytes": target.content_bytes,
                "deletions": [text_of(path) for path in target.deletions],
            }
            for target in manifest.targets
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=True).encode("ascii") + b"\n"


def decode(data: bytes, expected: str | None = None) -> Manifest:
    """The manifest in `data`, checked; `expected` is the key it was stored under.

    Raises: CorruptError, also where it is another snapshot's; UnknownFormatError for a version
    that this release does not know.
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise CorruptError(f"a snapshot manifest of {len(data)} bytes is too large")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"a snapshot manifest is not valid JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptError("this is not a snapshot manifest")
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise UnknownFormatError(
            f"snapshot manifest version {str(version)[:20]} is not known to this release "
            f"(it reads {VERSION}); use a newer Bootseer"
        )
    key = _text(document, "fingerprint", _HEX)
    parts = _parts(document)
    # The identity it claims: a manifest stored under another key, or edited, is refused by name.
    if not _is_key_of(key, parts) or (expected is not None and key != expected):
        raise CorruptError(f"snapshot manifest {expected or key} does not match its fingerprint")
    targets = document.get("targets")
    if not isinstance(targets, list) or not 0 < len(targets) <= TARGETS_MAX:
        raise CorruptError("a snapshot manifest has no usable list of targets")
    name = _text(document, "name")
    if name and not is_name(name):
        raise CorruptError("a snapshot manifest has an unusable name")
    decoded = tuple(_target(target) for target in targets)
    if len({target.path for target in decoded}) != len(decoded):
        raise CorruptError("a snapshot manifest names one target twice")
    return Manifest(
        fingerprint=key,
        parts=parts,
        targets=decoded,
        created_ns=_number(document, "created_ns", 1 << 63),
        setup_ns=_number(document, "setup_ns", 1 << 63),
        node=_text(document, "node"),
        name=name,
        version=_text(document, "bootseer"),
    )


def _is_key_of(key: str, parts: Sequence[Part]) -> bool:
    try:
        return fingerprint(parts) == key
    except UnicodeEncodeError:
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
    value = table.get(key)
    if not isinstance(value, dict):
        raise CorruptError(f"a snapshot manifest has no usable {key!r}")
    return Stored(_text(value, "digest", _DIGEST), _number(value, "size_bytes", limit))


def _target(table: Any) -> Target:
    if not isinstance(table, dict):
        raise CorruptError("a snapshot manifest has a malformed target")
    whole = table.get("whole")
    if not isinstance(whole, bool):
        raise CorruptError("a snapshot manifest does not say whether a target is whole")
    deletions = table.get("deletions")
    if not isinstance(deletions, list) or len(deletions) > DELETIONS_MAX:
        raise CorruptError("a snapshot manifest has no usable list of deletions")
    return Target(
        path=checked_target(_bytes(_text(table, "path"))),
        whole=whole,
        blob=_stored(table, "blob", SIZE_BYTES_MAX),
        index=_stored(table, "index", INDEX_BYTES_MAX),
        deletions=tuple(_relative(path) for path in deletions),
        file_count=_number(table, "file_count", SIZE_BYTES_MAX),
        content_bytes=_number(table, "content_bytes", SIZE_BYTES_MAX),
    )


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise CorruptError("a snapshot manifest has a malformed path") from None


def is_plain(components: Sequence[bytes]) -> bool:
    """Whether path components lead only downwards."""
    return all(
        component and component not in (b".", b"..") and b"\0" not in component
        for component in components
    )


def _relative(text: Any) -> bytes:
    if not isinstance(text, str) or len(text) > PATH_BYTES_MAX:
        raise CorruptError("a snapshot manifest has a malformed deletion")
    path = _bytes(text)
    if not is_plain(path.split(b"/")):
        raise CorruptError(f"a snapshot wants to delete {text[:200]!r}, outside its target")
    return path


def checked_target(path: bytes) -> bytes:
    """`path`, if it can be a target. Raises: CorruptError."""
    if not path.startswith(b"/") or not is_plain(path[1:].split(b"/")):
        raise CorruptError(f"{text_of(path)[:200]!r} is not an absolute, plain target path")
    return path


def target_path(text: str, directory: str) -> bytes:
    """A target that a user wrote, as an absolute plain path; relative ones from `directory`.

    ".." is taken away by name, as shells' `cd` does. Raises: InvalidInputError.
    """
    import posixpath

    path = posixpath.normpath(posixpath.join(directory, text)).encode("utf-8", "surrogateescape")
    # POSIX lets a path begin with exactly two slashes and normpath keeps them.
    path = b"/" + path.lstrip(b"/")
    if path == b"/":
        raise InvalidInputError("the whole root cannot be a target; name directories inside it")
    try:
        return checked_target(path)
    except CorruptError as error:
        raise InvalidInputError(str(error)) from None
