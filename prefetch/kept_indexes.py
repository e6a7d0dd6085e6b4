"""The indexes of trees that a node keeps in its cache, each in a file named by its digest.

Alone owns where they lie, and that a use renews a file's time: `NodeCatalogue.trim` removes those
that nobody used for a month. Any thread, several processes at once.
"""

import os
from pathlib import Path

from bootseer.blob.index import decode
from bootseer.blob.index import digest as digest_of
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError, from_oserror
from bootseer.private import write_private_file


def index_folder(cache_dir: Path) -> Path:
    """Where they all lie."""
    return cache_dir / "indexes"


def index_path(cache_dir: Path, digest: str) -> Path:
    """Where the index lies that has `digest`."""
    return index_folder(cache_dir) / digest.partition(":")[2]


def keep_index(cache_dir: Path, digest: str, data: bytes) -> None:
    """Leave an index, which has `digest`, where whoever serves or reads its tree looks for it.

    Raises: NoSpaceError, NotFoundError where the cache cannot be made, BootseerError.
    """
    path = index_path(cache_dir, digest)
    try:
        write_private_file(path, data)
    except OSError as error:
        raise from_oserror(error, f"keep an index in {path}") from error


def read_index(cache_dir: Path, digest: str) -> bytes:
    """The index that has `digest`. Raises: NotFoundError, CorruptError, BootseerError."""
    path = index_path(cache_dir, digest)
    data = _read(path)
    _check(path, digest, data)
    return data


def read_kept_tree(cache_dir: Path, digest: str, *, checks: bool = True) -> Tree:
    """The tree whose index has `digest`. `checks`: see `ServeOptions.checks_index`.

    Raises: NotFoundError, CorruptError, UnknownFormatError, BootseerError.
    """
    path = index_path(cache_dir, digest)
    data = _read(path)
    if checks:
        _check(path, digest, data)
    return decode(data, is_verified=True, checks_names=checks)


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        os.utime(path)
    except OSError as error:
        raise from_oserror(error, f"read the index {path}") from error
    return data


def _check(path: Path, digest: str, data: bytes) -> None:
    if digest_of(data) != digest:
        raise CorruptError(f"{path} does not match the digest in its name; remove it")
