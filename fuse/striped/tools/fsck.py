"""Check of a tree's layouts and parts, and deletion of files that crashed writers left behind.

The parts of a running save, on any node, look like garbage until the save is committed. So a file
or folder is deleted only if, right before, no layout names it, nothing in it was written for
`age_s` by the storage's own clock, and no part is open for writing (on HDFS the time of a file does
not change while it is written). Thread-safe.
"""

import contextlib
from collections.abc import Iterator, Sequence

from msgspec import Struct

from bootseer.errors import BootseerError, CorruptError, NotFoundError, UnknownFormatError
from bootseer.fuse.striped.layout import PARTS_FOLDER
from bootseer.fuse.striped.names.stored import StoredNames, is_hidden
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.tools.copy_tree import folders_below, is_unfinished_copy
from bootseer.fuse.striped.tools.verify import part_faults
from bootseer.fuse.striped.view import FileView, generation_folder, new_generation, parts_folder
from bootseer.store.backend import Backend, FileInfo
from bootseer.store.objects.store import storage_time_ns

MIN_AGE_S = 3600.0
"""Least age of garbage that is deleted: a writer may wait this long for its own storage."""

_MIN_BATCH = 16


class Trouble(Struct, frozen=True):
    """A file that cannot be read whole."""

    path: str
    part: str
    """The damaged stored file: a part, or the layout itself."""
    expected_bytes: int
    found_bytes: int | None
    """None if the part is missing."""
    reason: str
    """`missing`, `short`, `long`, `damaged layout` or `unknown layout`."""


class Garbage(Struct, frozen=True):
    """Stored file or folder that no layout names; a running save may be writing it."""

    path: str
    size_bytes: int
    modified_ns: int
    """Newest time of everything in it."""
    is_dir: bool


class FolderReport(Struct, frozen=True):
    """Result of the check of one directory."""

    path: str
    file_count: int
    troubles: tuple[Trouble, ...]
    garbage: tuple[Garbage, ...]


def check_tree(storage: StripedStorage, path: str = "") -> Iterator[FolderReport]:
    """Yield a report for `path` and each directory below it.

    Reads each layout once, and listings, but no contents. Raises: NotFoundError, UnavailableError,
    DeadlineError.
    """
    for folder in folders_below(storage, path):
        # An unfinished copy is garbage as a whole, or still being written.
        if not any(map(is_unfinished_copy, folder.split("/"))):
            yield check_folder(storage.backend, storage.tree.stored, folder)


def check_folder(backend: Backend, stored: StoredNames, folder: str) -> FolderReport:
    """Check the files of one directory. Raises: NotFoundError, UnavailableError, DeadlineError."""
    troubles: list[Trouble] = []
    runs: list[FileInfo] = []
    copies: list[FileInfo] = []
    named: set[str] = set()
    count = 0
    # Parts are listed before the files, so that the layouts of saves that end meanwhile are found.
    parts: list[FileInfo] = []
    with contextlib.suppress(NotFoundError):
        parts += backend.list(parts_folder(folder))
    for info in backend.list(folder):
        name = info.path.rpartition("/")[2]
        if is_hidden(name):
            if name != PARTS_FOLDER:
                runs.append(info)
            continue
        if is_unfinished_copy(name):
            copies.append(info)
        if info.is_dir:
            continue
        count += 1
        try:
            view = stored.view_of(info)
        except (CorruptError, UnknownFormatError) as error:
            reason = "damaged layout" if isinstance(error, CorruptError) else "unknown layout"
            size = info.size_bytes
            troubles.append(Trouble(info.path, info.path, size, size, reason))
        except NotFoundError:
            pass  # removed meanwhile
        else:
            named |= _parts_of(view)
            for part in part_faults(backend, view):
                found = part.found_bytes
                troubles.append(
                    Trouble(view.path, part.path, part.expected_bytes, found, part.reason)
                )
    garbage = [*runs, *(info for info in parts if info.path not in named)]
    # If a layout cannot be read, its parts are not known.
    if any(trouble.reason.endswith("layout") for trouble in troubles):
        garbage = []
    measured = tuple(_measure(_with_all_below(backend, info)) for info in (*garbage, *copies))
    return FolderReport(folder, count, tuple(troubles), measured)


def _parts_of(view: FileView) -> set[str]:
    """Return the folders of parts that a file's layout names."""
    segments = view.layout.segments if view.layout else ()
    return {generation_folder(view.directory, segment.generation) for segment in segments}


def _with_all_below(backend: Backend, info: FileInfo) -> list[FileInfo]:
    """Return a stored file or folder, and everything in it at any depth."""
    found = [info]
    for one in found:
        if one.is_dir:
            with contextlib.suppress(NotFoundError):
                found += backend.list(one.path)
    return found


def _measure(found: Sequence[FileInfo]) -> Garbage:
    """Return size and age of the first of `found`, which contains the others."""
    size_bytes = sum(one.size_bytes for one in found)
    newest_ns = max(one.modified_ns for one in found)
    return Garbage(found[0].path, size_bytes, newest_ns, found[0].is_dir)


def delete_garbage(storage: StripedStorage, report: FolderReport, age_s: float) -> list[Garbage]:
    """Delete garbage of a report if it is still garbage and old enough. Return the deleted pieces.

    Safe at any moment, and while others save. For readers of a file that was replaced, the report
    should be older than the grace of replaced parts (`storage.DEFAULT_GRACE_S`). A mount that has
    parts open for longer puts new files beside them (`RetiredParts`), so that they are not old.

    Raises: UnavailableError, DeadlineError...; CorruptError, UnknownFormatError for a layout that
    cannot be read, whose parts are not known.
    """
    if not report.garbage:
        return []
    backend = storage.backend
    probe = f"{generation_folder(report.path, new_generation())}.plain"
    limit_ns = storage_time_ns(backend, probe) - int(max(age_s, MIN_AGE_S) * 1e9)
    old = [one for one in report.garbage if one.modified_ns <= limit_ns]
    # The layouts are read anew for each batch, right before it is deleted. Batches as large as the
    # directory make the whole work proportional to what there is.
    batch = max(_MIN_BATCH, report.file_count)
    deleted: list[Garbage] = []
    for start in range(0, len(old), batch):
        deleted += _delete(storage, report.path, old[start : start + batch], limit_ns)
    with contextlib.suppress(BootseerError):
        # The folder of parts itself, if nothing is left in it.
        backend.delete(parts_folder(report.path))
    return deleted


def _delete(
    storage: StripedStorage, folder: str, batch: Sequence[Garbage], limit_ns: int
) -> list[Garbage]:
    backend = storage.backend
    old = []
    for one in batch:
        # Measured again, because the report may be old.
        with contextlib.suppress(NotFoundError):
            found = _with_all_below(backend, backend.stat(one.path))
            measured = _measure(found)
            if measured.modified_ns <= limit_ns and not any(
                backend.is_being_written(each.path) for each in found if not each.is_dir
            ):
                old.append(measured)
    named: set[str] = set()
    for info in storage.tree.stored.entries(folder) if old else ():
        if not info.is_dir:
            with contextlib.suppress(NotFoundError):  # removed meanwhile
                named |= _parts_of(storage.tree.stored.view_of(info))
    deleted = [one for one in old if one.path not in named]
    for one in deleted:
        backend.delete(one.path, recursive=True)
    return deleted
