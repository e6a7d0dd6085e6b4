"""What a node has found damaged in the store while it served a tree: for its next start to look at.

Alone owns `cache_dir/damaged`: a file for each index digest, with the ranges of blobs that did not
match their digests (docs/format/cache.md). A note is a hint: who finds one reads its ranges again.
Any thread, several processes at once.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.base.content_digest import content_digest
from bootseer.errors import BootseerError, CorruptError
from bootseer.linux.private_files import write_private_file
from bootseer.store import Store

if TYPE_CHECKING:
    from bootseer.transfer.plan import Chunk

_VERSION = 1
_BYTES_MAX = 64 * 1024
# One is enough to know that a blob is damaged.
_CHUNKS_MAX = 64


def note_damage(cache_dir: Path, index_digest: str, chunks: "Sequence[Chunk]") -> None:
    """Chunks of a tree's blobs, of which one at least came damaged. Never raises."""
    document = {
        "version": _VERSION,
        "ranges": [
            [chunk.key, chunk.offset, chunk.length, chunk.digest.hex()]
            for chunk in chunks[:_CHUNKS_MAX]
            if chunk.digest is not None
        ],
    }
    with contextlib.suppress(OSError):
        write_private_file(_path(cache_dir, index_digest), json.dumps(document).encode("ascii"))


def is_damage_known(cache_dir: Path, index_digest: str) -> bool:
    """Whether a tree's blobs were found damaged, and nobody has found them whole since."""
    return _path(cache_dir, index_digest).exists()


def check_known_damage(cache_dir: Path, store: Store, index_digest: str) -> None:
    """Read again what was found damaged, if anything was, and forget it if it is whole by now.

    Raises: CorruptError where it still is damaged; NotFoundError where the blob is gone;
    UnavailableError, DeadlineError.
    """
    path = _path(cache_dir, index_digest)
    for key, offset, length, digest in _ranges(path):
        if content_digest(store.read(key, offset, length)) != digest:
            raise CorruptError(
                f"{key} in {store.url} is damaged: its bytes from {offset} to {offset + length} do "
                "not match their digest, as an earlier start on this node has found"
            )
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _path(cache_dir: Path, index_digest: str) -> Path:
    return cache_dir / "damaged" / f"{index_digest.partition(':')[2]}.json"


def _ranges(path: Path) -> list[tuple[str, int, int, bytes]]:
    """No ranges where there is no note, or none that can be read."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_BYTES_MAX))
        if document["version"] != _VERSION:
            return []
        return [
            (str(key), int(offset), int(length), bytes.fromhex(digest))
            for key, offset, length, digest in document["ranges"]
        ]
    except (OSError, BootseerError, ValueError, KeyError, TypeError):
        return []
