"""Notes of damage in the store that a node has found while it served a tree, for the next start.

Alone owns `cache_dir/damaged`: a file for each index digest, with the ranges of blobs that did not
match their digests (docs/format/cache.md). A note is a hint: who finds one reads its ranges again.
Any thread, several processes at once.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta, Struct

from bootseer.base.content_digest import content_digest
from bootseer.base.documents import Count, Form
from bootseer.errors import CorruptError
from bootseer.linux.private_files import read_private_file, write_private_file
from bootseer.store import Store

if TYPE_CHECKING:
    from bootseer.transfer.ranges import Chunk

_FOLDER = "damaged"
_KEPT_S = 30 * 86400.0
"""As long as the node keeps the index of a tree that nobody mounts: a later mount finds the damage
itself."""
# One is enough to know that a blob is damaged.
_CHUNKS_MAX = 64


class _Range(NamedTuple):
    key: str
    offset: Count
    length: Count
    digest: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{2})*\Z")]


class _Note(Struct, frozen=True):
    ranges: tuple[_Range, ...]


_FORM: Form[_Note] = Form(type=_Note, versions=(1,), size_max=64 * 1024)


def note_damage(cache_dir: Path, index_digest: str, chunks: "Sequence[Chunk]") -> None:
    """Note chunks of a tree's blobs, of which one at least came damaged. Never raises."""
    ranges = tuple(
        _Range(chunk.key, chunk.offset, chunk.length, chunk.digest.hex())
        for chunk in chunks[:_CHUNKS_MAX]
        if chunk.digest is not None
    )
    with contextlib.suppress(OSError):
        write_private_file(_path(cache_dir, index_digest), _FORM.encode(_Note(ranges)))


def is_damage_known(cache_dir: Path, index_digest: str) -> bool:
    """Whether a tree's blobs were found damaged, and not found whole since."""
    return _path(cache_dir, index_digest).exists()


def check_known_damage(cache_dir: Path, store: Store, index_digest: str) -> None:
    """Read the ranges of a tree's note again, and remove the note if all are whole by now.

    Raises: CorruptError where it still is damaged; NotFoundError where the blob is gone;
    UnavailableError, DeadlineError.
    """
    path = _path(cache_dir, index_digest)
    # `trim_damage` goes by the last use.
    with contextlib.suppress(OSError):
        os.utime(path)
    note = read_private_file(path, _FORM)
    for key, offset, length, digest in note.ranges if note else ():
        if content_digest(store.read(key, offset, length)).hex() != digest:
            raise CorruptError(
                f"{key} in {store.url} is damaged: its bytes from {offset} to {offset + length} do "
                "not match their digest, as an earlier start on this node has found"
            )
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def trim_damage(cache_dir: Path) -> None:
    """Remove the notes of trees that nobody has mounted for a month. Never raises."""
    oldest_s = time.time() - _KEPT_S
    with contextlib.suppress(OSError), os.scandir(cache_dir / _FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < oldest_s:
                    os.unlink(entry.path)


def _path(cache_dir: Path, index_digest: str) -> Path:
    return cache_dir / _FOLDER / f"{index_digest.partition(':')[2]}.json"
