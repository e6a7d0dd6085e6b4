"""Indexes of trees in the node's cache.

An index is a file below `cache_dir/indexes`, named by its digest. If the cache's disk takes no more
it is written below `run_dir`, which mostly is memory, for as long as a start needs it: a full disk
ends no start. Each use renews the file's time, by which `cache.limit` removes old files.
Thread-safe; several processes at once.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.blob.index import decode
from bootseer.blob.index import digest as digest_of
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, CorruptError, NotFoundError, from_oserror
from bootseer.linux.disk_usage import UNWRITABLE
from bootseer.linux.private_files import write_private_file

_log = logging.getLogger(__name__)

INDEXES = "indexes"
"""Name of the folder of all indexes, below `cache_dir`."""
_SPARE_S = 3600.0
"""Life of an index below `run_dir`: a server reads it within seconds, a publisher in minutes."""


def index_path(cache_dir: Path, digest: str) -> Path:
    """Return the path of the index with `digest`."""
    return cache_dir / INDEXES / digest.partition(":")[2]


def keep_index(cache_dir: Path, digest: str, data: bytes, *, run_dir: Path | None = None) -> None:
    """Write the index `data`, which has `digest`, into the cache.

    With `run_dir` it is written there for a while if the cache's disk takes no more.
    Raises: NoSpaceError, NotFoundError if the cache folder cannot be made, BootseerError.
    """
    path = index_path(cache_dir, digest)
    try:
        try:
            write_private_file(path, data)
        except OSError as error:
            if run_dir is None or error.errno not in UNWRITABLE:
                raise
            _log.warning(
                "cannot write %s: %s; this start keeps the index in memory", path, error.strerror
            )
            path = index_path(run_dir, digest)
            write_private_file(path, data)
    except OSError as error:
        raise from_oserror(error, f"keep an index in {path}") from error


def remove_spare_indexes(run_dir: Path) -> None:
    """Remove the indexes below `run_dir` that no start needs any more. Never raises."""
    oldest_s = time.time() - _SPARE_S
    with contextlib.suppress(OSError):
        for path in (run_dir / INDEXES).iterdir():
            with contextlib.suppress(OSError):
                if path.stat(follow_symlinks=False).st_mtime < oldest_s:
                    path.unlink()


def recheck_indexes(cache_dir: Path) -> int:
    """Remove indexes that do not match their digests. Return their size in bytes. Never raises."""
    damaged_bytes = 0
    with contextlib.suppress(OSError):
        for path in (cache_dir / INDEXES).iterdir():
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                if digest_of(data).partition(":")[2] != path.name:
                    path.unlink()
                    damaged_bytes += len(data)
    return damaged_bytes


def read_index(cache_dir: Path, digest: str, *, run_dir: Path | None = None) -> bytes:
    """Return the index with `digest`. Raises: NotFoundError, CorruptError, BootseerError."""
    path, data = _find(cache_dir, digest, run_dir)
    _check(path, digest, data)
    return data


def read_or_fetch_index(
    cache_dir: Path, digest: str, fetch: Callable[[], bytes], *, run_dir: Path | None = None
) -> tuple[bytes, bool]:
    """Return an index and whether it was fetched. It is read from the cache, else fetched and kept.

    `fetch` returns the index, whose digest it has verified. Raises: as `fetch` and `keep_index`.
    """
    with contextlib.suppress(BootseerError):
        # A damaged copy is fetched again.
        return read_index(cache_dir, digest, run_dir=run_dir), False
    data = fetch()
    keep_index(cache_dir, digest, data, run_dir=run_dir)
    return data, True


def read_kept_tree(
    cache_dir: Path, digest: str, *, run_dir: Path | None = None, checks: bool = True
) -> Tree:
    """Return the tree whose index has `digest`. `checks`: see `ServeOptions.checks_index`.

    Raises: NotFoundError, CorruptError, UnknownFormatError, BootseerError.
    """
    path, data = _find(cache_dir, digest, run_dir)
    if checks:
        _check(path, digest, data)
    return decode(data, is_verified=True, checks_names=checks)


def _find(cache_dir: Path, digest: str, run_dir: Path | None) -> tuple[Path, bytes]:
    path = index_path(cache_dir, digest)
    try:
        return path, _read(path)
    except NotFoundError:
        if run_dir is None:
            raise
        spare = index_path(run_dir, digest)
        with contextlib.suppress(NotFoundError):
            return spare, _read(spare)
        raise


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        # A read-only disk keeps the old time.
        with contextlib.suppress(OSError):
            os.utime(path)
    except OSError as error:
        raise from_oserror(error, f"read the index {path}") from error
    return data


def _check(path: Path, digest: str, data: bytes) -> None:
    if digest_of(data) != digest:
        raise CorruptError(f"{path} does not match the digest in its name; remove it")
