"""How a file gets new content in one step, and what all changes of names share.

Owns the commit (a rename, a put or a join, as the storage can) and the order of its steps: what is
open is made safe first (`open_readers`), replaced parts are retired last (`retired_parts`). Changes
of names are made one at a time. Thread-safe.
"""

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
    UnknownFormatError,
)
from bootseer.fuse.striped.layout import Layout, encode_layout, may_be_layout
from bootseer.fuse.striped.names.open_readers import OpenReaders
from bootseer.fuse.striped.names.retired_parts import RetiredParts, run_name
from bootseer.fuse.striped.names.stored import StoredFiles, new_generation, plain_view, refuse
from bootseer.fuse.striped.reading.chunks import OpenFile
from bootseer.fuse.striped.reading.reader import StripedReader
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.view import FileView, generation_folder
from bootseer.store.backend import Backend, FileInfo, Piece
from bootseer.transfer.policy import UNTIL_DEADLINE, Attempts

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_MARKS_MAX = 1024


def directory_of(path: str) -> str:
    """The directory part of a path; "" for a name in the root."""
    return path.rpartition("/")[0]


class Publishing:
    """New content for logical files, by path."""

    def __init__(
        self,
        backend: Backend,
        reader: StripedReader,
        counters: Counters,
        *,
        grace_s: float,
        patience_s: float,
    ) -> None:
        self.backend = backend
        self.reader = reader
        self._counters = counters
        self._patience_s = patience_s
        self.stored = StoredFiles(backend)
        self._open_readers = OpenReaders(backend, reader)
        self._retired_parts = RetiredParts(backend, grace_s, self._open_readers.generations_in_use)
        self._changing = threading.Lock()
        self._marks = [0] * _MARKS_MAX
        """By name: how often a change of it has begun or ended. Odd while one is under way."""

    def open(self, path: str) -> tuple[OpenFile, FileView]:
        """Start reading what is stored at `path`; `close` of the reader must follow.

        An ordinary file is opened before a change of its name, which then keeps it whole for its
        readers, or after it.
        """
        mark = _mark_of(path)
        before = self._marks[mark]
        view = self.stored.view(path)
        file = self.reader.open(view)
        if view.layout is not None or (before % 2 == 0 and self._marks[mark] == before):
            return file, view
        self.reader.close(file)
        with self._change():
            view = self.stored.view(path)
            return self.reader.open(view), view

    def publish_layout(
        self,
        path: str,
        layout: Layout,
        expected: str | None,
        before_commit: Callable[[], None],
    ) -> FileView:
        """Make `layout` the file at `path`, in one step. Its parts are durable already.

        `expected`: the identity that must still be there (an append), else ESTALE. `before_commit`
        is called right before the one step: if that fails, nobody knows whether the server made it,
        and the parts must be left alone.
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

        named = {segment.generation for segment in layout.segments}
        info = self._commit(path, expected, commit, named)
        return FileView(path, layout.generation, layout.size_bytes, info.modified_ns, layout)

    def publish_plain(self, path: str, pieces: list[Piece], expected: str | None) -> FileView:
        """Make an ordinary file of `pieces` the file at `path`, in one step."""
        if not self.backend.traits.one_step_rename:
            return self._commit_plain(
                path, expected, lambda: self._store(path, pieces, overwrite=True)
            )
        temporary = f"{generation_folder(directory_of(path), new_generation())}.plain"
        try:
            self._store(temporary, pieces)
            return self._commit_plain(
                path, expected, lambda: self._move(temporary, path, overwrite=True)
            )
        except BaseException:
            # What cannot be removed now is garbage that fsck names; this error matters more.
            with contextlib.suppress(Exception):
                self.backend.delete(temporary)
            raise

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

        As for `publish_layout`, what the step leaves when it fails must be left alone.
        """

        def commit() -> None:
            before_commit()
            if adds:
                self._join(path, run)
            else:
                # Where this is a copy and a delete, the copy appears whole.
                self._move(run, path, overwrite=True)

        return self._commit_plain(path, expected, commit)

    def _join(self, path: str, run: str) -> None:
        # HDFS joins files of one directory only; the name says that nobody else's file it is.
        beside = run_name(directory_of(path), new_generation())
        self._move(run, beside)
        try:
            self.backend.join(path, [beside])
        except BootseerError:
            # Where the answer was lost it may have been joined: then it is not there any more.
            with contextlib.suppress(BootseerError):
                self.backend.delete(beside)
            raise

    def _commit_plain(
        self, path: str, expected: str | None, commit: Callable[[], None]
    ) -> FileView:
        info = self._commit(path, expected, commit, named=set())
        return plain_view(path, info)

    def _commit(
        self, path: str, expected: str | None, commit: Callable[[], None], named: set[str]
    ) -> FileInfo:
        """Change what `path` is; it then stands on the generations that are `named`."""
        with self._change(path):
            old = self._look(path)
            if expected is not None and (old is None or old.identity != expected):
                raise refuse(errno.ESTALE, path)
            self._open_readers.keep(old)
            commit()
            self._counters.add(published_count=1)
            self.stored.forget(path)
            self._retire(old, keep=named)
            return self._until_answered(lambda: self.backend.stat(path))

    def _store(self, path: str, pieces: list[Piece], *, overwrite: bool = False) -> None:
        is_again = False

        def write() -> None:
            nonlocal is_again
            # What an attempt before has left there is ours, too.
            may_replace, is_again = overwrite or is_again, True
            with self.backend.create(path, overwrite=may_replace) as writer:
                for piece in pieces:
                    writer.write(piece)

        self._until_answered(write)

    def _move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file that nobody else knows of, past an outage of the storage."""
        is_again = False

        def move() -> None:
            nonlocal is_again
            was_asked, is_again = is_again, True
            try:
                self.backend.rename(source, target, overwrite=overwrite)
            except NotFoundError:
                # An attempt before had no answer, and was made after all.
                if not was_asked or self._is_stored(source) or not self._is_stored(target):
                    raise

        self._until_answered(move)

    def _is_stored(self, path: str) -> bool:
        try:
            self.backend.stat(path)
        except NotFoundError:
            return False
        return True

    def _until_answered(self, step: Callable[[], Result]) -> Result:
        """What `step` returns, which is made again while the storage is gone. It may have been made
        by an attempt that failed."""
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

    # ---- for every change of names --------------------------------------------------------

    def _look(self, path: str) -> FileView | None:
        """The file about to be replaced or removed; a damaged one counts as an ordinary file."""
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

    def _retire(self, old: FileView | None, keep: set[str]) -> None:
        if old is None or old.layout is None:
            return
        generations = {segment.generation for segment in old.layout.segments} - keep
        if generations and not self.backend.traits.one_step_rename:
            # Where a rename is a copy and a delete, one that was cut short left two names.
            generations -= self._named_in(old.directory, generations)
        self._retired_parts.retire(old.directory, generations)

    def _named_in(self, directory: str, generations: set[str]) -> set[str]:
        """Returns those of `generations` that a file of `directory` is made of."""
        named: set[str] = set()
        for info in self.stored.entries(directory):
            if not info.is_dir and may_be_layout(info.size_bytes):
                layout = self.stored.view_of(info).layout
                named.update(s.generation for s in (layout.segments if layout else ()))
        return named & generations

    @contextlib.contextmanager
    def _change(self, *paths: str) -> Iterator[None]:
        """Change what the names `paths` mean."""
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
