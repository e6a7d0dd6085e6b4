"""Manifest of a snapshot: its parts, its targets, and the JSON in the store.

Format: docs/format/snapshot.md. Bytes from a store are untrusted; `decode` checks them. Pure.
"""

import os
import re
from collections import Counter
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from bootseer.base.documents import BlobDigest, Count64, DocumentFormat, PathBytes
from bootseer.errors import CorruptError
from bootseer.settings import values
from bootseer.snapshots.key_parts import Part, fingerprint
from bootseer.snapshots.scan import checked_target, is_plain, text_of
from bootseer.transfer.ranges import ChunkDigests

EARLIER_MAX = 7
"""Maximum number of earlier blobs of a target: a restore reads a stream of each."""

OUTSIDE_PATHS_MAX = 100
"""Maximum number of names in `Outside.paths`, which only people read."""

CACHE = "cache"
"""Name of the part with the name of a kept cache; only generations of kept caches have it."""

_FOLDERS_SHOWN_MAX = 5
_HEX = re.compile(r"[0-9a-f]{64}")
# Bounds far above real manifests; the deletions of a whole conda environment take 10 MB.
Key = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Text = Annotated[str, Meta(max_length=2**20)]
_Size = Annotated[int, Meta(ge=0, lt=2**50)]


class Stored(Struct, frozen=True):
    """Object of the store, named by its digest."""

    digest: BlobDigest
    size_bytes: _Size

    @property
    def hex(self) -> str:
        """Digest as 64 hex digits."""
        return self.digest.removeprefix("sha256:")


class StoredIndex(Stored, frozen=True, omit_defaults=True):
    """Encoded tree of a target in the store."""

    chunks: ChunkDigests = ()
    """Digests of its chunks, which nodes pass on to each other."""


class Target(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Directory that the set-up made or changed."""

    path: PathBytes
    """Absolute path inside the job's root."""
    whole: bool
    """Whether the directory was missing or empty before, so that the blob holds all of it; else the
    blob holds the difference."""
    blob: Stored
    index: StoredIndex
    """Tree of the blob."""
    earlier: Annotated[tuple[Stored, ...], Meta(max_length=EARLIER_MAX)] = ()
    """Blobs of earlier snapshots with content that the tree refers to and `blob` lacks. They follow
    `blob` in the tree's blob table."""
    file_count: _Size
    """Number of names, directories included."""
    content_bytes: _Size
    """Sum of the sizes of the regular files."""
    deletions: Annotated[tuple[PathBytes, ...], Meta(max_length=4_000_000)]
    """Relative paths that the set-up removed, sorted."""

    @property
    def blobs(self) -> tuple[Stored, ...]:
        """Blobs that the tree refers to, in the order of its blob table."""
        return (self.blob, *self.earlier)


class Outside(Struct, frozen=True, kw_only=True):
    """Changes outside the targets during a set-up, from a bounded search of the usual places."""

    paths: Annotated[tuple[_Text, ...], Meta(max_length=OUTSIDE_PATHS_MAX)] = ()
    """Changed names, sorted."""
    path_count: _Size = 0
    """Number of changes; the stored `paths` may be fewer."""
    is_complete: bool = True
    """Whether the search reached all of the places."""

    def sentence(self) -> str:
        """Return a sentence for people after the set-up, or "" without changes."""
        if not self.paths:
            return ""
        return (
            f"changed during the set-up, but outside its targets and so not stored: "
            f"{self._folders()}; if the job needs that, name those folders with --target"
        )

    def restored_sentence(self, node: str) -> str:
        """Return a sentence for people after a restore of `node`'s snapshot, or ""."""
        if not self.paths:
            return ""
        count = max(self.path_count, len(self.paths))
        return (
            f"{count} {'name' if count == 1 else 'names'} outside the targets changed on {node} "
            f"during the set-up and {'is' if count == 1 else 'are'} not in its snapshot: "
            f"{self._folders()}; if the job needs that, name those folders with --target"
        )

    def _folders(self) -> str:
        folders = Counter(os.path.dirname(path) for path in self.paths)
        shown = [
            f"{folder}/ ({count} names)"
            if count > 1
            else next(path for path in self.paths if os.path.dirname(path) == folder)
            for folder, count in folders.most_common(_FOLDERS_SHOWN_MAX)
        ]
        more = len(folders) - len(shown)
        return f"{', '.join(shown)}{f' and {more} more folders' if more else ''}"


NOTHING_OUTSIDE = Outside()


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Stored description of a snapshot."""

    fingerprint: Key
    """Key of the snapshot: 64 hex digits."""
    name: Annotated[str, Meta(max_length=128)]
    """Name that the user gave; may be empty."""
    created_ns: Count64
    setup_ns: Count64
    """Duration of the set-up command, which a restore saves."""
    node: _Text
    version: _Text = field(name="bootseer")
    """The version of Bootseer that made the snapshot."""
    parts: Annotated[tuple[Part, ...], Meta(max_length=100_000)]
    """Parts of the key, sorted."""
    targets: Annotated[tuple[Target, ...], Meta(min_length=1, max_length=1000)]
    outside: Outside = NOTHING_OUTSIDE
    """Changes of the set-up that are not in the snapshot."""

    @property
    def file_count(self) -> int:
        return sum(target.file_count for target in self.targets)

    @property
    def content_bytes(self) -> int:
        return sum(target.content_bytes for target in self.targets)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the objects that this snapshot added to the store."""
        return sum(target.blob.size_bytes + target.index.size_bytes for target in self.targets)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all objects that the snapshot needs, earlier blobs included."""
        needed = {blob.digest: blob.size_bytes for one in self.targets for blob in one.blobs}
        return sum(needed.values()) + sum(target.index.size_bytes for target in self.targets)

    @property
    def cache(self) -> str:
        """Name of the kept cache, if the snapshot is a generation of one; "" for an environment."""
        return next((part.value for part in self.parts if part.name == CACHE), "")

    @property
    def is_layered(self) -> bool:
        """Whether the snapshot refers to blobs of earlier snapshots."""
        return any(target.earlier for target in self.targets)


def is_name(text: str) -> bool:
    """Return whether `text` may be the name of a snapshot. 64 hex digits are a key, not a name."""
    return values.is_name(text) and not _HEX.fullmatch(text)


MANIFEST_BYTES_MAX = 128 * 1024 * 1024
INDEX_BYTES_MAX = 4 << 30
FORM: DocumentFormat[Manifest] = DocumentFormat(
    type=Manifest,
    kind="bootseer-snapshot",
    kind_member="format",
    version=1,
    size_max=MANIFEST_BYTES_MAX,
    checksum_member="digest",
    indent=1,
)


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON. Deterministic."""
    outside = manifest.outside if manifest.outside.paths else NOTHING_OUTSIDE
    stored = replace(manifest, outside=outside)
    return FORM.encode(stored)


def decode(data: bytes, expected: str | None = None) -> Manifest:
    """Return the manifest in `data`, checked; `expected` is the key under which it was stored.

    Raises: CorruptError, also for the manifest of another snapshot; UnknownFormatError for a
    version that this release does not know.
    """
    where = f"the snapshot manifest {expected}" if expected else "a snapshot manifest"
    document = FORM.parse(data, where)
    manifest = FORM.convert(document, where)
    if "digest" not in document:
        raise CorruptError(f"{where} has no digest of its other members")
    # A manifest that was edited, or stored under another key, does not match its fingerprint.
    if not _has_its_key(manifest) or expected not in (None, manifest.fingerprint):
        raise CorruptError(f"{where} does not match its fingerprint")
    if manifest.name and not is_name(manifest.name):
        raise CorruptError(f"{where} has an unusable name")
    for target in manifest.targets:
        _check_target(target, where)
    if len({target.path for target in manifest.targets}) != len(manifest.targets):
        raise CorruptError(f"{where} names one target twice")
    parts = tuple(sorted(manifest.parts))
    return replace(manifest, parts=parts)


def _has_its_key(manifest: Manifest) -> bool:
    try:
        return fingerprint(manifest.parts) == manifest.fingerprint
    except UnicodeEncodeError:
        return False


def _check_target(target: Target, where: str) -> None:
    checked_target(target.path)
    # The other algorithms of `BlobDigest` name objects that are no blobs, such as seek points.
    algorithms = {blob.digest.partition(":")[0] for blob in target.blobs}
    if not algorithms <= {"sha256", "blake3"} or not target.index.digest.startswith("sha256:"):
        raise CorruptError(f"{where} names a blob or an index by another kind of digest")
    if len({blob.digest for blob in target.blobs}) != len(target.blobs):
        raise CorruptError(f"{where} names one blob of a target twice")
    for path in target.deletions:
        if not is_plain(path.split(b"/")):
            raise CorruptError(
                f"{where} wants to delete {text_of(path)[:200]!r}, outside its target"
            )
