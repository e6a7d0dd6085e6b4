"""Backend for any fsspec URL without a backend of its own (`memory://`, `sftp://`, `webhdfs://`...).

An object appears whole: its writer stores it by one put when it is closed. Exclusive creation is as
atomic as the file system's `create` mode, and is decided in `close`. Rename is a copy and a delete,
so it is not atomic.

Every call ends at the deadline when no bytes have moved for so long, whatever the file system's own
time-outs are. A request that sends or copies a whole object reports no progress, and gets more time
by its size (`SLOWEST_BYTES_PER_S`). As thread-safe as the fsspec file system.
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from bootseer.base.redact import public_url, redact
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    BusyError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.store.backend import Backend, FileInfo, Traits
from bootseer.store.deadline import (
    DEFAULT_DEADLINE_S,
    SLOWEST_BYTES_PER_S,
    Call,
    DeadlineCaller,
)
from bootseer.store.paths import check_range, split_path, split_scheme
from bootseer.store.spool import SPOOL_BYTES, SpoolingWriter

Result = TypeVar("Result")

_PIECE_BYTES = 8 << 20
# fsspec's memory file system checks and creates in two steps, and its readers share one position.
_MEMORY_LOCK = threading.RLock()


class FsspecBackend(Backend):
    """Files below one prefix of an fsspec file system."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """Look up the class of the file system. Raises: InvalidInputError.

        `options` are passed to the file system besides the URL.
        """
        self.url = public_url(url)
        self._deadline_s = deadline_s or DEFAULT_DEADLINE_S
        self._caller = DeadlineCaller("bootseer-fsspec")
        self._is_memory = split_scheme(url) == "memory"
        self._guard: Any = _MEMORY_LOCK if self._is_memory else contextlib.nullcontext()
        self.traits = Traits(one_step_replace=self._is_memory)
        self._opened: tuple[Any, str] | None = None
        import fsspec

        def url_to_fs() -> tuple[Any, str]:
            fs, root = fsspec.core.url_to_fs(url, **(options or {}))
            return fs, str(root).rstrip("/")

        self._url_to_fs = url_to_fs
        try:
            # Raises ValueError now; some file systems would fail with the first request.
            urlsplit(url)
            of_class = fsspec.get_filesystem_class(split_scheme(url))
            if getattr(of_class, "async_impl", False) or self._is_memory:
                # No connection is made here. fsspec caches these objects per thread, so that a
                # helper thread would get another one.
                self._opened = url_to_fs()
        except Exception as error:
            raise self._not_opened(error) from error

    @property
    def _fs(self) -> Any:
        """The file system; its first use connects. Raises: BootseerError."""
        return self._open()[0]

    def _open(self) -> tuple[Any, str]:
        """Return the file system, and the path of the root in it. Raises: BootseerError."""
        opened = self._opened
        if opened is None:
            try:
                opened = self._caller.run(
                    lambda _: self._url_to_fs(), self._deadline_s, f"open {self.url}"
                )
            except BootseerError:
                raise
            except Exception as error:
                raise self._not_opened(error) from error
            # Threads that open it at once get one object from fsspec, or connect twice.
            self._opened = opened
        return opened

    def _not_opened(self, error: Exception) -> BootseerError:
        """Return the BootseerError for an exception of the file system's constructor."""
        what = f"open {self.url}"
        if isinstance(error, OSError) and error.errno and error.errno > 0:
            return from_oserror(error, what)
        reason = redact(str(error)) or type(error).__name__
        if isinstance(error, OSError):
            return UnavailableError(f"cannot {what}: {reason}")
        # Constructors raise exceptions of any class for a URL that they do not accept.
        return InvalidInputError(f"cannot {what}: {reason}")

    def _run(
        self, verb: str, path: str, work: Callable[[Call[Any]], Result], *, more_s: float = 0.0
    ) -> Result:
        """Return the result of `work`, which may take `more_s` longer than the deadline.

        Raises: BootseerError.
        """
        what = f"{verb} {self._name(path)}"

        def guarded(call: Call[Any]) -> Result:
            try:
                with self._guard:
                    return work(call)
            except BootseerError:
                raise
            except Exception as error:
                raise self._translate(error, what) from error

        if self._is_memory:
            return guarded(Call(guarded))
        result: Result = self._caller.run(guarded, self._deadline_s + more_s, what)
        return result

    def stat(self, path: str) -> FileInfo:
        full = self._full(path)
        return self._run("look at", path, lambda _: _info(path, self._fs.info(full)))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_range(offset, length)
        full = self._full(path)
        return self._run("read", path, lambda call: self._read(call, full, offset, length))

    def _read(self, call: Call[Any], full: str, offset: int, length: int | None) -> bytes:
        if length == 0:
            if self._fs.info(full)["type"] == "directory":
                raise FileNotFoundError(full)
            return b""
        end = None if length is None else offset + length
        pieces: list[bytes] = []
        while end is None or offset < end:
            # With the lock of the memory file system held, all bytes belong to one version.
            wanted = None if self._is_memory else offset + _PIECE_BYTES
            until = min((one for one in (wanted, end) if one is not None), default=None)
            with self._nothing_behind_end(full, offset):
                pieces.append(bytes(self._fs.cat_file(full, start=offset, end=until)))
                offset += len(pieces[-1])
            call.progress()
            if until is None or offset < until:
                break
        return b"".join(pieces)

    @contextlib.contextmanager
    def _nothing_behind_end(self, full: str, offset: int) -> Iterator[None]:
        """Ignore an error for a range beyond the end of the file ("416 Range Not Satisfiable")."""
        try:
            yield
        except (FileNotFoundError, PermissionError):
            raise
        except Exception:
            if offset < self._fs.info(full)["size"]:
                raise

    def create(self, path: str, *, overwrite: bool = False) -> SpoolingWriter:
        full = self._full(path, file=True)
        if not overwrite:
            self._run("create", path, lambda _: self._refuse_existing(full))
        return SpoolingWriter(partial(self._put, path, overwrite=overwrite), self._name(path))

    def _refuse_existing(self, full: str) -> None:
        # Not every file system supports the mode "create", so the check is made before the write.
        if self._fs.exists(full):
            raise FileExistsError("it exists already")

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        old, new = self._full(source, file=True), self._full(target, file=True)
        info = self.stat(source)
        if info.is_dir:
            raise UnsupportedError(f"{self.url} cannot rename a folder in one step")

        def move(call: Call[Any]) -> None:
            if overwrite:
                self._fs.cp_file(old, new)
            else:
                self._refuse_existing(new)
                with (
                    tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool,
                    self._fs.open(old, "rb") as file,
                ):
                    while piece := file.read(_PIECE_BYTES):
                        spool.write(piece)
                        call.progress()
                    size_bytes = spool.tell()
                    spool.seek(0)
                    self._send(call, new, spool, size_bytes, overwrite=False)
            self._fs.rm_file(old)

        more_s = info.size_bytes / SLOWEST_BYTES_PER_S
        self._run(f"rename {self._name(source)} to", target, move, more_s=more_s)

    def list(self, path: str) -> Iterator[FileInfo]:
        full = self._full(path)
        skip = len(full.strip("/")) + 1 if full.strip("/") else 0
        prefix = path + "/" if path else ""

        def list_folder(_: Call[Any]) -> list[FileInfo]:
            found = []
            for entry in self._entries(full):
                name = entry["name"].strip("/")[skip:]
                is_marker = entry["name"].endswith("/")
                if not name and entry["type"] == "file" and not is_marker:
                    raise FileNotFoundError("not a folder")
                if name:
                    found.append(_info(prefix + name, entry))
            return found

        return iter(sorted(self._run("list", path, list_folder), key=lambda info: info.path))

    def _entries(self, full: str) -> Sequence[dict[str, Any]]:
        # refresh: other processes write to the store, so a cached listing would be wrong.
        entries: list[dict[str, Any]] = self._fs.ls(full, detail=True, refresh=True)
        return entries

    def mkdir(self, path: str) -> None:
        full = self._full(path)
        self._run("create", path, lambda _: self._fs.makedirs(full, exist_ok=True))

    def delete(self, path: str, *, recursive: bool = False) -> None:
        full = self._full(path, file=True)

        def delete(_: Call[Any]) -> None:
            if self._fs.info(full)["type"] != "directory":
                self._fs.rm_file(full)
            elif recursive:
                self._fs.rm(full, recursive=True)
            elif any(entry["name"].strip("/") != full.strip("/") for entry in self._entries(full)):
                raise AlreadyExistsError(
                    f"cannot delete {self._name(path)}: the folder is not empty"
                )
            else:
                self._fs.rmdir(full)

        with contextlib.suppress(NotFoundError):
            self._run("delete", path, delete)

    def close(self) -> None:
        """Release the helper threads; fsspec keeps its connections."""
        self._caller.close()

    def _put(self, path: str, spool: IO[bytes], size_bytes: int, *, overwrite: bool) -> None:
        full = self._full(path)
        self._run(
            "write",
            path,
            lambda call: self._send(call, full, spool, size_bytes, overwrite=overwrite),
            more_s=min(size_bytes, SPOOL_BYTES) / SLOWEST_BYTES_PER_S,
        )

    def _send(
        self, call: Call[Any], full: str, spool: IO[bytes], size_bytes: int, *, overwrite: bool
    ) -> None:
        """Write the object `full` from `spool`.

        Without `overwrite`, one of several senders succeeds. Raises: FileExistsError for the
        others; any exception of the file system.
        """
        parent = full.rpartition("/")[0]
        if parent.strip("/"):
            self._fs.makedirs(parent, exist_ok=True)
        if size_bytes <= SPOOL_BYTES:
            self._fs.pipe_file(full, spool.read(), mode="overwrite" if overwrite else "create")
            return
        file = self._fs.open(full, "wb" if overwrite else "xb")
        try:
            while piece := spool.read(_PIECE_BYTES):
                if call.abandoned:
                    raise TimeoutError("the caller does not wait any more")
                file.write(piece)
                call.progress()
        except BaseException:
            # Closing the file would create an object from the pieces that were sent.
            if hasattr(file, "discard"):
                with contextlib.suppress(Exception):
                    file.discard()
                file.closed = True
            else:
                file.close()
                with contextlib.suppress(Exception):
                    self._fs.rm_file(full)
            raise
        file.close()

    def _translate(self, error: Exception, what: str) -> BootseerError:
        """Return the BootseerError for an exception of the file system."""
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"cannot {what}: it does not exist")
        if isinstance(error, FileExistsError):
            return AlreadyExistsError(f"cannot {what}: it exists already")
        reason = redact(str(error)) or type(error).__name__
        if isinstance(error, PermissionError):
            return PermissionDeniedError(f"cannot {what}: {reason}")
        if isinstance(error, IsADirectoryError):
            return InvalidInputError(f"cannot {what}: it is a folder")
        if isinstance(error, NotImplementedError):
            return UnsupportedError(f"cannot {what}: the file system has no such call")
        if isinstance(error, OSError) and error.errno:
            ours = from_oserror(error, what)
            # EBUSY from a server is an overloaded server, not a resource that a process holds.
            return UnavailableError(*ours.args) if isinstance(ours, BusyError) else ours
        # Libraries behind fsspec raise exceptions of their own (requests, ftplib, ...).
        return UnavailableError(f"cannot {what}: {reason}")

    def _full(self, path: str, *, file: bool = False) -> str:
        names = self._names_of_file(path) if file else split_path(path)
        return "/".join((self._open()[1], *names))


def _info(path: str, entry: dict[str, Any]) -> FileInfo:
    is_dir = entry["type"] == "directory"
    when = next(
        (entry[key] for key in ("LastModified", "mtime", "modified", "created") if entry.get(key)),
        0,
    )
    seconds = when.timestamp() if isinstance(when, datetime) else when
    modified_ns = int(seconds * 1e9) if isinstance(seconds, int | float) else 0
    return FileInfo(path, 0 if is_dir else int(entry.get("size") or 0), modified_ns, is_dir)
