"""Copying of directories into, out of and between striped trees, and the URLs that name them.

A new directory appears atomically if the target can rename directories; otherwise, and in existing
directories, each file appears atomically. Files are copied a few at a time. A killed copy leaves a
directory with a name that fsck recognizes.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

from msgspec import Struct

from bootseer.base.parallel import StoppableProgress, map_in_threads
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnknownFormatError,
    UnsupportedError,
    from_oserror,
)
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.tools.copy import copy_across, copy_in, copy_out
from bootseer.fuse.striped.view import FileView
from bootseer.store.backend import FileInfo
from bootseer.store.local.beneath import sync_directory

_FILES_AT_ONCE = 4
_COPY_NAME = re.compile(r"\.bootseer-copy-[0-9a-f]{16}")
# A deeper tree is no checkpoint, but a loop in a broken storage.
_MAX_DEPTH = 32
# Schemes whose URLs may end in options; in other URLs "?" is part of a name.
_WITH_QUERY = re.compile(r"(hdfs|viewfs|limit\+[a-z0-9+]+)://", re.IGNORECASE)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)


class CopyPlace(Struct, frozen=True):
    """File or directory in a storage, or on a local disk (`storage` is None)."""

    storage: StripedStorage | None
    path: str

    def __str__(self) -> str:
        if self.storage is None:
            return self.path
        return f"{self.storage.backend.url}/{self.path}" if self.path else self.storage.backend.url

    @property
    def name(self) -> str:
        """Return the last name of the path, or "" for a root."""
        return self.path.rpartition("/")[2]

    def at(self, name: str) -> "CopyPlace":
        """Return the place `name` in this directory."""
        return CopyPlace(self.storage, f"{self.path.rstrip('/')}/{name}" if self.path else name)

    def beside(self, name: str) -> "CopyPlace":
        """Return the place `name` beside this one."""
        folder, slash, _ = self.path.rpartition("/")
        return CopyPlace(self.storage, f"{folder}{slash}{name}")

    def is_dir(self) -> bool:
        """Return whether this is a directory that exists."""
        if self.storage is None:
            return Path(self.path).is_dir()
        with contextlib.suppress(NotFoundError):
            return not self.path or self.storage.tree.stored.status(self.path).is_dir
        return False

    def exists(self) -> bool:
        """Return whether anything exists here."""
        if self.storage is None:
            return Path(self.path).exists()
        try:
            return not self.path or bool(self.storage.backend.stat(self.path))
        except NotFoundError:
            return False


def is_url(text: str) -> bool:
    """Return whether `text` names stored files, and not local ones."""
    return "://" in text


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into the URL of the parent folder and the name in it ("" for a root). Pure.

    Options of the URL become options of the folder's URL. Raises: InvalidInputError.
    """
    bare, mark, query = url.partition("?") if _WITH_QUERY.match(url) else (url, "", "")
    match = _URL.fullmatch(bare)
    if match is None:
        raise InvalidInputError(f"{url!r} is no URL; write for example hdfs://namenode/checkpoints")
    scheme, host, path = match.groups()
    folder, _, name = path.rstrip("/").rpartition("/")
    is_local = scheme.lower().rpartition("+")[2] == "file"
    if is_local:
        # The local backend decodes the folder's part, as RFC 8089 says.
        name = unquote(name, errors="surrogateescape")
    if name in (".", ".."):
        raise InvalidInputError(f"{url!r}: write the path without '.' and '..'")
    return f"{scheme}://{host}/{folder.rstrip('/')}{mark}{query}", name


def files_below(storage: StripedStorage, path: str) -> Iterator[FileInfo]:
    """Yield the stored file at `path`, or each file in the directory there, folder by folder.

    Reads no file, so that a damaged one does not hide the rest. Raises: NotFoundError.
    """
    info = storage.backend.stat(path) if path else None
    if info is not None and not info.is_dir:
        yield info
        return
    for folder in folders_below(storage, path):
        for found in storage.tree.stored.entries(folder):
            if not found.is_dir:
                yield found


def views_below(
    storage: StripedStorage, path: str
) -> tuple[list[FileView], list[tuple[FileInfo, BootseerError]]]:
    """Return the views of `files_below`, and the files whose layouts cannot be read.

    Files that are removed meanwhile are left out. Raises: NotFoundError.
    """
    views: list[FileView] = []
    damaged: list[tuple[FileInfo, BootseerError]] = []
    for info in files_below(storage, path):
        try:
            views.append(storage.tree.stored.view_of(info))
        except (CorruptError, UnknownFormatError) as error:
            damaged.append((info, error))
        except NotFoundError:
            pass
    return views, damaged


def folders_below(storage: StripedStorage, path: str, depth: int = _MAX_DEPTH) -> Iterator[str]:
    """Yield the directory `path` and all below it. Raises: InvalidInputError if they never end."""
    if not depth:
        raise InvalidInputError(f"{storage.backend.url}/{path} is nested too deeply")
    yield path
    infos: list[FileInfo] = [info for info in storage.tree.stored.entries(path) if info.is_dir]
    for info in infos:
        yield from folders_below(storage, info.path, depth - 1)


class Copied(Struct, frozen=True):
    """Count and size of the files that a copy wrote."""

    file_count: int
    size_bytes: int


def is_unfinished_copy(name: str) -> bool:
    """Return whether a name is that of a directory which a copy builds, or did not finish."""
    return bool(_COPY_NAME.fullmatch(name))


def sizes_below(source: CopyPlace) -> dict[str, int]:
    """Return the sizes in bytes of the files in a directory, by path relative to it.

    Raises: NotFoundError; UnsupportedError for a local file that is neither file nor directory.
    """
    if source.storage is None:
        return dict(_local_files(Path(source.path)))
    skip = len(source.path) + 1 if source.path else 0
    stored = source.storage.tree.stored
    return {
        info.path[skip:]: stored.status_of(info).size_bytes
        for info in files_below(source.storage, source.path)
    }


def copy_one(source: CopyPlace, target: CopyPlace, on_progress: Callable[[int], None]) -> int:
    """Copy one file, whole or not at all. Return its size in bytes. Raises: BootseerError."""
    if source.storage is None:
        if target.storage is None:
            raise InvalidInputError(f"neither {source} nor {target} is a URL; use cp for them")
        return copy_in(target.storage, Path(source.path), target.path, on_progress=on_progress)
    if target.storage is None:
        return copy_out(source.storage, source.path, Path(target.path), on_progress=on_progress)
    return copy_across(
        source.storage, source.path, target.storage, target.path, on_progress=on_progress
    )


def copy_tree(
    source: CopyPlace, target: CopyPlace, sizes: dict[str, int], on_progress: Callable[[int], None]
) -> Copied:
    """Copy a directory with the files `sizes` to `target`, or into `target` if that exists.

    A new directory appears whole, in one step, if the target can rename directories. Raises:
    AlreadyExistsError if another process makes it meanwhile; as `copy_one`.
    """
    if target.exists():
        if not target.is_dir():
            raise AlreadyExistsError(f"{target} is not a directory")
        return _copy_files(source, target, sizes, on_progress)
    if target.storage is not None and not target.storage.backend.traits.one_step_rename:
        return _copy_files(source, target, sizes, on_progress)
    building = target.beside(f".bootseer-copy-{secrets.token_hex(8)}")
    try:
        _make_directory(building)
        _make_empty_directories(source, building)
        copied = _copy_files(source, building, sizes, on_progress)
        _rename(building, target)
    except BaseException:
        _remove(building)
        raise
    return copied


def _copy_files(
    source: CopyPlace, target: CopyPlace, sizes: dict[str, int], on_progress: Callable[[int], None]
) -> Copied:
    if target.storage is None:
        for folder in {os.path.dirname(name) for name in sizes}:
            _make_directory(target.at(folder) if folder else target)
    progress = StoppableProgress(on_progress)
    done = map_in_threads(
        sizes,
        lambda name, size: copy_one(source.at(name), target.at(name), progress),
        progress,
        thread_count=_FILES_AT_ONCE,
        thread_name="stripe-copy",
        size_of=lambda size: size,
    )
    return Copied(len(sizes), sum(done.values()))


def _make_empty_directories(source: CopyPlace, target: CopyPlace) -> None:
    """Make all directories of `source` in `target`, so that empty ones are there too."""
    if source.storage is None:
        for folder, names, _ in os.walk(source.path):
            for name in names:
                inner = os.path.relpath(os.path.join(folder, name), source.path)
                _make_directory(target.at(inner))
        return
    skip = len(source.path) + 1 if source.path else 0
    for path in folders_below(source.storage, source.path):
        if path != source.path:
            _make_directory(target.at(path[skip:]))


def _make_directory(place: CopyPlace) -> None:
    if place.storage is not None:
        place.storage.backend.mkdir(place.path)
        return
    try:
        os.makedirs(place.path, exist_ok=True)
    except OSError as error:
        raise from_oserror(error, f"make the directory {place.path}") from error


def _rename(source: CopyPlace, target: CopyPlace) -> None:
    if target.storage is not None:
        try:
            target.storage.tree.rename(source.path, target.path, replace=False)
        except FileExistsError as error:
            raise AlreadyExistsError(
                f"{target} was created by another process meanwhile"
            ) from error
        return
    try:
        # Replaces at most an empty directory.
        os.rename(source.path, target.path)
        sync_directory(os.path.dirname(os.path.abspath(target.path)))
    except OSError as error:
        raise from_oserror(error, f"rename {source.path} to {target.path}") from error


def _remove(place: CopyPlace) -> None:
    """Remove a file or directory as far as possible; fsck finds the rest by its name."""
    with contextlib.suppress(Exception):
        if place.storage is None:
            shutil.rmtree(place.path, ignore_errors=True)
        else:
            place.storage.backend.delete(place.path, recursive=True)


def _local_files(root: Path) -> Iterator[tuple[str, int]]:
    try:
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                for name, size in _local_files(Path(entry.path)):
                    yield f"{entry.name}/{name}", size
            elif entry.is_file():
                yield entry.name, entry.stat().st_size
            else:
                raise UnsupportedError(
                    f"{entry.path} is neither a file nor a directory: a striped tree has only those"
                )
    except OSError as error:
        raise from_oserror(error, f"read the directory {root}") from error
