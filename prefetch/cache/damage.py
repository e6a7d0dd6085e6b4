"""Notes of damage in the store, in the node's cache.

A note is a file below `cache_dir/damaged`, named by the digest of an index: ranges of the tree's
blobs that a server found not to match their digests (docs/format/cache.md). A note is a hint: its
reader reads the ranges again. Thread-safe; several processes at once.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta, Struct

from bootseer.base.documents import Count, DocumentFormat
from bootseer.errors import CorruptError
from bootseer.linux.private_files import read_private_file, write_private_file

if TYPE_CHECKING:
    from bootseer.store import Store
    from bootseer.transfer.ranges import Chunk

DAMAGED = "damaged"
"""Name of the folder of all damage notes, below `cache_dir`."""
# One damaged range is enough to know that a blob is damaged.
_CHUNKS_MAX = 64


class _Range(NamedTuple):
    key: str
    offset: Count
    length: Count
    digest: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{2})*\Z")]


class _Note(Struct, frozen=True):
    ranges: tuple[_Range, ...]


_FORM: DocumentFormat[_Note] = DocumentFormat(type=_Note, version=1, size_max=64 * 1024)


def note_damage(cache_dir: Path, index_digest: str, chunks: Sequence["Chunk"]) -> None:
    """Note chunks of a tree's blobs that may be damaged. Never raises."""
    ranges = tuple(
        _Range(chunk.key, chunk.offset, chunk.length, chunk.digest.hex())
        for chunk in chunks[:_CHUNKS_MAX]
        if chunk.digest is not None
    )
    with contextlib.suppress(OSError):
        write_private_file(_note_path(cache_dir, index_digest), _FORM.encode(_Note(ranges)))


def is_damage_known(cache_dir: Path, index_digest: str) -> bool:
    """Return whether there is a damage note for a tree."""
    return _note_path(cache_dir, index_digest).exists()


def check_known_damage(cache_dir: Path, store: "Store", index_digest: str) -> None:
    """Read the ranges of a tree's damage note again. Remove the note if all of them are intact.

    Raises: CorruptError if a range is still damaged; NotFoundError if its blob is gone;
    UnavailableError, DeadlineError.
    """
    path = _note_path(cache_dir, index_digest)
    # `cache.limit` removes the note by the time of its last use.
    with contextlib.suppress(OSError):
        os.utime(path)
    note = read_private_file(path, _FORM)
    if note is not None:
        _check_ranges(store, note)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _check_ranges(store: "Store", note: _Note) -> None:
    from bootseer.base.content_digest import content_digest  # here: hardly a start has a note

    for key, offset, length, digest in note.ranges:
        if content_digest(store.read(key, offset, length)).hex() != digest:
            raise CorruptError(
                f"{key} in {store.url} is damaged: its bytes from {offset} to {offset + length} do "
                "not match their digest, as an earlier start on this node has found"
            )


def _note_path(cache_dir: Path, index_digest: str) -> Path:
    return cache_dir / DAMAGED / f"{index_digest.partition(':')[2]}.json"
