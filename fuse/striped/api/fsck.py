"""What is wrong in a striped tree: files whose parts are gone, and what crashed savers left behind.

Owns the rule by which garbage may be deleted. A save that is going on, on whatever node, looks like
garbage until it is committed, so all of these must hold right before a deletion: no layout names
it; nothing in it was written for `age_s`, by the storage's own clock; on HDFS, where a file's time
stands still while it is written, no part is open for writing. Thread-safe.
"""

import contextlib
from collections.abc import Iterator

from msgspec import Struct

from bootseer.errors import BootseerError, CorruptError, NotFoundError, UnknownFormatError
from bootseer.fuse.striped.api.copy_tree import is_unfinished_copy
from bootseer.fuse.striped.api.locating import folders_below
from bootseer.fuse.striped.names.stored import find_garbage, new_generation
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.view import FileView, generation_folder, parts_folder
from bootseer.store.backend import Backend, FileInfo
from bootseer.store.objects.store import storage_time_ns

MIN_AGE_S = 3600.0
"""Younger garbage is never deleted: a writer may wait this long for its own storage."""


class Trouble(Struct, frozen=True):
    """A file that cannot be read in whole."""

    path: str
    part: str
    """The stored file that is concerned; the layout itself where that is damaged."""
    expected_bytes: int
    found_bytes: int | None
    """None: it is not there."""
    reason: str
    """`missing`, `short`, `long`, `damaged layout` or `unknown layout`."""


class Garbage(Struct, frozen=True):
    """What nothing needs, unless it is a save that is going on."""

    path: str
    size_bytes: int
    modified_ns: int
    """The newest of what is in it."""
    is_dir: bool


class FolderReport(Struct, frozen=True):
    """What was found in one directory."""

    path: str
    file_count: int
    troubles: tuple[Trouble, ...]
    garbage: tuple[Garbage, ...]


def check_tree(storage: StripedStorage, path: str = "") -> Iterator[FolderReport]:
    """A report for `path` and each directory below it. Reads layouts and listings, no contents.

    Raises: NotFoundError, UnavailableError, DeadlineError.
    """
    for folder in folders_below(storage, path):
        # What is in an unfinished copy is garbage as a whole, or nobody's business.
        if not any(map(is_unfinished_copy, folder.split("/"))):
            yield _check_folder(storage, folder)


def _check_folder(storage: StripedStorage, folder: str) -> FolderReport:
    backend = storage.backend
    troubles: list[Trouble] = []
    count = 0
    copies: list[Garbage] = []
    for info in storage.tree.stored.entries(folder):
        if is_unfinished_copy(info.path.rpartition("/")[2]):
            copies.append(_measure(backend, info))
        if info.is_dir:
            continue
        count += 1
        try:
            view = storage.tree.stored.view_of(info)
        except CorruptError:
            reason = "damaged layout"
        except UnknownFormatError:
            reason = "unknown layout"
        except NotFoundError:
            continue  # removed meanwhile
        else:
            troubles += _missing_parts(backend, view)
            continue
        troubles.append(Trouble(info.path, info.path, info.size_bytes, info.size_bytes, reason))
    garbage: list[Garbage] = []
    # Where a layout cannot be read, nobody knows whose the parts are.
    if not any(trouble.reason.endswith("layout") for trouble in troubles):
        garbage = [_measure(backend, info) for info in find_garbage(backend, folder)]
    return FolderReport(folder, count, tuple(troubles), tuple(garbage + copies))


def _missing_parts(backend: Backend, view: FileView) -> Iterator[Trouble]:
    for segment in view.layout.segments if view.layout else ():
        folder = generation_folder(view.directory, segment.generation)
        try:
            sizes = {info.path: info.size_bytes for info in backend.list(folder)}
        except NotFoundError:
            sizes = {}
        for part in segment.parts:
            path = f"{folder}/{part.name}"
            found = sizes.get(path)
            if found == part.size_bytes:
                continue
            reason = "missing" if found is None else "short" if found < part.size_bytes else "long"
            yield Trouble(view.path, path, part.size_bytes, found, reason)


def _measure(backend: Backend, info: FileInfo) -> Garbage:
    """Size and age of a stored file or folder, with all that is in it."""
    size, newest = 0, info.modified_ns
    for inner in _with_all_below(backend, info):
        size += inner.size_bytes
        newest = max(newest, inner.modified_ns)
    return Garbage(info.path, size, newest, info.is_dir)


def _with_all_below(backend: Backend, info: FileInfo) -> Iterator[FileInfo]:
    """A stored file or folder, and what is in it, however deep."""
    found = [info]
    for one in found:
        yield one
        if one.is_dir:
            with contextlib.suppress(NotFoundError):
                found += backend.list(one.path)


def delete_garbage(storage: StripedStorage, report: FolderReport, age_s: float) -> list[Garbage]:
    """Delete what of a report's garbage is still that, and old enough; returns what was deleted.

    Safe at any moment, and while others save. For those who read a file that was replaced, the
    report should be older than the grace of replaced parts (`storage.DEFAULT_GRACE_S`); what a
    mount has open for longer stays young (`retired`).

    Raises: UnavailableError, DeadlineError...
    """
    backend = storage.backend
    if not report.garbage:
        return []
    probe = f"{generation_folder(report.path, new_generation())}.plain"
    now_ns = storage_time_ns(backend, probe)
    limit_ns = now_ns - int(max(age_s, MIN_AGE_S) * 1e9)
    deleted = []
    for old in report.garbage:
        if old.modified_ns > limit_ns:
            continue
        # All anew: the report may be as old as its reader was slow.
        try:
            found = _measure(backend, backend.stat(old.path))
        except NotFoundError:
            continue
        if found.modified_ns > limit_ns or _is_open(backend, found):
            continue
        if found.path in _named_now(storage, report.path):
            continue
        backend.delete(found.path, recursive=True)
        deleted.append(found)
    with contextlib.suppress(BootseerError):
        # The folder of parts itself, where nothing is left in it.
        backend.delete(parts_folder(report.path))
    return deleted


def _named_now(storage: StripedStorage, folder: str) -> set[str]:
    """The folders of parts that the layouts in `folder` name. Reads those that have changed since
    they were read last.

    Raises: CorruptError, UnknownFormatError, where nobody knows whose the parts are.
    """
    named: set[str] = set()
    for info in storage.tree.stored.entries(folder):
        if info.is_dir:
            continue
        with contextlib.suppress(NotFoundError):  # removed meanwhile
            layout = storage.tree.stored.view_of(info).layout
            named.update(
                generation_folder(folder, segment.generation)
                for segment in (layout.segments if layout else ())
            )
    return named


def _is_open(backend: Backend, garbage: Garbage) -> bool:
    info = FileInfo(garbage.path, garbage.size_bytes, garbage.modified_ns, garbage.is_dir)
    return any(
        backend.is_being_written(one.path)
        for one in _with_all_below(backend, info)
        if not one.is_dir
    )
