"""The tree of logical files over a backend: every change of names.

Owns removing, renaming and directories; new content is `publishing`. Looking is `stored`'s and does
not wait. Knows nothing of FUSE. Thread-safe: changes of names are made one at a time.
"""

import contextlib
import errno
from collections.abc import Callable, Sequence

from bootseer.errors import NotFoundError
from bootseer.fuse.striped.names.publishing import Publishing, directory_of
from bootseer.fuse.striped.names.stored import FileStatus, refuse
from bootseer.fuse.striped.view import generation_folder, parts_folder
from bootseer.store.backend import FileInfo


class StripedTree(Publishing):
    """Logical files, by path."""

    def close(self) -> None:
        """Delete what was replaced and is not open. The backend stays open."""
        self._retired_parts.close()

    # ---- changing files -------------------------------------------------------------------

    def discard(self, path: str, generations: set[str]) -> None:
        """These generations, written for `path`, will be named by no layout."""
        self._retired_parts.retire(directory_of(path), generations, were_visible=False)

    def unlink(self, path: str) -> None:
        """Remove a file; who has it open reads on."""
        with self._change(path):
            old = self._look(path)
            if old is None:
                raise NotFoundError(f"{path} does not exist")
            readers = self._open_readers
            if old.layout is None and readers.open_here(old) and not readers.pin(old):
                self._retired_parts.retire(old.directory, {readers.move_aside(old)})
            else:
                self.backend.delete(path)
            self.stored.forget(path)
            self._retire(old, keep=set())

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

    def _replaced(self, target: str, *, replace: bool) -> FileInfo | None:
        """Return what a rename to `target` replaces, if anything; refuse it without `replace`."""
        try:
            replaced = self.backend.stat(target)
        except NotFoundError:
            return None
        if not replace:
            raise refuse(errno.EEXIST, target)
        return replaced

    def rename_begun(
        self,
        source: str,
        target: str,
        publish: Sequence[Callable[[], None]],
        *,
        replace: bool,
        has_parts: bool,
    ) -> None:
        """Rename a file whose next generation is being written: `publish` makes it the file at
        `target`, and what is stored at `source` is removed. Does nothing where that is refused.

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

    def _rename_file(self, moved: FileInfo, target: str, replaced: FileInfo | None) -> None:
        if replaced is not None and replaced.is_dir:
            raise refuse(errno.EISDIR, target)
        is_striped = self.stored.is_striped(moved)
        if is_striped and directory_of(moved.path) != directory_of(target):
            # The parts lie beside the layout, and the two cannot move in one step.
            raise refuse(errno.EXDEV, target)
        old = self._look(target) if replaced is not None else None
        self._open_readers.keep(old)
        view = self._view_of(moved)
        self.backend.rename(moved.path, target, overwrite=replaced is not None)
        self._open_readers.renamed(moved.path, target, view)
        self._retire(old, keep=set())

    def _rename_directory(self, source: str, target: str, replaced: FileInfo | None) -> None:
        if target.startswith(source + "/"):
            raise refuse(errno.EINVAL, target)
        if replaced is not None:
            if not replaced.is_dir:
                raise refuse(errno.ENOTDIR, target)
            self._remove_directory(target)
        self.backend.rename(source, target)
        self._retired_parts.moved(source, target)
        self._open_readers.renamed(source, target)

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
            aside = view.directory.rpartition("/")[2]
            is_aside = view.directory == generation_folder(path, aside)
            if (view.directory != path and not is_aside) or file.pinned is not None:
                continue
            generations = {s.generation for s in view.layout.segments} if view.layout else set()
            name = view.path.rpartition("/")[2]
            moved = f"{parent}/{name}" if parent else name
            if is_aside:
                # A large ordinary file: see `OpenReaders.move_aside`.
                generations = {aside}
                moved = f"{generation_folder(parent, aside)}/{name}"
            for generation in generations:
                self.backend.rename(
                    generation_folder(path, generation), generation_folder(parent, generation)
                )
            file.view = view.moved(moved)
            self._retired_parts.retire(parent, generations)
        self._retired_parts.take(path)
        self.backend.delete(parts_folder(path), recursive=True)
        self.backend.delete(path)
