"""Changes of names in the tree of logical files: commits, removals, renames, directories.

A file gets new content in one step: a rename, a put or a join, depending on the storage. Before an
ordinary file is replaced, its content is read into memory for the mount's readers, or the file is
moved aside; the parts of a striped file stay readable. Changes are made one at a time; lookups
(`stored`) do not wait for them.

Parts that no layout names any more are *retired*: they are deleted after a grace period for readers
on other nodes, once no file of this mount has them open. After a crash, fsck finds and deletes
them. Thread-safe.
"""

import contextlib
import errno
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
    UnknownFormatError,
)
from bootseer.fuse.striped.layout import (
    DEFAULT_STRIPE_UNIT_BYTES,
    Layout,
    encode_layout,
    may_be_layout,
)
from bootseer.fuse.striped.names.stored import (
    FileStatus,
    StoredNames,
    os_error,
    plain_view,
    run_name,
)
from bootseer.fuse.striped.reading.opened import OpenFile
from bootseer.fuse.striped.reading.reader import StripedReader
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.view import FileView, generation_folder, new_generation, parts_folder
from bootseer.store.backend import Backend, FileInfo, Piece
from bootseer.transfer.policy import UNTIL_DEADLINE, Attempts, Policy, random_fraction

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_CHANGE_COUNTERS = 1024
# A replaced or removed ordinary file of at most this size is kept in memory for its readers; a
# larger one is moved aside.
_PIN_MAX_BYTES = DEFAULT_STRIPE_UNIT_BYTES
_SWEEP_S = 1.0
# Well below the age (an hour) at which fsck deletes garbage.
_MARK_EVERY_S = 900.0
_CLOSE_TIMEOUT_S = 5.0
# Deletions that fail are repeated with growing pauses.
_DELETE_RETRIES = Policy(attempts=math.inf, base_s=1.0, cap_s=300.0)


def directory_of(path: str) -> str:
    """Return the directory part of a path; "" for a name in the root."""
    return path.rpartition("/")[0]


class _Retired(Struct):
    directory: str
    generation: str
    due_s: float
    marked_s: float = -math.inf
    marker: str = ""
    failure_count: int = 0


class RetiredParts:
    """The retired generations of one storage, and the thread that deletes them."""

    def __init__(self, backend: Backend, grace_s: float, in_use: Callable[[], set[str]]) -> None:
        """`in_use` returns the generations that are open in this mount."""
        self._backend = backend
        self._grace_s = grace_s
        self._in_use = in_use
        self._folders: list[_Retired] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def retire(self, directory: str, generations: set[str], *, were_visible: bool = True) -> None:
        """Delete the folders of generations in `directory` once they have no readers.

        Generations that were never visible have no readers anywhere, so they get no grace period.
        """
        due_s = time.monotonic() + (self._grace_s if were_visible else 0.0)
        with self._lock:
            self._folders += [_Retired(directory, name, due_s) for name in sorted(generations)]
            if self._thread is None and not self._closed and self._folders:
                self._thread = threading.Thread(target=self._run, name="stripe-delete", daemon=True)
                self._thread.start()
        if self._grace_s <= 0:
            self.sweep()

    def follow_rename(self, source: str, target: str) -> None:
        """Follow a rename of the directory `source` to `target`."""
        with self._lock:
            for retired in self._folders:
                if retired.directory == source or retired.directory.startswith(source + "/"):
                    retired.directory = target + retired.directory[len(source) :]

    def forget(self, directory: str) -> None:
        """Forget the folders of one directory, which the caller removes."""
        with self._lock:
            self._folders = [retired for retired in self._folders if retired.directory != directory]

    def sweep(self, *, all_due: bool = False) -> None:
        """Delete the folders that are due and not in use. Failures are logged and tried again."""
        now_s = time.monotonic()
        used = self._in_use()
        with self._lock:
            due = [
                retired
                for retired in self._folders
                if (all_due or retired.due_s <= now_s) and retired.generation not in used
            ]
            self._folders = [retired for retired in self._folders if retired not in due]
            held = [
                retired
                for retired in self._folders
                if retired.due_s <= now_s and retired.marked_s + _MARK_EVERY_S <= now_s
            ]
            for retired in held:
                retired.marked_s = now_s
        for retired in held:
            self._mark(retired)
        for retired in due:
            self._delete(retired, is_last=all_due)

    def _delete(self, retired: _Retired, *, is_last: bool) -> None:
        folder = generation_folder(retired.directory, retired.generation)
        try:
            self._backend.delete(folder, recursive=True)
        except Exception as error:
            # No error may prevent the deletion of the other folders.
            if is_last:
                _log.warning("replaced parts stay behind for fsck: %s", error)
                return
            retired.failure_count += 1
            pause_s = _DELETE_RETRIES.delay_s(retired.failure_count, random_fraction())
            _log.warning("replaced parts are deleted in %.0f s: %s", pause_s, error)
            with self._lock:
                retired.due_s = time.monotonic() + pause_s
                self._folders.append(retired)

    def _mark(self, retired: _Retired) -> None:
        """Put a new file into a folder that this mount still reads, so that fsck keeps it."""
        folder = generation_folder(retired.directory, retired.generation)
        # No error may prevent the deletions; the next round tries again.
        with contextlib.suppress(Exception):
            old, marker = retired.marker, f"open-{secrets.token_hex(8)}"
            with self._backend.create(f"{folder}/{marker}") as writer:
                writer.write(b"\n")
            retired.marker = marker
            if old:
                self._backend.delete(f"{folder}/{old}")

    def close(self) -> None:
        """Delete all folders that are not in use, now."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        self.sweep(all_due=True)

    def _run(self) -> None:
        while not self._wake.wait(_SWEEP_S):
            try:
                self.sweep()
            except Exception:
                # This thread must not end: nothing would be deleted any more.
                _log.exception("replaced parts are deleted later")


class StripedTree:
    """Logical files by path."""

    def __init__(
        self,
        backend: Backend,
        reader: StripedReader,
        counters: Counters,
        *,
        grace_s: float,
        patience_s: float,
    ) -> None:
        """`grace_s`: how long replaced parts stay for readers on other nodes."""
        self.backend = backend
        self.reader = reader
        self.stored = StoredNames(backend)
        self._counters = counters
        self._patience_s = patience_s
        self._retired = RetiredParts(backend, grace_s, self._generations_in_use)
        self._changing = threading.Lock()
        self._change_counts = [0] * _CHANGE_COUNTERS
        """Begins and ends of changes, counted by hash of the path; odd during a change."""

    def close(self) -> None:
        """Delete replaced parts that are not open. The backend stays open."""
        self._retired.close()

    def open(self, path: str) -> tuple[OpenFile, FileView]:
        """Open the file at `path` for reading; `close` of the reader must follow.

        An ordinary file is opened either before a change of its name begins, so that the change
        keeps the content for this reader, or after the change has ended.
        """
        counter = _counter_of(path)
        before = self._change_counts[counter]
        view = self.stored.view(path)
        file = self.reader.open(view)
        is_unchanged = before % 2 == 0 and self._change_counts[counter] == before
        if (view.layout is not None or is_unchanged) and file.view.path == view.path:
            return file, view
        self.reader.close(file)
        with self._change():
            view = self.stored.view(path)
            file = self.reader.open(view)
            # Another node may have renamed the file: all its readers read at the new path.
            file.view = view
            return file, view

    # ---- new content ----------------------------------------------------------------------

    def publish_layout(
        self,
        path: str,
        layout: Layout,
        expected: str | None,
        before_commit: Callable[[], None],
    ) -> FileView:
        """Make `layout` the file at `path`, in one step. Its parts are durable already.

        `expected`: identity that the file must still have (for an append), else ESTALE.
        `before_commit` is called right before the step: if the step fails, it may have been made
        nevertheless, so the parts must not be deleted after `before_commit`.
        """
        folder = generation_folder(directory_of(path), layout.segments[-1].generation)
        temporary = f"{folder}/layout"
        data = encode_layout(layout)
        if self.backend.traits.one_step_rename:
            self._store(temporary, [data])

        def commit() -> None:
            before_commit()
            if self.backend.traits.one_step_rename:
                self._move(temporary, path, overwrite=True)
            else:
                self._store(path, [data], overwrite=True)

        info = self._commit(path, expected, commit, named=_generations_of(layout))
        return FileView(path, layout.generation, layout.size_bytes, info.modified_ns, layout)

    def publish_plain(self, path: str, pieces: list[Piece], expected: str | None) -> FileView:
        """Make an ordinary file of `pieces` the file at `path`, in one step."""
        if not self.backend.traits.one_step_rename:
            info = self._commit(path, expected, lambda: self._store(path, pieces, overwrite=True))
            return plain_view(path, info)
        temporary = f"{generation_folder(directory_of(path), new_generation())}.plain"
        try:
            self._store(temporary, pieces)
            info = self._commit(path, expected, lambda: self._move(temporary, path, overwrite=True))
        except BaseException:
            # If the deletion fails, too, fsck finds the file; the first error is raised.
            with contextlib.suppress(Exception):
                self.backend.delete(temporary)
            raise
        return plain_view(path, info)

    def publish_run(
        self,
        path: str,
        run: str,
        expected: str | None,
        *,
        appends: bool,
        before_commit: Callable[[], None],
    ) -> FileView:
        """Make the stored file `run` the ordinary file at `path`, or its new end, in one step.

        After `before_commit`, `run` must not be deleted (see `publish_layout`).
        """

        def commit() -> None:
            before_commit()
            if appends:
                self._join(path, run)
            else:
                # Even if this is a copy and a delete, the copy appears in one step.
                self._move(run, path, overwrite=True)

        return plain_view(path, self._commit(path, expected, commit))

    def discard(self, path: str, generations: set[str]) -> None:
        """Delete generations that were written for `path` and will not be published."""
        self._retired.retire(directory_of(path), generations, were_visible=False)

    def _commit(
        self,
        path: str,
        expected: str | None,
        commit: Callable[[], None],
        named: frozenset[str] = frozenset(),
    ) -> FileInfo:
        """Call `commit`, which replaces the file at `path`; retire the parts of the old file.

        Parts of the generations `named` are kept, because the new file has them, too.
        """
        with self._change(path):
            old = self._current(path)
            if expected is not None and (old is None or old.identity != expected):
                raise os_error(errno.ESTALE, path)
            self._keep_readers(old)
            commit()
            self._counters.add(published_count=1)
            self.stored.forget(path)
            self._retire(old, keep=named)
            return self._until_answered(lambda: self.backend.stat(path))

    def _store(self, path: str, pieces: list[Piece], *, overwrite: bool = False) -> None:
        is_again = False

        def write() -> None:
            nonlocal is_again
            # An earlier attempt of this call may have left a file at the path.
            may_replace, is_again = overwrite or is_again, True
            with self.backend.create(path, overwrite=may_replace) as writer:
                for piece in pieces:
                    writer.write(piece)

        self._until_answered(write)

    def _move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a new file that no other process uses. Repeat while the storage is unreachable."""
        is_again = False

        def move() -> None:
            nonlocal is_again
            was_asked, is_again = is_again, True
            try:
                self.backend.rename(source, target, overwrite=overwrite)
            except NotFoundError:
                # An earlier attempt may have been carried out without an answer.
                if not was_asked or self._is_stored(source) or not self._is_stored(target):
                    raise

        self._until_answered(move)

    def _join(self, path: str, run: str) -> None:
        # HDFS joins files of one directory only. The name is unique.
        beside = run_name(directory_of(path), new_generation())
        self._move(run, beside)
        try:
            self.backend.join(path, [beside])
        except BootseerError:
            # If only the answer was lost, the file was joined and does not exist any more.
            with contextlib.suppress(BootseerError):
                self.backend.delete(beside)
            raise

    def _is_stored(self, path: str) -> bool:
        try:
            self.backend.stat(path)
        except NotFoundError:
            return False
        return True

    def _until_answered(self, step: Callable[[], Result]) -> Result:
        """Return the result of `step`, which is repeated while the storage is unreachable.

        The storage may have carried out an attempt that failed.
        """
        attempts = Attempts(UNTIL_DEADLINE, self._patience_s)
        while True:
            try:
                return step()
            except UnavailableError as error:
                pause_s = attempts.pause_s(error)
                if pause_s is None:
                    raise
                _log.warning("%s; trying again", error)
            time.sleep(pause_s)

    # ---- removing and renaming files --------------------------------------------------------

    def unlink(self, path: str) -> None:
        """Remove a file. Readers that have it open can still read it."""
        with self._change(path):
            old = self._current(path)
            if old is None:
                raise NotFoundError(f"{path} does not exist")
            if old.layout is None and not self._pin_readers(old):
                self._move_aside(old)
            else:
                self.backend.delete(path)
            self.stored.forget(path)
            self._retire(old)

    def rename(self, source: str, target: str, *, replace: bool = True) -> None:
        """Move a file or directory, over a file or an empty directory."""
        if source == target:
            return
        with self._change(source, target):
            moved = self.backend.stat(source)
            replaced = self._replaced(target, replace=replace)
            if moved.is_dir:
                self._rename_directory(source, target, replaced)
            else:
                self._rename_file(moved, target, replaced)
            self.stored.forget(source)
            self.stored.forget(target)

    def rename_unpublished(
        self,
        source: str,
        target: str,
        publish: Sequence[Callable[[], None]],
        *,
        replace: bool,
        has_parts: bool,
    ) -> None:
        """Rename a file whose next generation is being written.

        The calls in `publish` make the next generation the file at `target`; then the file at
        `source` is removed. If the rename is refused, nothing is published. `has_parts`: whether
        parts of the next generation are stored, which cannot move to another directory.
        """
        with self._change():
            replaced = self._replaced(target, replace=replace)
            if replaced is not None and replaced.is_dir:
                raise os_error(errno.EISDIR, target)
            parent = directory_of(target)
            if has_parts and directory_of(source) != parent:
                raise os_error(errno.EXDEV, target)
            if parent and not self.backend.stat(parent).is_dir:
                raise os_error(errno.ENOTDIR, target)
        for step in publish:
            step()
        with contextlib.suppress(NotFoundError):
            self.unlink(source)

    def _replaced(self, target: str, *, replace: bool) -> FileInfo | None:
        """Return the file or folder that a rename to `target` replaces, if any.

        Raises: OSError (EEXIST) without `replace`.
        """
        try:
            replaced = self.backend.stat(target)
        except NotFoundError:
            return None
        if not replace:
            raise os_error(errno.EEXIST, target)
        return replaced

    def _rename_file(self, moved: FileInfo, target: str, replaced: FileInfo | None) -> None:
        if replaced is not None and replaced.is_dir:
            raise os_error(errno.EISDIR, target)
        is_striped = self.stored.is_striped(moved)
        if is_striped and directory_of(moved.path) != directory_of(target):
            # The parts lie beside the layout, and the two cannot move in one step.
            raise os_error(errno.EXDEV, target)
        old = self._current(target) if replaced is not None else None
        self._keep_readers(old)
        view = self._view_of(moved)
        self.backend.rename(moved.path, target, overwrite=replaced is not None)
        for file in self._readers_of(view):
            file.view = file.view.at_path(target)
        self._retire(old)

    def _rename_directory(self, source: str, target: str, replaced: FileInfo | None) -> None:
        if target.startswith(source + "/"):
            raise os_error(errno.EINVAL, target)
        if replaced is not None:
            if not replaced.is_dir:
                raise os_error(errno.ENOTDIR, target)
            self._remove_directory(target)
        self.backend.rename(source, target)
        self._retired.follow_rename(source, target)
        for file in self.reader.open_files():
            if file.view.path.startswith(source + "/"):
                file.view = file.view.at_path(target + file.view.path[len(source) :])

    # ---- directories ----------------------------------------------------------------------

    def mkdir(self, path: str) -> FileStatus:
        """Make one directory. Raises: FileExistsError."""
        with self._change():
            if self._is_stored(path):
                raise os_error(errno.EEXIST, path)
            self.backend.mkdir(path)
        return self.stored.status(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory with its hidden folder."""
        with self._change():
            if not self.backend.stat(path).is_dir:
                raise os_error(errno.ENOTDIR, path)
            self._remove_directory(path)
            self.stored.forget(path)

    def _remove_directory(self, path: str) -> None:
        if self.stored.entries(path):
            raise os_error(errno.ENOTEMPTY, path)
        self._move_readers_up(path)
        self._retired.forget(path)
        self.backend.delete(parts_folder(path), recursive=True)
        self.backend.delete(path)

    def _move_readers_up(self, path: str) -> None:
        """Move stored files that are still read, though unlinked, out of a directory."""
        parent = directory_of(path)
        moved: dict[OpenFile, str] = {}
        generations: set[str] = set()
        for file in self.reader.open_files():
            view = file.view
            name = view.path.rpartition("/")[2]
            aside = view.directory.rpartition("/")[2]
            if file.pinned is not None:
                continue
            if view.directory == path:
                moved[file] = f"{parent}/{name}" if parent else name
                generations |= _generations_of(view.layout)
            elif view.directory == generation_folder(path, aside):
                # A large ordinary file, see `_move_aside`.
                moved[file] = f"{generation_folder(parent, aside)}/{name}"
                generations.add(aside)
        # Several generations of a file that was appended to share segments.
        for generation in sorted(generations):
            self.backend.rename(
                generation_folder(path, generation), generation_folder(parent, generation)
            )
        for file, to in moved.items():
            file.view = file.view.at_path(to)
        self._retired.retire(parent, generations)

    # ---- readers of files that are replaced or removed --------------------------------------

    def _readers_of(self, view: FileView) -> list[OpenFile]:
        """Return the open files that still read the stored file `view`.

        Identities of ordinary files cannot be compared: an identity begins with the path at which
        the file was opened.
        """
        return [
            file
            for file in self.reader.open_files()
            if file.view.path == view.path and _is_same(file.view, view)
        ]

    def _keep_readers(self, old: FileView | None) -> None:
        """Keep the content of an ordinary file for its readers before the file is replaced.

        If the file is too large for memory, its readers get an error at their next read, and never
        bytes of the new file.
        """
        if old is not None and old.layout is None:
            self._pin_readers(old)

    def _pin_readers(self, view: FileView) -> bool:
        """Read an ordinary file into memory for its open readers, if it is small enough.

        Return whether no reader needs the stored file any more.
        """
        files = [file for file in self._readers_of(view) if file.pinned is None]
        if view.size_bytes > _PIN_MAX_BYTES:
            return not files
        for file in files:
            file.pinned = self.backend.read(view.path)
        return True

    def _move_aside(self, view: FileView) -> None:
        """Unlink a large ordinary file that is being read, by moving it into the hidden folder."""
        generation = new_generation()
        aside = f"{generation_folder(view.directory, generation)}/kept"
        self.backend.rename(view.path, aside)
        for file in self._readers_of(view):
            file.view = file.view.at_path(aside)
        self._retired.retire(view.directory, {generation})

    def _generations_in_use(self) -> set[str]:
        """Return the generations of the files that are open in this mount."""
        used: set[str] = set()
        for file in self.reader.open_files():
            used |= _generations_of(file.view.layout)
            if file.view.layout is None and parts_folder("") in file.view.directory:
                used.add(file.view.directory.rpartition("/")[2])
        return used

    # ---- steps of every change --------------------------------------------------------------

    def _current(self, path: str) -> FileView | None:
        """Return the file at `path`, or None; a damaged striped file as an ordinary file."""
        try:
            info = self.backend.stat(path)
        except NotFoundError:
            return None
        if info.is_dir:
            raise os_error(errno.EISDIR, path)
        return self._view_of(info)

    def _view_of(self, info: FileInfo) -> FileView:
        try:
            return self.stored.view_of(info)
        except (CorruptError, UnknownFormatError):
            return plain_view(info.path, info)

    def _retire(self, old: FileView | None, keep: frozenset[str] = frozenset()) -> None:
        if old is None or old.layout is None:
            return
        generations = set(_generations_of(old.layout) - keep)
        if generations and not self.backend.traits.one_step_rename:
            # Here a rename is a copy and a delete. After one that was cut short, two layouts name
            # the same generations.
            generations -= self._generations_named_in(old.directory)
        self._retired.retire(old.directory, generations)

    def _generations_named_in(self, directory: str) -> set[str]:
        """Return the generations that the layouts in a directory name."""
        named: set[str] = set()
        for info in self.stored.entries(directory):
            if not info.is_dir and may_be_layout(info.size_bytes):
                named |= _generations_of(self.stored.view_of(info).layout)
        return named

    @contextlib.contextmanager
    def _change(self, *paths: str) -> Iterator[None]:
        """Hold the lock on changes of names, and count the begin and end of a change of `paths`."""
        if not self._changing.acquire(timeout=self._patience_s):
            raise DeadlineError(
                f"another change of names in {self.backend.url} has not ended within "
                f"{self._patience_s:.0f} s"
            )
        counters = {_counter_of(path) for path in paths}
        try:
            for counter in counters:
                self._change_counts[counter] += 1
            yield
        finally:
            for counter in counters:
                self._change_counts[counter] += 1
            self._changing.release()


def _counter_of(path: str) -> int:
    """Return the number of the counter of changes that `path` shares with other paths."""
    return hash(path) % _CHANGE_COUNTERS


def _generations_of(layout: Layout | None) -> frozenset[str]:
    return frozenset(segment.generation for segment in layout.segments) if layout else frozenset()


def _is_same(view: FileView, other: FileView) -> bool:
    """Return whether two views of one path are of the same generation."""
    if view.layout is not None or other.layout is not None:
        return view.identity == other.identity
    return view.plain_version == other.plain_version
