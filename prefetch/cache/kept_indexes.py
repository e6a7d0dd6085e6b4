"""The indexes of trees that a node keeps in its cache, each in a file named by its digest.

Alone owns where they lie, and that a use renews a file's time: `NodeCatalogue.trim` removes those
that nobody used for a month. Where the cache's disk takes none, one lies in the folder of running
mounts, which mostly is memory, for as long as starts need it: a full disk ends no start. Any
thread, several processes at once.
"""

import contextlib
import logging
import os
import time
from pathlib import Path

from bootseer.blob.index.codec import decode
from bootseer.blob.index.codec import digest as digest_of
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError, NotFoundError, from_oserror
from bootseer.linux.private_files import write_private_file
from bootseer.prefetch.cache.files import NO_DISK

_log = logging.getLogger(__name__)

_SPARE_S = 3600.0
"""A start has its server read the index within seconds, and a publisher within minutes."""


def index_folder(cache_dir: Path) -> Path:
    """Return the folder of all kept indexes."""
    return cache_dir / "indexes"


def index_path(cache_dir: Path, digest: str) -> Path:
    """Return the path of the index with `digest`."""
    return index_folder(cache_dir) / digest.partition(":")[2]


def keep_index(cache_dir: Path, digest: str, data: bytes, *, run_dir: Path | None = None) -> None:
    """Leave an index, which has `digest`, where a server or reader of its tree looks for it: with
    the setting `run_dir` there, for a while, if the cache's disk takes nothing.

    Raises: NoSpaceError, NotFoundError where the cache cannot be made, BootseerError.
    """
    path = index_path(cache_dir, digest)
    try:
        try:
            write_private_file(path, data)
        except OSError as error:
            if run_dir is None or error.errno not in NO_DISK:
                raise
            _log.warning("cannot keep an index in %s: %s; it is held for now", path, error.strerror)
            path = index_path(run_dir, digest)
            write_private_file(path, data)
    except OSError as error:
        raise from_oserror(error, f"keep an index in {path}") from error


def remove_spare_indexes(run_dir: Path) -> None:
    """Remove the indexes that a full disk did not take and that no start needs any more. Never
    raises."""
    oldest_s = time.time() - _SPARE_S
    with contextlib.suppress(OSError):
        for path in index_folder(run_dir).iterdir():
            with contextlib.suppress(OSError):
                if path.stat(follow_symlinks=False).st_mtime < oldest_s:
                    path.unlink()


def recheck_indexes(cache_dir: Path) -> int:
    """Remove indexes that do not match their digests; how many bytes these had. Never raises."""
    damaged_bytes = 0
    with contextlib.suppress(OSError):
        for path in index_folder(cache_dir).iterdir():
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                if digest_of(data).partition(":")[2] != path.name:
                    path.unlink()
                    damaged_bytes += len(data)
    return damaged_bytes


def read_index(cache_dir: Path, digest: str, *, run_dir: Path | None = None) -> bytes:
    """The index that has `digest`. Raises: NotFoundError, CorruptError, BootseerError."""
    path, data = _find(cache_dir, digest, run_dir)
    _check(path, digest, data)
    return data


def read_kept_tree(
    cache_dir: Path, digest: str, *, run_dir: Path | None = None, checks: bool = True
) -> Tree:
    """The tree whose index has `digest`. `checks`: see `ServeOptions.checks_index`.

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
        held = index_path(run_dir, digest)
        with contextlib.suppress(NotFoundError):
            return held, _read(held)
        raise


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        with contextlib.suppress(OSError):
            # Not on a disk that is read-only.
            os.utime(path)
    except OSError as error:
        raise from_oserror(error, f"read the index {path}") from error
    return data


def _check(path: Path, digest: str, data: bytes) -> None:
    if digest_of(data) != digest:
        raise CorruptError(f"{path} does not match the digest in its name; remove it")
