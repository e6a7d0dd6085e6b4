"""Striped files for fsspec: `bootseer::hdfs://namenode/checkpoints/step-1/model.pt`.

A path is a path of the target file system (`/checkpoints/..` on HDFS and locally, `bucket/..` on
object stores). File systems may be used from any thread, pickled, and used after a fork. All file
systems of one target share one `StripedStorage` per process, and so one memory budget.

A written file becomes visible at `close`, whole. It does not become visible if an exception left
the `with` block, if it was not closed, or in a forked child. Like other file objects, files are not
thread-safe.
"""

import contextlib
import errno
import io
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from glob import has_magic
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import fsspec
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from fsspec.utils import isfilelike, tokenize

from bootseer.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
from bootseer.fuse.striped.names.stored import FileStatus, is_hidden, status_of
from bootseer.fuse.striped.reading.opened import OpenFile
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.fuse.striped.tools.copy import copy_across, copy_in, copy_out, read_opened
from bootseer.settings.config import load_config
from bootseer.store import Backend, open_backend
from bootseer.store.paths import BUCKETS

_log = logging.getLogger(__name__)

PROTOCOL = "bootseer"
_LOCAL = ("file", "local")
_RANGES_AT_ONCE = 8
_STEP_BYTES = 4 * 2**20
# Smaller reads are served from one cached block: pickle reads a few bytes at a time.
_SMALL_BYTES = 256 * 2**10
_LINE_BYTES = 8192
# Depth to which the call stack is searched for the __exit__ of a `with` block.
_EXIT_DEPTH = 6


class StripedFile(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """File that is open in the mode `rb`, `wb`, `xb` (new) or `ab`."""

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        mode: str,
        *,
        block_size: int | None = None,
        autocommit: bool = True,
        identity: str | None = None,
    ) -> None:
        """Open a file of the `CheckpointFileSystem` `fs`.

        `identity`: the generation that the file must still have; for a file that was pickled.
        """
        self._closed = True
        self._pid = os.getpid()
        self._key = fs.key(path)
        self._block = b""
        self._block_start = 0
        self._is_done = False
        storage: StripedStorage = fs.storage
        self._storage = storage
        size, start = None, 0
        if mode == "rb":
            self._view = storage.tree.stored.view(self._key)
            if identity not in (None, self._view.identity):
                raise UnavailableError(f"{path} was replaced elsewhere meanwhile; open it again")
            self._opened = storage.reader.open(self._view)
            self._details = _info(fs.shown_name(path), status_of(self._view))
            size = self._view.size_bytes
        else:
            if mode == "xb" and fs.exists(path):
                raise AlreadyExistsError(f"{path} exists already")
            # An exception that is being handled now does not leave the `with` block of this file.
            self._error_at_open = sys.exception()
            base = None
            if mode == "ab":
                with contextlib.suppress(NotFoundError):
                    base = storage.tree.stored.view(self._key)
            self._writer = storage.writer(self._key, base)
            start = self._writer.size_bytes
        # Last, because it marks the file as open.
        super().__init__(
            fs, path, mode, block_size or "default", autocommit, cache_type="none", size=size
        )
        self.loc = start

    # ---- reading --------------------------------------------------------------------------

    def read(self, length: int | None = -1) -> bytes:
        """Read at most `length` bytes, or the rest of the file without a length."""
        self._check_readable()
        left = max(0, self.size - self.loc)
        count = left if length is None or length < 0 else min(int(length), left)
        data = self._fetch_range(self.loc, self.loc + count)
        self.loc += count
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`. Return the count, which is short only at the end of the file."""
        self._check_readable()
        target = memoryview(buffer).cast("B")
        count: int = min(len(target), max(0, self.size - self.loc))
        if count < _SMALL_BYTES:
            target[:count] = self._fetch_range(self.loc, self.loc + count)
        else:
            opened = self._open_in_this_process()
            read_opened(self._storage, opened, self.loc, target[:count])
        self.loc += count
        return count

    def readline(self, size: int | None = -1) -> bytes:
        """Read the rest of a line with its end, but at most `size` bytes."""
        limit = self.size if size is None or size < 0 else size
        line = bytearray()
        while len(line) < limit:
            piece = self.read(min(_LINE_BYTES, limit - len(line)))
            end = piece.find(b"\n") + 1
            if end:
                self.loc -= len(piece) - end
            line += piece[: end or None]
            if end or not piece:
                break
        return bytes(line)

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Return bytes `[start, end)` of the file; many bytes come from all parts at once."""
        count = end - start
        if count <= 0:
            return b""
        if count >= _SMALL_BYTES:
            # Fills a `bytes` object in place, because a copy could take most of the memory.
            whole = io.BytesIO(bytes(count))
            opened = self._open_in_this_process()
            with whole.getbuffer() as buffer:
                read_opened(self._storage, opened, start, buffer)
            return whole.getvalue()
        at = start - self._block_start
        if at < 0 or at + count > len(self._block):
            first, last = self._view.block_at(start), self._view.block_at(end - 1)
            opened = self._open_in_this_process()
            length = last.end - first.start
            self._block = self._storage.reader.read_bytes(opened, first.start, length)
            self._block_start = first.start
            at = start - first.start
        return self._block[at : at + count]

    def _open_in_this_process(self) -> OpenFile:
        if self._pid != os.getpid():
            # Forked: this process has a storage of its own.
            self._storage = self.fs.storage
            self._opened = self._storage.reader.open(self._view)
            self._pid = os.getpid()
        return self._opened

    def _check_readable(self) -> None:
        if self.mode != "rb":
            raise ValueError("File not in read mode")
        if self.closed:
            raise ValueError("I/O operation on closed file.")

    # ---- writing --------------------------------------------------------------------------

    def write(self, data: Any) -> int:
        """Add `data` at the end. Raises the storage's error, of this write or an earlier one."""
        if self.mode == "rb":
            raise ValueError("File not in write mode")
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        view = memoryview(data)
        if view.nbytes:
            self._writer.append(view.cast("B"))
            self.loc += view.nbytes
        return view.nbytes

    def flush(self, force: bool = False) -> None:
        """Do nothing: written bytes are sent in the background, and become visible at `close`."""
        if self.closed:
            raise ValueError("Flush on closed file")

    def commit(self) -> None:
        """Make the file visible, whole. If this raises, the file does not become visible."""
        if self.mode == "rb" or self._is_done or self._pid != os.getpid():
            return
        self._is_done = True
        try:
            if self.mode == "xb" and self.fs.exists(self.path):
                raise AlreadyExistsError(f"{self.path} was made elsewhere meanwhile")
            self._writer.publish()
        finally:
            self._writer.close()

    def discard(self) -> None:
        """Drop the file: nothing of it becomes visible."""
        if self.mode == "rb" or self._is_done or self._pid != os.getpid():
            return
        self._is_done = True
        self._writer.close()

    def close(self) -> None:
        """Make the written file visible, unless this is the end of a failed `with` block."""
        if self._closed:
            return
        self._closed = True
        self._block = b""
        if self.mode == "rb":
            if self._pid == os.getpid():
                self._storage.reader.close(self._opened)
        elif self._is_unwinding():
            self.discard()
        elif self.autocommit:
            self.commit()

    def _is_unwinding(self) -> bool:
        """Return whether an exception leaves a `with` block that closes this file.

        `with fsspec.open(...)` closes its files without telling them about the exception.
        """
        error = sys.exception()
        if error is None or error is self._error_at_open:
            return False
        frame = sys._getframe(1)
        for _ in range(_EXIT_DEPTH):
            if frame.f_back is None:
                return False
            frame = frame.f_back
            if frame.f_code.co_name == "__exit__":
                return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        if self._closed:
            return
        if self.mode == "rb":
            self.close()
        elif self._pid == os.getpid() and not self._is_done:
            _log.warning("%s was never closed: nothing of it is kept", self.path)
            self.discard()
        self._closed = True

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mode != "rb":
            raise RuntimeError("Pickling a writeable file is not supported")
        return _reopen, (self.fs, self.path, self._view.identity, self.loc)


class StripedText(io.TextIOWrapper):
    """Text file that is discarded after an exception in its `with` block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and isinstance(self.buffer, StripedFile):
            self.buffer.discard()
        super().__exit__(kind, error, trace)


def _reopen(fs: AbstractFileSystem, path: str, identity: str, loc: int) -> StripedFile:
    file = StripedFile(fs, path, "rb", identity=identity)
    file.seek(loc)
    return file


def _info(name: str, status: FileStatus) -> dict[str, Any]:
    return {
        "name": name,
        "size": status.size_bytes,
        "type": "directory" if status.is_dir else "file",
        "mtime": status.modified_ns / 1e9,
        "identity": status.identity,
    }


class CheckpointFileSystem(ChainedFileSystem):  # type: ignore[misc] # fsspec has no types
    """Striped and ordinary files of one server, as fsspec sees them."""

    protocol = PROTOCOL
    # The path that a chained URL names: one instance serves all paths of a server.
    _strip_tokenize_options = ("fo",)

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        *,
        fo: str | None = None,
        stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES,
        stripe_count: int = DEFAULT_STRIPE_COUNT,
        layout: LayoutKind = "striped",
        memory_bytes: int | None = None,
        deadline_s: float | None = None,
        **storage_options: Any,
    ) -> None:
        """Make a file system; the storage is opened on first use.

        Args:
            target_protocol: Scheme of the target file system, which a chained URL names.
            target_options: fsspec's options of the target.
            fo: The path in a chained URL; ignored.
            stripe_unit_bytes: See `StripeSettings`.
            stripe_count: See `StripeSettings`.
            layout: See `StripeSettings`.
            memory_bytes: Memory of this process for all files of the target; default: the setting.
            deadline_s: Longest wait for the target without progress; default: the setting.
            storage_options: fsspec's options.

        Raises: InvalidInputError.
        """
        super().__init__(**storage_options)
        if not target_protocol:
            raise InvalidInputError(
                "the target is missing: write bootseer::hdfs://namenode/checkpoints, or give "
                "target_protocol"
            )
        settings = load_config({}).settings
        stripes = StripeSettings(
            stripe_unit_bytes,
            stripe_count,
            settings.deadline_s if deadline_s is None else deadline_s,
            layout,
        )
        options = dict(target_options or {})
        options.pop("fo", None)
        memory = memory_bytes or settings.memory_bytes
        self._is_local = target_protocol in _LOCAL
        self._root_marker = _root_marker(target_protocol)
        self._target = target_protocol
        self._shared = shared_storage(
            (target_protocol, tokenize(options), stripes, memory),
            partial(_open_storage, target_protocol, options, stripes, memory),
        )

    @property
    def storage(self) -> StripedStorage:
        """Return the storage behind this file system, which is opened on first use."""
        return self._shared.get()

    @property
    def fsid(self) -> str:
        """Return the file system's identity: one for all instances that reach the same files."""
        return f"{PROTOCOL}-{self.storage.backend.url}"

    # ---- paths ----------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return the path on the target that a URL or path means."""
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        path = fsspec.utils.stringify_path(path)
        for prefix in (f"{PROTOCOL}::", f"{PROTOCOL}://"):
            if path.startswith(prefix):
                path = path[len(prefix) :]
                if "://" in path and prefix.endswith("//"):
                    raise InvalidInputError(f"{prefix}{path}: write {PROTOCOL}::{path}")
        if "://" in path:
            target, rest = fsspec.core.split_protocol(path)
            if target in BUCKETS:
                return rest.rstrip("/")
            return fsspec.get_filesystem_class(target)._strip_protocol(path)
        return path.rstrip("/") or ("/" if path else "")

    def unstrip_protocol(self, name: str) -> str:
        """Return the full URL of a path."""
        path = self._strip_protocol(name)
        base = {"hdfs": self.storage.backend.url.rstrip("/"), "file": "file://", "local": "file://"}
        start = base.get(self._target, f"{self._target}:/")
        return f"{PROTOCOL}::{start}/{path.lstrip('/')}"

    def key(self, path: str, *, follow: bool = True) -> str:
        """Return the backend's path for a path of the target. Raises: NotFoundError if hidden.

        On a local file system symbolic links are followed; of the last name only with `follow`.
        """
        stripped: str = self._strip_protocol(path)
        if self._is_local:
            stripped = os.path.abspath(stripped or "/")
            if follow:
                stripped = os.path.realpath(stripped)
            else:
                parent, name = os.path.split(stripped)
                stripped = os.path.join(os.path.realpath(parent), name)
        names = [name for name in stripped.split("/") if name]
        if any(map(is_hidden, names)):
            raise NotFoundError(f"{path} does not exist")
        return "/".join(names)

    def shown_name(self, path: str) -> str:
        """Return a path as listings show it."""
        stripped: str = self._strip_protocol(path)
        marker: str = self._root_marker
        return marker + "/".join(name for name in stripped.split("/") if name)

    # ---- status ---------------------------------------------------------------------------

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return name, size, type, mtime (seconds) and identity (one for each generation)."""
        key = self.key(path)
        if not key:
            return _info(self.shown_name(path), FileStatus("", True, 0, 0, ""))
        return _info(self.shown_name(path), self.storage.tree.stored.status(key))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List a directory, or one file. The storage is asked each time."""
        name = self.shown_name(path)
        stored = self.storage.tree.stored
        key = self.key(path)
        status = stored.status(key) if key else None
        if status is not None and not status.is_dir:
            return [_info(name, status)] if detail else [name]
        prefix = name if name.endswith("/") or not name else name + "/"
        found: list[Any] = []
        for info in stored.entries(key):
            name = prefix + info.path.rpartition("/")[2]
            if not detail:
                found.append(name)
                continue
            with contextlib.suppress(NotFoundError):  # Removed since it was listed.
                found.append(_info(name, stored.shown(info)))
        return found

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Return whether anything is at a path. Raises if the storage does not answer."""
        try:
            key = self.key(path)
            return not key or bool(self.storage.backend.stat(key))
        except NotFoundError:
            return False

    def created(self, path: str) -> datetime:
        """Return when the file's current content was saved: each save is a new file."""
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        """Return when the file was last changed."""
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    # ---- contents -------------------------------------------------------------------------

    def open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Open a file as any fsspec file system does.

        A written file appears at `close`, whole, or not at all if an exception leaves the `with`
        block.
        """
        if kwargs.get("compression") and "r" not in mode:
            # The compressor would not close the file, so it would never be complete.
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
        # The storage caches and reads ahead for all files: fsspec's options for that are ignored.
        return StripedFile(self, path, mode, block_size=block_size, autocommit=autocommit)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Return bytes `[start, end)` of a file, as a slice would take them."""
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
        """Return the bytes of ranges, read several at once, or an exception for one that failed."""
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
                # fsspec returns any error in place of the range.
                if on_error == "return":
                    return error
                raise

        with ThreadPoolExecutor(_RANGES_AT_ONCE) as threads:
            return list(threads.map(read, paths, starts, ends))

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Store `value`; with mode "create" only if the file does not exist."""
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
        """Copy one file to the local disk, whole or not at all, or into a file object."""
        sink = lpath if outfile is None and isfilelike(lpath) else outfile
        if sink is not None:
            with self.open(rpath) as file:
                callback.set_size(file.size)
                while data := file.read(_STEP_BYTES):
                    sink.write(data)
                    callback.relative_update(len(data))
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
        """Remove a file or an empty directory. Readers of the file in this process read on."""
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
        """Rename a file or a directory in one step if the target can, else copy and remove it.

        Some targets can rename only directories, and striped files within their directory.
        """
        if path1 == path2:
            return
        if isinstance(path1, str) and isinstance(path2, str) and not has_magic(path1):
            if self.key(path1) == self.key(path2):
                # Copying the file onto itself and removing it would lose it.
                return
            if maxdepth is None:
                if path2.endswith("/") or self.isdir(path2):
                    path2 = f"{path2.rstrip('/')}/{self.shown_name(path1).rpartition('/')[2]}"
                if self._rename(path1, path2):
                    return
        if isinstance(path1, str) and self.isdir(path1):
            recursive = True
        # The base class, up to fsspec 2026.1, also removes files that could not be copied.
        self.copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise")
        self.rm(path1, recursive=recursive)

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


def _root_marker(protocol: str) -> str:
    # Buckets are reached without the package that fsspec has for them.
    if protocol in BUCKETS:
        return ""
    marker: str = fsspec.get_filesystem_class(protocol).root_marker
    return marker


def _open_storage(
    protocol: str, options: dict[str, Any], stripes: StripeSettings, memory_bytes: int
) -> StripedStorage:
    backend = _open_backend(protocol, options, stripes.deadline_s)
    return StripedStorage(backend, stripes, memory_bytes=memory_bytes)


def _open_backend(protocol: str, options: dict[str, Any], deadline_s: float) -> Backend:
    """Return the root of the file system that fsspec would open with these options."""
    if protocol in _LOCAL:
        return open_backend("/", deadline_s=deadline_s)
    if protocol == "hdfs":
        host = str(options.get("host", ""))
        user = f"{quote(str(options['user']))}@" if options.get("user") else ""
        port = f":{options['port']}" if options.get("port") else ""
        query = f"?replication={options['replication']}" if options.get("replication") else ""
        return open_backend(f"hdfs://{user}{host}{port}/{query}", deadline_s=deadline_s)
    if protocol in BUCKETS:
        from bootseer.store.buckets.backend import BucketBackend

        return BucketBackend(f"{protocol}://", options, deadline_s=deadline_s)
    from bootseer.store.generic import FsspecBackend

    return FsspecBackend(f"{protocol}://", options)


_lock = threading.Lock()
_shared_storages: "weakref.WeakValueDictionary[Hashable, SharedStorage]" = (
    weakref.WeakValueDictionary()
)
# Storages that a forked child inherited. Kept, because dropping one could wait for its threads.
_inherited: list[StripedStorage] = []


class SharedStorage:
    """Storage that is opened on first use, and closed after its last user."""

    def __init__(self, make: Callable[[], StripedStorage]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._opened: list[StripedStorage] = []
        weakref.finalize(self, _close, os.getpid(), self._opened)

    def get(self) -> StripedStorage:
        """Return the storage of this process."""
        with self._lock:
            if not self._opened:
                self._opened.append(self._make())
            return self._opened[0]

    def after_fork(self) -> None:
        """Forget the parent's storages in a forked child, where its threads' locks stay locked."""
        self._lock = threading.Lock()
        _inherited.extend(self._opened)
        self._opened = []
        weakref.finalize(self, _close, os.getpid(), self._opened)


def shared_storage(key: Hashable, make: Callable[[], StripedStorage]) -> SharedStorage:
    """Return the storage that all code of this process shares for `key`."""
    with _lock:
        found = _shared_storages.get(key)
        if found is None:
            found = _shared_storages[key] = SharedStorage(make)
        return found


def _close(pid: int, opened: list[StripedStorage]) -> None:
    if pid == os.getpid():
        while opened:
            opened.pop().close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for shared in list(_shared_storages.values()):
        shared.after_fork()


os.register_at_fork(after_in_child=_after_fork)
