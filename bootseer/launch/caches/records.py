"""What this node knows of its caches: when each was used, and whether the store had it.

Alone owns `cache_dir/kept`: `records/KEY.json`, and `folders/HASH/NAME`, the caches that we name.
The store's content is elsewhere; all of this may be removed at any time. Edge, any thread.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from bootseer.base.documents import Count, Count64, DocumentFormat, to_line
from bootseer.linux.private_files import read_private_file, write_private_file
from bootseer.linux.processes import living_processes, note_process
from bootseer.linux.removal import remove_tree

UNUSED_S = 30 * 86_400
"""A folder of ours that nobody used for so long is removed from the node."""
MISS, IN_PLACE, RESTORED = "miss", "in place", "extracted"
_Text = Annotated[str, Meta(max_length=4096)]


class Restored(Struct, frozen=True):
    """What became of one cache."""

    how: str
    """MISS, IN_PLACE or RESTORED."""
    reason: str = ""
    moved_bytes: int = 0
    file_count: int = 0
    index: str = ""
    """The digest of the tree that the folder has now."""


class Record(Struct, frozen=True, kw_only=True):
    """One cache, by its key, on this node."""

    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    name: _Text
    folder: _Text
    index: _Text = ""
    """The digest of the tree of the generation that the folder has."""
    hits: Count = 0
    """Starts that found it in the store, or in place."""
    misses: Count = 0
    used_ns: Count64 = 0
    last: _Text = ""
    """What came of it the last time, for people."""
    new_files: Count = 0
    """What the last start had to make anew."""
    restored_files: Count = 0


_FORM: DocumentFormat[Record] = DocumentFormat(type=Record, size_max=1 << 16)


def kept_dir(cache_dir: Path) -> Path:
    """The folder of all of this."""
    return cache_dir / "kept"


def own_folder(cache_dir: Path, digest: str, name: str) -> Path:
    """Where a cache lies that nobody else has named."""
    return kept_dir(cache_dir) / "folders" / digest[:16] / name


def _path(cache_dir: Path, key: str) -> Path:
    return kept_dir(cache_dir) / "records" / f"{key}.json"


def read_record(cache_dir: Path, key: str) -> Record | None:
    """What is known of a cache; None: nothing."""
    return read_private_file(_path(cache_dir, key), _FORM)


def records(cache_dir: Path) -> Iterator[Record]:
    """All that this node knows of."""
    for path in sorted((kept_dir(cache_dir) / "records").glob("*.json")):
        if (record := read_private_file(path, _FORM)) is not None:
            yield record


def note(cache_dir: Path, record: Record) -> None:
    """Save it, as used now. Never raises: it only informs."""
    with contextlib.suppress(OSError):
        data = to_line(replace(record, used_ns=time.time_ns())).encode("ascii")
        write_private_file(_path(cache_dir, record.key), data)


def note_user(cache_dir: Path, folder: Path, pid: int) -> None:
    """A process, and what it becomes, uses a folder of ours. Never raises."""
    with contextlib.suppress(OSError):
        note_process(kept_dir(cache_dir) / "users" / folder.parent.name, pid)


def forget_unused(cache_dir: Path) -> int:
    """Remove folders of ours that nobody used for a month, and what is known of them; returns how
    many. One that a living process was given stays. Never raises."""
    top = kept_dir(cache_dir)
    limit_ns = time.time_ns() - UNUSED_S * 10**9
    by_folder: dict[str, list[Record]] = {}
    for record in records(cache_dir):
        by_folder.setdefault(Path(record.folder).parent.name, []).append(record)
    count = 0
    for name, known in by_folder.items():
        folder, users = top / "folders" / name, top / "users" / name
        if any(one.used_ns > limit_ns for one in known) or any(living_processes(users)):
            continue
        with contextlib.suppress(OSError):
            if folder.is_dir():
                remove_tree(folder)
                count += 1
            if os.path.isdir(users):
                remove_tree(users)
            for one in known:
                _path(cache_dir, one.key).unlink(missing_ok=True)
    return count
