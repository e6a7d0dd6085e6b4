"""Striped files for fsspec: `bootseer::hdfs://namenode/checkpoints/step-1/model.pt`.

Owns what fsspec's calls mean here; URLs and options are `target`'s. A path is that of the file
system behind (`/checkpoints/..` on HDFS and locally, `bucket/..` on object stores). Instances may
be used from any thread, pickled, and used on after a fork.
"""

import contextlib
import errno
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from glob import has_magic
from pathlib import Path
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.utils import isfilelike

from bootseer.errors import AlreadyExistsError, NotFoundError, UnsupportedError
from bootseer.fuse.striped.api.copy import copy_across, copy_in, copy_out
from bootseer.fuse.striped.api.opened import StripedFile, StripedText
from bootseer.fuse.striped.api.target import TargetFileSystem
from bootseer.fuse.striped.names.stored import FileStatus
from bootseer.fuse.striped.view import FileView

_RANGES_AT_ONCE = 8


class CheckpointFileSystem(TargetFileSystem):
    """Striped and ordinary files of one server, as fsspec sees them."""

    # ---- looking --------------------------------------------------------------------------

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """name, size, type, mtime (seconds), identity (differs between generations)."""
        key = self.key(path)
        if not key:
            return _entry(self.shown_name(path), FileStatus("", True, 0, 0, ""))
        return _entry(self.shown_name(path), self.storage.tree.stored.status(key))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What is in a directory, or the one file. Always asked anew."""
        name = self.shown_name(path)
        stored = self.storage.tree.stored
        key = self.key(path)
        status = stored.status(key) if key else None
        if status is not None and not status.is_dir:
            return [_entry(name, status)] if detail else [name]
        prefix = name if name.endswith("/") or not name else name + "/"
        infos = stored.entries(key)
        if not detail:
            return [prefix + info.path.rpartition("/")[2] for info in infos]
        return [
            _entry(prefix + info.path.rpartition("/")[2], stored.status_of(info)) for info in infos
        ]

    def created(self, path: str) -> datetime:
        """When the file's current content was saved: each save is a new file."""
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        """When the file was last changed."""
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    def entry_of_view(self, path: str, view: FileView) -> dict[str, Any]:
        """`info` of a generation."""
        status = FileStatus(path, False, view.size_bytes, view.modified_ns, view.identity)
        return _entry(self.shown_name(path), status)

    def view_or_none(self, path: str, mode: str) -> FileView | None:
        """What a file that is opened in `mode` goes on from: for `ab` what is there."""
        with contextlib.suppress(NotFoundError):
            if mode == "ab":
                return self.storage.tree.stored.view(self.key(path))
        return None

    # ---- contents -------------------------------------------------------------------------

    def open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> Any:
        """As any fsspec file system. What is written appears at `close`, whole; nothing does when
        an exception leaves the `with` block."""
        if kwargs.get("compression") and "r" not in mode:
            # The compressor would not close the file, so nothing would say that it is whole.
            raise UnsupportedError(
                f"{path}: compress what is written with fsspec.open(url, mode, compression=...)"
            )
        if "b" in mode:
            return super().open(path, mode, block_size, **kwargs)
        text = {name: kwargs.pop(name, None) for name in ("encoding", "errors", "newline")}
        return StripedText(self.open(path, mode.replace("t", "") + "b", **kwargs), **text)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> StripedFile:
        # Caching and read-ahead are the storage's, across all files: options for them are ignored.
        return StripedFile(self, path, mode, block_size=block_size, autocommit=autocommit)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Bytes `[start, end)`, as a slice would take them."""
        with StripedFile(self, path, "rb") as file:
            first, last, _ = slice(start, end).indices(file.size)
            file.seek(first)
            return file.read(max(0, last - first))

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """The ranges' bytes, several at once; an exception in the place of one that failed."""
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        starts = starts if isinstance(starts, list) else [starts] * len(paths)
        ends = ends if isinstance(ends, list) else [ends] * len(paths)
        if not len(paths) == len(starts) == len(ends):
            raise ValueError("paths, starts and ends differ in length")

        def read(path: str, start: int | None, end: int | None) -> Any:
            try:
                return self.cat_file(path, start, end)
            except Exception as error:
                # As fsspec has it: any error may stand in its range's place.
                if on_error == "return":
                    return error
                raise

        with ThreadPoolExecutor(_RANGES_AT_ONCE) as threads:
            return list(threads.map(read, paths, starts, ends))

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Store `value`; with mode "create" only where nothing is."""
        with self.open(path, "xb" if mode == "create" else "wb") as file:
            file.write(value)

    def get_file(
        self,
        rpath: str,
        lpath: Any = None,
        callback: Any = DEFAULT_CALLBACK,
        outfile: Any = None,
        **kwargs: Any,
    ) -> None:
        """Copy one file to the local disk, whole or not at all."""
        if outfile is not None or isfilelike(lpath):
            super().get_file(rpath, lpath, callback=callback, outfile=outfile)
            return
        status = self.info(rpath)
        target = Path(lpath)
        if status["type"] == "directory":
            target.mkdir(parents=True, exist_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        callback.set_size(status["size"])
        copy_out(self.storage, self.key(rpath), target, on_progress=callback.relative_update)

    def put_file(
        self,
        lpath: Any,
        rpath: str,
        callback: Any = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Store one local file, whole or not at all."""
        if mode == "create" and self.exists(rpath):
            raise AlreadyExistsError(f"{rpath} exists already")
        source = Path(lpath)
        if source.is_dir():
            self.makedirs(rpath, exist_ok=True)
            return
        callback.set_size(source.stat().st_size)
        copy_in(self.storage, source, self.key(rpath), on_progress=callback.relative_update)

    # ---- changing names -------------------------------------------------------------------

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a directory. Raises: FileExistsError."""
        key = self.key(path)
        parent = key.rpartition("/")[0]
        if not create_parents and parent:
            self.storage.tree.stored.status(parent)
        self.storage.tree.mkdir(key)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory and those above it."""
        try:
            self.mkdir(path)
        except FileExistsError:
            if not exist_ok or not self.isdir(path):
                raise

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self.storage.tree.rmdir(self.key(path, follow=False))

    def rm_file(self, path: str) -> None:
        """Remove a file or an empty directory; who reads the file in this process reads on."""
        key = self.key(path, follow=False)
        if self.storage.backend.stat(key).is_dir:
            self.storage.tree.rmdir(key)
        else:
            self.storage.tree.unlink(key)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy one file, striped anew, whole or not at all."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        copy_across(self.storage, self.key(path1), self.storage, self.key(path2))

    def mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Rename a file or a directory in one step where the target can: a directory always, a
        striped file within its directory. Else copy, then remove."""
        is_plain = isinstance(path1, str) and isinstance(path2, str) and not has_magic(path1)
        if is_plain and maxdepth is None and self.key(path1) != self.key(path2):
            if path2.endswith("/") or self.isdir(path2):
                path2 = f"{path2.rstrip('/')}/{self.shown_name(path1).rpartition('/')[2]}"
            if self._rename(path1, path2):
                return
        if isinstance(path1, str) and self.isdir(path1):
            recursive = True
        super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth)

    def _rename(self, path1: str, path2: str) -> bool:
        try:
            self.storage.tree.rename(self.key(path1, follow=False), self.key(path2, follow=False))
        except UnsupportedError:
            return False
        except OSError as error:
            if error.errno == errno.EXDEV:
                return False
            raise
        return True


def _entry(name: str, status: FileStatus) -> dict[str, Any]:
    return {
        "name": name,
        "size": status.size_bytes,
        "type": "directory" if status.is_dir else "file",
        "mtime": status.modified_ns / 1e9,
        "identity": status.identity,
    }
