"""Digests of the files and directories that a set-up reads. Edge: reads them, changes nothing."""

import hashlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

from msgspec import Struct

# The limits for files that were not declared: a word of the command may happen to name a data set.
GUESSED_BYTES_MAX = 256 * 1024 * 1024
# Of a word of which nobody knows whether it is read. The key is open then, mostly.
WORD_BYTES_MAX = 16 * 1024 * 1024
_GUESSED_FILES_MAX = 20_000
_GUESSED_NAMES_MAX = 200_000
_READ_BYTES = 1024 * 1024
# A wheel ends with its directory, and that with the checksum of RECORD, which has the digests of
# all files in it; a tar.gz ends with its own. Nobody reads gigabytes of wheels at every start.
_END_BYTES = 16 * 1024
# Of a folder of wheels, so many ends are read, and so many names counted.
WHEELS_READ_MAX = 4096
_WHEELS_NAMED_MAX = 100_000
# On a share each wheel costs a question or three; threads ask them side by side.
_THREADS_MAX = 16
_THREADS_FROM = 64
# In a source tree these change by themselves.
_IGNORED = {".git", "__pycache__", ".venv", ".tox", ".mypy_cache", ".ruff_cache"}
# What installing a project writes into it, beside these files.
_BUILT = {"build", "dist"}
_PROJECT_FILES = {"pyproject.toml", "setup.py", "setup.cfg"}


class InputDigest(Struct, frozen=True):
    """What stands for an input in the key."""

    value: str
    is_rough: bool = False
    """It was too large to be read: of what lies beyond the bounds only names, sizes, ends count."""


def bytes_digest(data: bytes) -> InputDigest:
    """Returns the digest of a file's content that is in memory."""
    return InputDigest("sha256:" + hashlib.sha256(data).hexdigest())


def file_digest(path: Path, *, limit_bytes: int | None = None) -> InputDigest:
    """The digest of a file's content. Of one beyond the limit its size and its end count.

    Raises: OSError.
    """
    size_bytes = path.stat().st_size
    if limit_bytes is not None and size_bytes > limit_bytes:
        found = bytes_digest(b"%d:%b" % (size_bytes, _end(path)))
        return InputDigest(f"end {found.value}", is_rough=True)
    return InputDigest(_content_digest(path))


def _content_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return "sha256:" + digest.hexdigest()


def tree_digest(top: Path, without: Collection[str], *, limited: bool) -> InputDigest:
    """Over names, modes and contents, but for the folders `without`, which the set-up makes.

    `limited`: a guessed directory, which is bounded, and in which what builds of a project leave
    beside its files does not count. Raises: OSError.
    """
    digest = hashlib.sha256()
    file_count = size_bytes = 0
    is_rough = False
    for directory, folders, names in os.walk(top):
        ignored = _IGNORED | _BUILT if limited and _PROJECT_FILES.intersection(names) else _IGNORED
        folders[:] = sorted(
            name
            for name in folders
            if name not in ignored
            and not name.endswith(".egg-info")
            and os.path.join(directory, name) not in without
        )
        for name in sorted(names):
            if name.endswith(".pyc"):
                continue
            path = Path(directory, name)
            info = path.lstat()
            file_count += 1
            size_bytes += info.st_size
            is_rough = is_rough or (
                limited and (file_count > _GUESSED_FILES_MAX or size_bytes > GUESSED_BYTES_MAX)
            )
            if stat.S_ISREG(info.st_mode):
                content = f"size {info.st_size}" if is_rough else _content_digest(path)
            elif stat.S_ISLNK(info.st_mode):
                content = "link " + os.readlink(path)
            else:
                continue
            relative = os.fsencode(path.relative_to(top))
            data = os.fsencode(content)
            mode = info.st_mode & 0o111
            digest.update(b"%d:%b,%d,%d:%b," % (len(relative), relative, mode, len(data), data))
        if limited and file_count > _GUESSED_NAMES_MAX:
            break
    return InputDigest("sha256:" + digest.hexdigest(), is_rough)


def wheels_digest(path: Path) -> InputDigest:
    """The digest of a folder of wheels: names, sizes and ends, which tell a build from another of
    its version. Of a very large folder it is rough. Raises: OSError."""
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries)
    is_rough = len(names) > WHEELS_READ_MAX
    read, named = names[:WHEELS_READ_MAX], names[WHEELS_READ_MAX:_WHEELS_NAMED_MAX]
    folder = str(path)
    if len(names) < _THREADS_FROM:
        lines = [_wheel_line(folder, name) for name in read]
    else:
        from concurrent.futures import ThreadPoolExecutor  # here: hardly anybody has so many

        with ThreadPoolExecutor(_THREADS_MAX) as pool:
            lines = list(pool.map(lambda name: _wheel_line(folder, name), read))
            lines += pool.map(lambda name: _wheel_line(folder, name, has_end=False), named)
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    return InputDigest("sha256:" + digest.hexdigest(), is_rough)


def _wheel_line(folder: str, name: str, *, has_end: bool = True) -> bytes:
    """What counts of one file in a folder of wheels. Raises: OSError."""
    path = Path(folder, name)
    try:
        status = path.stat()
    except FileNotFoundError:
        return b""  # a link to nothing
    if not stat.S_ISREG(status.st_mode):
        return b""
    line = os.fsencode(name)
    end = _end(path) if has_end else b""
    return b"%d:%b,%d,%d:%b," % (len(line), line, status.st_size, len(end), end)


def _end(path: Path) -> bytes:
    """The last bytes of a file; of one that cannot be read, none."""
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            return file.read(_END_BYTES)
    except OSError:
        return b""
