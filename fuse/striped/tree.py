"""The tree of logical files over a backend: every change of names.

Owns the commit (one rename) and the order of its steps: what is open is made safe first
(`reader_keeper`), what was replaced goes to the `graveyard` last. Looking is `stored`'s and does
not wait. Knows nothing of FUSE. Thread-safe: changes of names are made one at a time.
"""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator

from bootseer.errors import (
    CorruptError,
    DeadlineError,
    NotFoundError,
    UnknownFormatError,
)
from bootseer.fuse.striped.graveyard import Graveyard
from bootseer.fuse.striped.kept_units import KeptUnits
from bootseer.fuse.striped.layout import (
    Layout,
    encode_layout,
)
from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.reader import StripedReader
from bootseer.fuse.striped.reader_keeper import ReaderKeeper
from bootseer.fuse.striped.segment_writer import new_generation
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.stored import FileStatus, StoredFiles, plain_identity, refuse
from bootseer.fuse.striped.view import FileView, generation_folder, parts_folder
from bootseer.store.backend import Backend, FileInfo
from bootseer.store.joining import joiner


def directory_of(path: str) -> str:
    """The directory part of a path; "" for a name in the root."""
    return path.rpartition("/")[0]


class StripedTree:
    """Logical files, by path."""

    def __init__(
        self,
        backend: Backend,
        reader: StripedReader,
        budget: MemoryBudget,
        counters: Counters,
        *,
        grace_s: float,
        deadline_s: float,
    ) -> None:
        self.backend = backend
        self.reader = reader
        self.budget = budget
        self.kept = KeptUnits(budget)
        self.counters = counters
        self._deadline_s = deadline_s
        self.stored = StoredFiles(backend)
        self._keeper = ReaderKeeper(backend, reader)
        self._graveyard = Graveyard(backend, grace_s, self._keeper.generations_in_use)
        self._changing = threading.Lock()

    def close(self) -> None:
        """Delete what was replaced and is not open. The backend stays open."""
        self._graveyard.close()

    # ---- changing files -------------------------------------------------------------------

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
        if self.backend.has_atomic_rename:
            self._store(temporary, [data])

        def commit() -> None:
            before_commit()
            if self.backend.has_atomic_rename:
                self.backend.rename(temporary, path, overwrite=True)
            else:
                self._store(path, [data], overwrite=True)

        named = {segment.generation for segment in layout.segments}
        info = self._commit(path, expected, commit, named)
        return FileView(path, layout.generation, layout.size_bytes, info.modified_ns, layout)

    def publish_plain(self, path: str, pieces: list[bytes], expected: str | None) -> FileView:
        """Make an ordinary file of `pieces` the file at `path`, in one step."""
        if not self.backend.has_atomic_rename:
            return self._commit_plain(
                path, expected, lambda: self._store(path, pieces, overwrite=True)
            )
        temporary = f"{generation_folder(directory_of(path), new_generation())}.plain"
        try:
            self._store(temporary, pieces)
            return self._commit_plain(
                path, expected, lambda: self.backend.rename(temporary, path, overwrite=True)
            )
        except BaseException:
            with contextlib.suppress(Exception):
                self.backend.delete(temporary)
            raise

    def publish_runs(
        self,
        path: str,
        runs: list[str],
        expected: str | None,
        *,
        adds: bool,
        before_commit: Callable[[], None],
    ) -> FileView:
        """Make `runs` the ordinary file at `path`, or its new end, in one step.

        Without `adds` there is one run, or the first was joined with the others. As for
        `publish_layout`, what the step leaves when it fails must be left alone.
        """

        def commit() -> None:
            before_commit()
            if adds:
                able = joiner(self.backend)
                assert able is not None, "a body that adds has made sure"
                able.join(path, runs)
            else:
                # Where this is a copy and a delete, the copy appears whole.
                self.backend.rename(runs[0], path, overwrite=True)

        return self._commit_plain(path, expected, commit)

    def _commit_plain(
        self, path: str, expected: str | None, commit: Callable[[], None]
    ) -> FileView:
        info = self._commit(path, expected, commit, named=set())
        return FileView(path, plain_identity(info), info.size_bytes, info.modified_ns)

    def _commit(
        self, path: str, expected: str | None, commit: Callable[[], None], named: set[str]
    ) -> FileInfo:
        """Change what `path` is; it then stands on the generations that are `named`."""
        with self._change():
            old = self._look(path)
            if expected is not None and (old is None or old.identity != expected):
                raise refuse(errno.ESTALE, path)
            self._keeper.keep(old)
            commit()
            self.counters.add(published_count=1)
            self.stored.forget(path)
            self._retire(old, keep=named)
            return self.backend.stat(path)

    def _store(self, path: str, pieces: list[bytes], *, overwrite: bool = False) -> None:
        with self.backend.create(path, overwrite=overwrite) as writer:
            for piece in pieces:
                writer.write(piece)

    def discard(self, path: str, generations: set[str]) -> None:
        """These generations, written for `path`, will be named by no layout."""
        self._graveyard.retire(directory_of(path), generations, were_visible=False)

    def unlink(self, path: str) -> None:
        """Remove a file; who has it open reads on."""
        with self._change():
            old = self._look(path)
            if old is None:
                raise NotFoundError(f"{path} does not exist")
            keeper = self._keeper
            if old.layout is None and keeper.open_here(old) and not keeper.pin(old):
                self._graveyard.retire(old.directory, {keeper.move_aside(old)})
            else:
                self.backend.delete(path)
            self.stored.forget(path)
            self._retire(old, keep=set())

    def rename(self, source: str, target: str, *, replace: bool = True) -> None:
        """Move a file or directory, over a file or an empty directory."""
        if source == target:
            return
        with self._change():
            moved = self.backend.stat(source)
            try:
                replaced: FileInfo | None = self.backend.stat(target)
            except NotFoundError:
                replaced = None
            if replaced is not None and not replace:
                raise refuse(errno.EEXIST, target)
            if moved.is_dir:
                self._rename_directory(source, target, replaced)
            else:
                self._rename_file(moved, target, replaced)
            self.stored.forget(source)
            self.stored.forget(target)

    def _rename_file(self, moved: FileInfo, target: str, replaced: FileInfo | None) -> None:
        if replaced is not None and replaced.is_dir:
            raise refuse(errno.EISDIR, target)
        is_striped = self.stored.is_striped(moved)
        if is_striped and directory_of(moved.path) != directory_of(target):
            # The parts lie beside the layout, and the two cannot move in one step.
            raise refuse(errno.EXDEV, target)
        old = self._look(target) if replaced is not None else None
        self._keeper.keep(old)
        identity = self.stored.status_of(moved).identity
        self.backend.rename(moved.path, target, overwrite=replaced is not None)
        self._keeper.renamed(moved.path, target, identity)
        self._retire(old, keep=set())

    def _rename_directory(self, source: str, target: str, replaced: FileInfo | None) -> None:
        if target.startswith(source + "/"):
            raise refuse(errno.EINVAL, target)
        if replaced is not None:
            if not replaced.is_dir:
                raise refuse(errno.ENOTDIR, target)
            self._remove_directory(target)
        self.backend.rename(source, target)
        self._graveyard.moved(source, target)
        self._keeper.renamed(source, target)

    # ---- directories ----------------------------------------------------------------------

    def mkdir(self, path: str) -> FileStatus:
        """Make one directory. Raises: FileExistsError."""
        with self._change():
            try:
                self.backend.stat(path)
            except NotFoundError:
                self.backend.mkdir(path)
            else:
                raise refuse(errno.EEXIST, path)
        return self.stored.status(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory, with what is hidden in it."""
        with self._change():
            if not self.backend.stat(path).is_dir:
                raise refuse(errno.ENOTDIR, path)
            self._remove_directory(path)
            self.stored.forget(path)

    def _remove_directory(self, path: str) -> None:
        if self.stored.entries(path):
            raise refuse(errno.ENOTEMPTY, path)
        # Files that were unlinked here and are still being read: their parts move up.
        parent = directory_of(path)
        for file in self.reader.open_files():
            view = file.view
            if view.directory != path or file.pinned is not None:
                continue
            generations = {s.generation for s in view.layout.segments} if view.layout else set()
            for generation in generations:
                self.backend.rename(
                    generation_folder(path, generation), generation_folder(parent, generation)
                )
            name = view.path.rpartition("/")[2]
            file.view = view.moved(f"{parent}/{name}" if parent else name)
            self._graveyard.retire(parent, generations)
        self._graveyard.take(path)
        self.backend.delete(parts_folder(path), recursive=True)
        self.backend.delete(path)

    # ---- inside ---------------------------------------------------------------------------

    def _look(self, path: str) -> FileView | None:
        """The file about to be replaced or removed; a damaged one counts as an ordinary file."""
        try:
            info = self.backend.stat(path)
        except NotFoundError:
            return None
        if info.is_dir:
            raise refuse(errno.EISDIR, path)
        try:
            return self.stored.view_of(info)
        except (CorruptError, UnknownFormatError):
            return FileView(path, plain_identity(info), info.size_bytes, info.modified_ns)

    def _retire(self, old: FileView | None, keep: set[str]) -> None:
        if old is not None and old.layout is not None:
            generations = {segment.generation for segment in old.layout.segments}
            self._graveyard.retire(old.directory, generations - keep)

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        if not self._changing.acquire(timeout=self._deadline_s):
            raise DeadlineError(
                f"another change of names in {self.backend.url} has not ended within "
                f"{self._deadline_s:.0f} s"
            )
        try:
            yield
        finally:
            self._changing.release()
