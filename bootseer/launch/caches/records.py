"""Records of the caches on this node: how often each was found, and when it was last used.

Only this module writes to `cache_dir/kept`: `records/KEY.json`, and `folders/HASH/NAME`, the
folders that Bootseer names. The cached content is in the store, so the folder may be removed at any
time. Edge, any thread.
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
"""Age at which an unused folder that Bootseer names is removed from the node."""
MISS, IN_PLACE, RESTORED = "miss", "in place", "extracted"
_Text = Annotated[str, Meta(max_length=4096)]


class RestoreResult(Struct, frozen=True):
    """Outcome of restoring one cache."""

    how: str
    """MISS, IN_PLACE or RESTORED."""
    reason: str = ""
    moved_bytes: int = 0
    file_count: int = 0
    index: str = ""
    """Digest of the index of the generation that the folder now has."""


class CacheRecord(Struct, frozen=True, kw_only=True):
    """This node's record of the cache with one key."""

    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    name: _Text
    folder: _Text
    index: _Text = ""
    """Digest of the index of the generation that the folder has."""
    hits: Count = 0
    """Number of starts that found the cache in the store, or in place."""
    misses: Count = 0
    used_ns: Count64 = 0
    last: _Text = ""
    """Outcome of the last use, for people."""
    new_files: Count = 0
    """Number of files that starts on this node have made and published."""
    restored_files: Count = 0


_FORM: DocumentFormat[CacheRecord] = DocumentFormat(type=CacheRecord, size_max=1 << 16)


def kept_dir(cache_dir: Path) -> Path:
    """Return the folder of all records and of the folders that Bootseer names."""
    return cache_dir / "kept"


def own_folder(cache_dir: Path, digest: str, name: str) -> Path:
    """Return the folder that Bootseer names for a cache."""
    return kept_dir(cache_dir) / "folders" / digest[:16] / name


def _path(cache_dir: Path, key: str) -> Path:
    return kept_dir(cache_dir) / "records" / f"{key}.json"


def read_record(cache_dir: Path, key: str) -> CacheRecord | None:
    """Return the record of a cache; None if there is none."""
    return read_private_file(_path(cache_dir, key), _FORM)


def records(cache_dir: Path) -> Iterator[CacheRecord]:
    """Yield all records of this node."""
    for path in sorted((kept_dir(cache_dir) / "records").glob("*.json")):
        if (record := read_private_file(path, _FORM)) is not None:
            yield record


def note(cache_dir: Path, record: CacheRecord) -> None:
    """Save the record, with the current time as its last use. Never raises."""
    with contextlib.suppress(OSError):
        data = to_line(replace(record, used_ns=time.time_ns())).encode("ascii")
        write_private_file(_path(cache_dir, record.key), data)


def note_user(cache_dir: Path, folder: Path, pid: int) -> None:
    """Record that a process uses a folder that Bootseer names. Never raises."""
    with contextlib.suppress(OSError):
        note_process(kept_dir(cache_dir) / "users" / folder.parent.name, pid)


def forget_unused(cache_dir: Path) -> int:
    """Remove folders, and their records, that were not used for a month. Return their number.

    A folder that a living process uses stays. Never raises.
    """
    top = kept_dir(cache_dir)
    limit_ns = time.time_ns() - UNUSED_S * 10**9
    by_folder: dict[str, list[CacheRecord]] = {}
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
