"""Changes of names in the tree of logical files: commits, removals, renames, directories.

A file gets new content in one step: a rename, a put or a join, depending on the storage. Before an
ordinary file is replaced, its content is read into memory for the mount's readers, or the file is
moved aside; the parts of a striped file stay readable. Replaced parts are deleted later
(`retired`). Changes are made one at a time; lookups (`stored`) do not wait for them. Thread-safe.
"""

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

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
from bootseer.fuse.striped.names.retired import RetiredParts
from bootseer.fuse.striped.names.stored import (
    FileStatus,
    StoredNames,
    new_generation,
    plain_view,
    refuse,
    run_name,
)
from bootseer.fuse.striped.reading.reader import StripedReader
from bootseer.fuse.striped.reading.unit_read import OpenFile
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.view import FileView, generation_folder, parts_folder
from bootseer.store.backend import Backend, FileInfo, Piece
from bootseer.transfer.policy import UNTIL_DEADLINE, Attempts

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_MARKS_MAX = 1024
# A replaced or removed ordinary file of at most this size is kept in memory for its readers; a
# larger one is moved aside.
_PIN_MAX_BYTES = DEFAULT_STRIPE_UNIT_BYTES


def directory_of(path: str) -> str:
    """Return the directory part of a path; "" for a name in the root."""
    return path.rpartition("/")[0]


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
        self._marks = [0] * _MARKS_MAX
        """Count of begun and ended changes, by hash of the name; odd during a change."""

    def close(self) -> None:
        """Delete replaced parts that are not open. The backend stays open."""
        self._retired.close()

    def open(self, path: str) -> tuple[OpenFile, FileView]:
        """Open the file at `path` for reading; `close` of the reader must follow.

        An ordinary file is opened before a change of its name, which then keeps it whole for its
        readers, or after it.
        """
        mark = _mark_of(path)
        before = self._marks[mark]
        view = self.stored.view(path)
        file = self.reader.open(view)
        is_settled = view.layout is not None or (before % 2 == 0 and self._marks[mark] == before)
        if is_settled and file.view.path == view.path:
            return file, view
        self.reader.close(file)
        with self._change():
            view = self.stored.view(path)
            file = self.reader.open(view)
            # Other readers of the generation follow another node's rename.
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
        adds: bool,
        before_commit: Callable[[], None],
    ) -> FileView:
        """Make the stored file `run` the ordinary file at `path`, or its new end, in one step.

        After `before_commit`, `run` must not be deleted (see `publish_layout`).
        """

        def commit() -> None:
            before_commit()
            if adds:
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
        """Replace the file at `path` by `commit`; keep the parts of the generations `named`."""
        with self._change(path):
            old = self._look(path)
            if expected is not None and (old is None or old.identity != expected):
                raise refuse(errno.ESTALE, path)
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
            # A file there is left from an earlier attempt of ours.
            may_replace, is_again = overwrite or is_again, True
            with self.backend.create(path, overwrite=may_replace) as writer:
                for piece in pieces:
                    writer.write(piece)

        self._until_answered(write)

    def _move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a new file, which no other process uses. Try again while the storage is away."""
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
        """Return the result of `step`; call it again while the storage is gone.

        An attempt that failed may have been carried out by the storage.
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
            old = self._look(path)
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

    def rename_begun(
        self,
        source: str,
        target: str,
        publish: Sequence[Callable[[], None]],
        *,
        replace: bool,
        has_parts: bool,
    ) -> None:
        """Rename a file whose next generation is being written.

        `publish` makes that generation the file at `target`; the file at `source` is removed. If
        the rename is refused, nothing is published.

        `has_parts`: whether parts of it are stored, which cannot move to another directory.
        """
        with self._change():
            replaced = self._replaced(target, replace=replace)
            if replaced is not None and replaced.is_dir:
                raise refuse(errno.EISDIR, target)
            parent = directory_of(target)
            if has_parts and directory_of(source) != parent:
                raise refuse(errno.EXDEV, target)
            if parent and not self.backend.stat(parent).is_dir:
                raise refuse(errno.ENOTDIR, target)
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
            raise refuse(errno.EEXIST, target)
        return replaced

    def _rename_file(self, moved: FileInfo, target: str, replaced: FileInfo | None) -> None:
        if replaced is not None and replaced.is_dir:
            raise refuse(errno.EISDIR, target)
        is_striped = self.stored.is_striped(moved)
        if is_striped and directory_of(moved.path) != directory_of(target):
            # The parts lie beside the layout, and the two cannot move in one step.
            raise refuse(errno.EXDEV, target)
        old = self._look(target) if replaced is not None else None
        self._keep_readers(old)
        view = self._view_of(moved)
        self.backend.rename(moved.path, target, overwrite=replaced is not None)
        for file in self._readers_of(view):
            file.view = file.view.moved(target)
        self._retire(old)

    def _rename_directory(self, source: str, target: str, replaced: FileInfo | None) -> None:
        if target.startswith(source + "/"):
            raise refuse(errno.EINVAL, target)
        if replaced is not None:
            if not replaced.is_dir:
                raise refuse(errno.ENOTDIR, target)
            self._remove_directory(target)
        self.backend.rename(source, target)
        self._retired.moved(source, target)
        for file in self.reader.open_files():
            if file.view.path.startswith(source + "/"):
                file.view = file.view.moved(target + file.view.path[len(source) :])

    # ---- directories ----------------------------------------------------------------------

    def mkdir(self, path: str) -> FileStatus:
        """Make one directory. Raises: FileExistsError."""
        with self._change():
            if self._is_stored(path):
                raise refuse(errno.EEXIST, path)
            self.backend.mkdir(path)
        return self.stored.status(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory with its hidden folder."""
        with self._change():
            if not self.backend.stat(path).is_dir:
                raise refuse(errno.ENOTDIR, path)
            self._remove_directory(path)
            self.stored.forget(path)

    def _remove_directory(self, path: str) -> None:
        if self.stored.entries(path):
            raise refuse(errno.ENOTEMPTY, path)
        self._move_readers_up(path)
        self._retired.take(path)
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
            file.view = file.view.moved(to)
        self._retired.retire(parent, generations)

    # ---- what is open stays readable --------------------------------------------------------

    def _readers_of(self, view: FileView) -> list[OpenFile]:
        """Return the open files that still read the stored file `view`.

        The identity of an ordinary file does not tell which one it is: it begins with the name that
        the file had when it was opened.
        """
        return [
            file
            for file in self.reader.open_files()
            if file.view.path == view.path and _is_same(file.view, view)
        ]

    def _keep_readers(self, old: FileView | None) -> None:
        """Make the readers of an ordinary file safe before it is replaced.

        The readers of one that is too large for memory get an error when they read on, never the
        new file's bytes.
        """
        if old is not None and old.layout is None:
            self._pin_readers(old)

    def _pin_readers(self, view: FileView) -> bool:
        """Return whether no reader of an ordinary file needs the stored file any more."""
        files = [file for file in self._readers_of(view) if file.pinned is None]
        if view.size_bytes > _PIN_MAX_BYTES:
            return not files
        for file in files:
            file.pinned = self.backend.read(view.path)
        return True

    def _move_aside(self, view: FileView) -> None:
        """Unlink a large ordinary file that is being read: it goes into the hidden folder."""
        generation = new_generation()
        aside = f"{generation_folder(view.directory, generation)}/kept"
        self.backend.rename(view.path, aside)
        for file in self._readers_of(view):
            file.view = file.view.moved(aside)
        self._retired.retire(view.directory, {generation})

    def _generations_in_use(self) -> set[str]:
        """Return the generations of the files that are open in this mount."""
        used: set[str] = set()
        for file in self.reader.open_files():
            used |= _generations_of(file.view.layout)
            if file.view.layout is None and parts_folder("") in file.view.directory:
                used.add(file.view.directory.rpartition("/")[2])
        return used

    # ---- every change of names --------------------------------------------------------------

    def _look(self, path: str) -> FileView | None:
        """Return the file about to be replaced or removed; a damaged one as an ordinary file."""
        try:
            info = self.backend.stat(path)
        except NotFoundError:
            return None
        if info.is_dir:
            raise refuse(errno.EISDIR, path)
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
            # Where a rename is a copy and a delete, one that was cut short left two names.
            generations -= self._named_in(old.directory)
        self._retired.retire(old.directory, generations)

    def _named_in(self, directory: str) -> set[str]:
        """Return the generations that the files of a directory are made of."""
        named: set[str] = set()
        for info in self.stored.entries(directory):
            if not info.is_dir and may_be_layout(info.size_bytes):
                named |= _generations_of(self.stored.view_of(info).layout)
        return named

    @contextlib.contextmanager
    def _change(self, *paths: str) -> Iterator[None]:
        """Hold the lock on changes of names and mark `paths` as changing."""
        if not self._changing.acquire(timeout=self._patience_s):
            raise DeadlineError(
                f"another change of names in {self.backend.url} has not ended within "
                f"{self._patience_s:.0f} s"
            )
        marks = {_mark_of(path) for path in paths}
        try:
            for mark in marks:
                self._marks[mark] += 1
            yield
        finally:
            for mark in marks:
                self._marks[mark] += 1
            self._changing.release()


def _mark_of(path: str) -> int:
    """Return where the changes of a name are counted; other names may be counted there, too."""
    return hash(path) % _MARKS_MAX


def _generations_of(layout: Layout | None) -> frozenset[str]:
    return frozenset(segment.generation for segment in layout.segments) if layout else frozenset()


def _is_same(view: FileView, other: FileView) -> bool:
    """Return whether two views of one path are of the same generation."""
    if view.layout is not None or other.layout is not None:
        return view.identity == other.identity
    return view.plain_version == other.plain_version
