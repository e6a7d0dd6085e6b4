"""Manifest of a snapshot: its parts, its targets, and the JSON in the store.

Format: docs/format/snapshot.md. What a store returns is hostile until `decode` has returned. Pure.
"""

import os
import re
from collections import Counter
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from bootseer.base.documents import BlobDigest, Count64, DocumentFormat, PathBytes
from bootseer.errors import CorruptError
from bootseer.snapshots.key_parts import Part, fingerprint
from bootseer.snapshots.scan import checked_target, is_plain, text_of
from bootseer.transfer.even_chunks import ChunkDigests

EARLIER_MAX = 7
"""A target has at most so many earlier blobs, and its own: a restore is a stream from each."""

OUTSIDE_PATHS_MAX = 100
"""A manifest names at most so many changes outside of its targets: for people, who read a few."""

CACHE = "cache"
"""The part by which a snapshot is a generation of a kept cache: what the cache is called."""

_FOLDERS_SHOWN_MAX = 5
_HEX = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Bounds that no honest manifest comes near; deletions of a whole conda environment take 10 MB.
Key = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Text = Annotated[str, Meta(max_length=2**20)]
_Size = Annotated[int, Meta(ge=0, lt=2**50)]


class Stored(Struct, frozen=True):
    """An object of the store, named by its digest."""

    digest: BlobDigest
    size_bytes: _Size

    @property
    def hex(self) -> str:
        """The digest's 64 hex digits."""
        return self.digest.removeprefix("sha256:")


class StoredIndex(Stored, frozen=True, omit_defaults=True):
    """Encoded tree of a target in the store."""

    chunks: ChunkDigests = ()
    """Digests of its chunks, which nodes pass on to each other."""


class Target(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Directory that the set-up made or changed."""

    path: PathBytes
    """Absolute, as the job sees it (inside its root)."""
    whole: bool
    """There was nothing before: the blob holds all of it. Else it holds the difference."""
    blob: Stored
    index: StoredIndex
    """The blob's tree."""
    earlier: Annotated[tuple[Stored, ...], Meta(max_length=EARLIER_MAX)] = ()
    """Blobs of earlier snapshots that hold content which the tree has as well: what `blob` has not.
    The tree names them by number, behind its own."""
    file_count: _Size
    """Names in the blob, directories included."""
    content_bytes: _Size
    """Sum of the sizes of its regular files."""
    deletions: Annotated[tuple[PathBytes, ...], Meta(max_length=4_000_000)]
    """Relative paths that the set-up removed, sorted."""

    @property
    def blobs(self) -> tuple[Stored, ...]:
        """The blobs that the tree is read from, in the order of its blob table."""
        return (self.blob, *self.earlier)


class Outside(Struct, frozen=True, kw_only=True):
    """Changes outside the targets during a set-up, as far as a look at the usual places told."""

    paths: Annotated[tuple[_Text, ...], Meta(max_length=OUTSIDE_PATHS_MAX)] = ()
    """Changed names, sorted."""
    path_count: _Size = 0
    """How many changes there were; the stored list holds only the first names."""
    is_complete: bool = True
    """Whether all of the places were looked at."""

    def sentence(self) -> str:
        """Returns a sentence for people; empty where nothing was found."""
        if not self.paths:
            return ""
        return (
            f"changed during the set-up, but outside its targets and so not stored: "
            f"{self._folders()}; if the job needs that, name those folders with --target"
        )

    def restored_sentence(self, node: str) -> str:
        """For people where the snapshot is restored, which `node` made; empty as `sentence`."""
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
    """Snapshot, as the store has it."""

    fingerprint: Key
    """Its key: 64 hex digits."""
    name: Annotated[str, Meta(max_length=128)]
    """Given by the user, or empty."""
    created_ns: Count64
    setup_ns: Count64
    """How long the set-up command took: what a restore saves."""
    node: _Text
    version: _Text = field(name="bootseer")
    """The version of Bootseer that made the snapshot."""
    parts: Annotated[tuple[Part, ...], Meta(max_length=100_000)]
    """What the key was computed from, sorted."""
    targets: Annotated[tuple[Target, ...], Meta(min_length=1, max_length=1000)]
    outside: Outside = NOTHING_OUTSIDE
    """What the set-up changed that is not in it."""

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
        """Returns the size with the earlier blobs that it takes content from, each in full."""
        needed = {blob.digest: blob.size_bytes for one in self.targets for blob in one.blobs}
        return sum(needed.values()) + sum(target.index.size_bytes for target in self.targets)

    @property
    def cache(self) -> str:
        """Name of the kept cache that this is a generation of; "" for an environment."""
        return next((part.value for part in self.parts if part.name == CACHE), "")

    @property
    def is_layered(self) -> bool:
        """Whether it takes content from earlier snapshots' blobs."""
        return any(target.earlier for target in self.targets)


def is_name(text: str) -> bool:
    """Whether `text` may name a snapshot. 64 hex digits are a key, not a name."""
    return bool(_NAME.fullmatch(text)) and not _HEX.fullmatch(text)


LAYERED_VERSION = 2
"""The version of a manifest with a target that takes content from earlier blobs. A release that
does not know them must not read it, since its garbage collector would delete them."""

MANIFEST_BYTES_MAX = 128 * 1024 * 1024
INDEX_BYTES_MAX = 4 << 30
FORM: DocumentFormat[Manifest] = DocumentFormat(
    type=Manifest,
    kind="bootseer-snapshot",
    kind_member="format",
    versions=(1, LAYERED_VERSION),
    size_max=MANIFEST_BYTES_MAX,
    checksum_member="digest",
    indent=1,
)


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON; the same manifest always gives the same bytes."""
    outside = manifest.outside if manifest.outside.paths else NOTHING_OUTSIDE
    stored = replace(manifest, outside=outside)
    return FORM.encode(stored, LAYERED_VERSION if manifest.is_layered else None)


def decode(data: bytes, expected: str | None = None) -> Manifest:
    """The manifest in `data`, checked; `expected` is the key it was stored under.

    Raises: CorruptError, also where it is another snapshot's; UnknownFormatError for a version
    that this release does not know.
    """
    where = f"the snapshot manifest {expected}" if expected else "a snapshot manifest"
    document = FORM.parse(data, where)
    manifest = FORM.convert(document, where)
    if "digest" not in document:
        raise CorruptError(f"{where} has no digest of its other members")
    # The identity it claims: a manifest stored under another key, or edited, is refused by name.
    if not _has_its_key(manifest) or expected not in (None, manifest.fingerprint):
        raise CorruptError(f"{where} does not match its fingerprint")
    if manifest.name and not is_name(manifest.name):
        raise CorruptError(f"{where} has an unusable name")
    if manifest.is_layered and document["version"] != LAYERED_VERSION:
        raise CorruptError(f"{where} names earlier blobs, which its version has not")
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
    if len({blob.digest for blob in target.blobs}) != len(target.blobs):
        raise CorruptError(f"{where} names one blob of a target twice")
    for path in target.deletions:
        if not is_plain(path.split(b"/")):
            raise CorruptError(
                f"{where} wants to delete {text_of(path)[:200]!r}, outside its target"
            )
