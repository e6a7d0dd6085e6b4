"""The tree of logical files over a backend: what a name means, and every change of names.

Owns the translation between stored and logical files, the commit (one rename), and the promise that
what this mount has open survives its name. Knows nothing of FUSE. Thread-safe: changes of names are
made one at a time; looking does not wait for them.
"""

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bootseer.errors import (
    CorruptError,
    DeadlineError,
    NotFoundError,
    UnknownFormatError,
)
from bootseer.fuse.striped.graveyard import Graveyard, is_hidden
from bootseer.fuse.striped.layout import (
    DEFAULT_STRIPE_UNIT_BYTES,
    Header,
    Layout,
    decode_header,
    decode_layout,
    encode_layout,
    may_be_layout,
)
from bootseer.fuse.striped.reader import OpenFile, StripedReader
from bootseer.fuse.striped.segment_writer import new_generation
from bootseer.fuse.striped.view import FileView, generation_folder, parts_folder
from bootseer.store.backend import Backend, FileInfo

# One read of this much is the whole layout of a file of up to about 2 GiB.
_PROBE_BYTES = 64 * 2**10
_CACHED_LAYOUTS = 4096
# An ordinary file of at most this size is kept in memory when its name is about to go away under a
# reader; larger ones are moved aside.
_PIN_MAX_BYTES = DEFAULT_STRIPE_UNIT_BYTES


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What a name in the tree is."""

    path: str
    is_dir: bool
    size_bytes: int
    modified_ns: int
    identity: str
    """Differs between two generations of a file; "" for a directory."""


@dataclass(frozen=True, slots=True)
class _Known:
    info: FileInfo
    header: Header | None
    layout: Layout | None


def _refuse(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


def directory_of(path: str) -> str:
    """The directory part of a path; "" for a name in the root."""
    return path.rpartition("/")[0]


class StripedTree:
    """Logical files, by path."""

    def __init__(
        self, backend: Backend, reader: StripedReader, *, grace_s: float, deadline_s: float
    ) -> None:
        self.backend = backend
        self.reader = reader
        self._deadline_s = deadline_s
        self._graveyard = Graveyard(backend, grace_s, self._generations_in_use)
        self._changing = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._known_lock = threading.Lock()

    def close(self) -> None:
        """Delete what was replaced and is not open. The backend stays open."""
        self._graveyard.close()

    # ---- looking --------------------------------------------------------------------------

    def status(self, path: str) -> FileStatus:
        """What `path` is now. Raises: NotFoundError, CorruptError, UnknownFormatError."""
        return self.status_of(self.backend.stat(path))

    def status_of(self, info: FileInfo) -> FileStatus:
        """What the stored file `info` is; reads its first bytes only if it can be a layout."""
        if info.is_dir:
            return FileStatus(info.path, True, 0, info.modified_ns, "")
        known = self._know(info)
        if known is None:
            return FileStatus(
                info.path, False, info.size_bytes, info.modified_ns, _plain_identity(info)
            )
        header = known.header
        assert header is not None
        return FileStatus(
            info.path, False, header.size_bytes, known.info.modified_ns, header.generation
        )

    def view(self, path: str) -> FileView:
        """The current generation of the file at `path`, ready to be read."""
        info = self.backend.stat(path)
        if info.is_dir:
            raise _refuse(errno.EISDIR, path)
        return self._view_of(info)

    def entries(self, path: str) -> list[FileInfo]:
        """The stored files and directories in a directory, without what is hidden."""
        return [
            info for info in self.backend.list(path) if not is_hidden(info.path.rpartition("/")[2])
        ]

    def _view_of(self, info: FileInfo) -> FileView:
        known = self._know(info, whole=True)
        if known is None:
            return FileView(info.path, _plain_identity(info), info.size_bytes, info.modified_ns)
        layout = known.layout
        assert layout is not None
        return FileView(
            info.path, layout.generation, layout.size_bytes, known.info.modified_ns, layout
        )

    def _know(self, info: FileInfo, *, whole: bool = False) -> _Known | None:
        """What the layout file `info` says; None where it is an ordinary file."""
        if not may_be_layout(info.size_bytes):
            return None
        with self._known_lock:
            known = self._known.get(info.path)
            enough = known is not None and (
                known.header is None or known.layout is not None or not whole
            )
            if known is not None and known.info == info and enough:
                self._known.move_to_end(info.path)
                return known if known.header else None
        known = self._probe(info, whole=whole)
        is_large = info.size_bytes > _PROBE_BYTES
        with self._known_lock:
            self._known[info.path] = replace(known, layout=None) if is_large else known
            while len(self._known) > _CACHED_LAYOUTS:
                self._known.popitem(last=False)
        return known if known.header else None

    def _probe(self, info: FileInfo, *, whole: bool) -> _Known:
        for attempt in range(3):
            length = info.size_bytes if whole else min(info.size_bytes, _PROBE_BYTES)
            data = self.backend.read(info.path, 0, length)
            try:
                header = decode_header(data, info.path)
                layout = None
                if header is not None and len(data) == info.size_bytes:
                    layout = decode_layout(data, info.path)
                return _Known(info, header, layout)
            except CorruptError:
                # Replaced between stat and read: look again, and believe it the last time.
                again = self.backend.stat(info.path)
                if attempt == 2 or again == info:
                    raise
                info = again
        raise AssertionError("unreachable")

    def _drop_known(self, path: str) -> None:
        with self._known_lock:
            for name in [n for n in self._known if n == path or n.startswith(path + "/")]:
                del self._known[name]

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
        pieces = [encode_layout(layout)]
        return self._publish(path, pieces, expected, f"{folder}/layout", layout, before_commit)

    def publish_plain(self, path: str, pieces: list[bytes], expected: str | None) -> FileView:
        """Make an ordinary file of `pieces` the file at `path`, in one step."""
        temporary = f"{generation_folder(directory_of(path), new_generation())}.plain"
        try:
            return self._publish(path, pieces, expected, temporary, None, lambda: None)
        except BaseException:
            with contextlib.suppress(Exception):
                self.backend.delete(temporary)
            raise

    def _publish(
        self,
        path: str,
        pieces: list[bytes],
        expected: str | None,
        temporary: str,
        layout: Layout | None,
        before_commit: Callable[[], None],
    ) -> FileView:
        with self.backend.create(temporary) as writer:
            for piece in pieces:
                writer.write(piece)
        with self._change():
            old = self._look(path)
            if expected is not None and (old is None or old.identity != expected):
                raise _refuse(errno.ESTALE, path)
            self._keep_readers(old)
            before_commit()
            self.backend.rename(temporary, path, overwrite=True)
            self._drop_known(path)
            named = {segment.generation for segment in layout.segments} if layout else set()
            self._retire(old, keep=named)
            info = self.backend.stat(path)
        if layout is None:
            return FileView(path, _plain_identity(info), info.size_bytes, info.modified_ns)
        return FileView(path, layout.generation, layout.size_bytes, info.modified_ns, layout)

    def discard(self, path: str, generations: set[str]) -> None:
        """These generations, written for `path`, will be named by no layout."""
        self._graveyard.retire(directory_of(path), generations, were_visible=False)

    def unlink(self, path: str) -> None:
        """Remove a file; who has it open reads on."""
        with self._change():
            old = self._look(path)
            if old is None:
                raise NotFoundError(f"{path} does not exist")
            if old.layout is None and self._open_here(old) and not self._pin(old):
                self._move_aside(old)
            else:
                self.backend.delete(path)
            self._drop_known(path)
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
                raise _refuse(errno.EEXIST, target)
            if moved.is_dir:
                self._rename_directory(source, target, replaced)
            else:
                self._rename_file(moved, target, replaced)
            self._drop_known(source)
            self._drop_known(target)

    def _rename_file(self, moved: FileInfo, target: str, replaced: FileInfo | None) -> None:
        if replaced is not None and replaced.is_dir:
            raise _refuse(errno.EISDIR, target)
        is_striped = self._know(moved) is not None
        if is_striped and directory_of(moved.path) != directory_of(target):
            # The parts lie beside the layout, and the two cannot move in one step.
            raise _refuse(errno.EXDEV, target)
        old = self._look(target) if replaced is not None else None
        self._keep_readers(old)
        identity = self.status_of(moved).identity
        self.backend.rename(moved.path, target, overwrite=replaced is not None)
        for file in self.reader.open_files():
            if file.view.identity == identity and file.view.path == moved.path:
                file.view = file.view.moved(target)
        self._retire(old, keep=set())

    def _rename_directory(self, source: str, target: str, replaced: FileInfo | None) -> None:
        if target.startswith(source + "/"):
            raise _refuse(errno.EINVAL, target)
        if replaced is not None:
            if not replaced.is_dir:
                raise _refuse(errno.ENOTDIR, target)
            self._remove_directory(target)
        self.backend.rename(source, target)
        self._graveyard.moved(source, target)
        for file in self.reader.open_files():
            if file.view.path.startswith(source + "/"):
                file.view = file.view.moved(target + file.view.path[len(source) :])

    # ---- directories ----------------------------------------------------------------------

    def mkdir(self, path: str) -> FileStatus:
        """Make one directory. Raises: FileExistsError."""
        with self._change():
            try:
                self.backend.stat(path)
            except NotFoundError:
                self.backend.mkdir(path)
            else:
                raise _refuse(errno.EEXIST, path)
        return self.status(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory, with what is hidden in it."""
        with self._change():
            if not self.backend.stat(path).is_dir:
                raise _refuse(errno.ENOTDIR, path)
            self._remove_directory(path)
            self._drop_known(path)

    def _remove_directory(self, path: str) -> None:
        if self.entries(path):
            raise _refuse(errno.ENOTEMPTY, path)
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

    # ---- keeping readers whole ------------------------------------------------------------

    def _look(self, path: str) -> FileView | None:
        """The file about to be replaced or removed; a damaged one counts as an ordinary file."""
        try:
            info = self.backend.stat(path)
        except NotFoundError:
            return None
        if info.is_dir:
            raise _refuse(errno.EISDIR, path)
        try:
            return self._view_of(info)
        except (CorruptError, UnknownFormatError):
            return FileView(path, _plain_identity(info), info.size_bytes, info.modified_ns)

    def _open_here(self, view: FileView) -> list[OpenFile]:
        return [
            file
            for file in self.reader.open_files()
            if file.pinned is None
            and file.view.path == view.path
            and (file.view.size_bytes, file.view.modified_ns) == (view.size_bytes, view.modified_ns)
        ]

    def _keep_readers(self, old: FileView | None) -> None:
        """Before the ordinary file `old` is replaced: its readers get its content in memory.

        Striped files need nothing: their parts outlive the layout. The readers of an ordinary file
        too large for that get an error when they read on, never the new file's bytes.
        """
        if old is not None and old.layout is None:
            self._pin(old)

    def _pin(self, view: FileView) -> bool:
        """Whether the readers of an ordinary file no longer need the stored file."""
        files = self._open_here(view)
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
        for file in self._open_here(view):
            file.view = file.view.moved(aside)
        self._graveyard.retire(view.directory, {generation})

    def _retire(self, old: FileView | None, keep: set[str]) -> None:
        if old is not None and old.layout is not None:
            generations = {segment.generation for segment in old.layout.segments}
            self._graveyard.retire(old.directory, generations - keep)

    def _generations_in_use(self) -> set[str]:
        used: set[str] = set()
        for file in self.reader.open_files():
            if file.view.layout is not None:
                used.update(segment.generation for segment in file.view.layout.segments)
            elif parts_folder("") in file.view.directory:
                used.add(file.view.directory.rpartition("/")[2])
        return used

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


def _plain_identity(info: FileInfo) -> str:
    return f"{info.path}\0{info.modified_ns}\0{info.size_bytes}"
