"""Any other fsspec URL (`memory://`, `s3://`, ...) as a backend.

Owns what is promised there. An object appears whole, by the file system's own put when it is
closed. Exclusive creation is as atomic as the file system's `create` mode (S3 and GCS:
conditional put), and is decided by `close`. Rename is a copy and a delete, so not atomic. The
file system's own time-outs apply. Thread-safe as far as the fsspec file system is.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import IO, Any
from urllib.parse import urlsplit

from bootseer.base.redact import names_user, public_url, redact
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.store.backend import FileInfo, Space
from bootseer.store.generic.ranged import comes_in_pieces, read_pieces
from bootseer.store.generic.spool import SPOOL_BYTES, SpoolingWriter
from bootseer.store.paths import Folder, split_path, split_scheme
from bootseer.transfer.attempt import Attempt

_PIECE_BYTES = 8 << 20
# Where an object appears whole, or not at all, under its name: others write files as they come.
_OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss"))
# fsspec's memory file system checks and creates in two steps, and its readers share a cursor.
_MEMORY_LOCK = threading.RLock()


class FsspecBackend(Folder):
    """Files beneath one prefix of an fsspec file system."""

    has_atomic_rename = False

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """`options`: what fsspec passes to the file system besides the URL."""
        import fsspec

        self.url = public_url(url)
        protocol = split_scheme(url)
        self._is_object_store = protocol in _OBJECT_STORES
        what = f"open {self.url}"
        if protocol in ("s3", "s3a") and names_user(url):
            # s3fs would take them for a part of the bucket's name, and say so in each message.
            raise InvalidInputError(
                f"cannot {what}: S3 takes no credentials from a URL; use AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"
            )
        try:
            # aiohttp would find it out with the first request.
            urlsplit(url)
            options = dict(options or {})
            if self._is_object_store:
                # Others write there too: what was listed a minute ago is no answer.
                options.setdefault("use_listings_cache", False)
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except OSError as error:
            # Some connect at once.
            if error.errno and error.errno > 0:
                raise from_oserror(error, what) from error
            raise UnavailableError(f"cannot {what}: {redact(str(error))}") from error
        except Exception as error:
            # Whatever the file system's own constructor does not like about the URL.
            reason = redact(str(error)) or type(error).__name__
            raise InvalidInputError(f"cannot {what}: {reason}") from error
        self._root = str(root).rstrip("/")
        self._comes_in_pieces = comes_in_pieces(self._fs)
        memory = protocol == "memory"
        self.has_atomic_put = self._is_object_store or memory
        self._guard: Any = _MEMORY_LOCK if memory else contextlib.nullcontext()

    def stat(self, path: str) -> FileInfo:
        full = self._full(path)
        with self._guard, self._errors("look at", path):
            return _info(path, self._fs.info(full))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidInputError(f"the range ({offset}, {length}) is negative")
        full = self._full(path)
        end = None if length is None else offset + length
        with self._guard, self._errors("read", path):
            if length != 0:
                with self._nothing_behind_end(full, offset):
                    return bytes(self._fs.cat_file(full, start=offset, end=end))
            if self._fs.info(full)["type"] == "directory":
                raise FileNotFoundError(full)
            return b""

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        if attempt is None or not buffer or not self._comes_in_pieces or offset < 0:
            data = self.read(path, offset, len(buffer))
            (attempt or Attempt()).put(0, buffer, data)
            return len(data)
        full = self._full(path)
        with self._errors("read", path), self._nothing_behind_end(full, offset):
            return read_pieces(self._fs, full, offset, buffer, attempt)
        return 0

    @contextlib.contextmanager
    def _nothing_behind_end(self, full: str, offset: int) -> Iterator[None]:
        """Some answer a range behind the end with an error ("416 Range Not Satisfiable")."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception:
            if not offset or offset < self._fs.info(full)["size"]:
                raise

    def create(self, path: str, *, overwrite: bool = False) -> SpoolingWriter:
        full = self._full(path, file=True)
        with self._guard, self._errors("create", path):
            if not overwrite and self._fs.exists(full):
                raise FileExistsError("it exists already")
        return SpoolingWriter(partial(self._put, path, overwrite=overwrite), self._name(path))

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        old, new = self._full(source, file=True), self._full(target, file=True)
        if self.stat(source).is_dir:
            raise UnsupportedError(f"{self.url} cannot rename a folder in one step")
        with self._guard, self._errors(f"rename {self._name(source)} to", target):
            if overwrite:
                self._fs.cp_file(old, new)
            else:
                with self.create(target) as writer, self._fs.open(old, "rb") as file:
                    while piece := file.read(_PIECE_BYTES):
                        writer.write(piece)
            self._fs.rm_file(old)

    def list(self, path: str) -> Iterator[FileInfo]:
        full = self._full(path)
        skip = len(full.strip("/")) + 1 if full.strip("/") else 0
        prefix = path + "/" if path else ""
        found = []
        with self._guard, self._errors("list", path):
            # refresh: a listing of a minute ago is no answer about a store that others write to.
            for entry in self._fs.ls(full, detail=True, refresh=True):
                name = entry["name"].strip("/")[skip:]
                is_marker = entry["name"].endswith("/")
                if not name and entry["type"] == "file" and not is_marker:
                    raise FileNotFoundError("not a folder")
                if name:
                    found.append(_info(prefix + name, entry))
        found.sort(key=lambda info: info.path)
        return iter(found)

    def mkdir(self, path: str) -> None:
        full = self._full(path)
        with self._guard, self._errors("create", path):
            if self._is_object_store and "/" in full.strip("/"):
                # There are no folders: an empty object of this name makes one seen everywhere.
                self._fs.pipe_file(f"{full}/", b"")
            else:
                self._fs.makedirs(full, exist_ok=True)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        full = self._full(path, file=True)
        with contextlib.suppress(NotFoundError), self._guard, self._errors("delete", path):
            if self._fs.info(full)["type"] != "directory":
                self._fs.rm_file(full)
            elif recursive:
                self._fs.rm(full, recursive=True)
            elif any(name.strip("/") != full.strip("/") for name in self._names_in(full)):
                raise AlreadyExistsError(
                    f"cannot delete {self._name(path)}: the folder is not empty"
                )
            elif self._is_object_store:
                self._fs.rm_file(f"{full}/")
            else:
                self._fs.rmdir(full)

    def _names_in(self, full: str) -> Iterator[str]:
        return iter(self._fs.ls(full, detail=False, refresh=True))

    def space(self) -> Space | None:
        """None: fsspec has no call for it."""
        return None

    def close(self) -> None:
        """Nothing to release: fsspec keeps and shares its connections."""

    def _put(self, path: str, spool: IO[bytes], size_bytes: int, *, overwrite: bool) -> None:
        full = self._full(path)
        with self._guard, self._errors("write", path):
            parent = full.rpartition("/")[0]
            if parent.strip("/") and not hasattr(self._fs, "s3"):
                self._fs.makedirs(parent, exist_ok=True)
            if size_bytes <= SPOOL_BYTES:
                mode = "overwrite" if overwrite else "create"
                self._fs.pipe_file(full, spool.read(), mode=mode)
                return
            with self._fs.open(full, "wb" if overwrite else "xb") as file:
                while piece := spool.read(_PIECE_BYTES):
                    file.write(piece)

    @contextlib.contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        what = f"{verb} {self._name(path)}"
        try:
            yield
        except BootseerError:
            raise
        except FileNotFoundError as error:
            raise NotFoundError(f"cannot {what}: it does not exist") from error
        except FileExistsError as error:
            raise AlreadyExistsError(f"cannot {what}: it exists already") from error
        except PermissionError as error:
            raise PermissionDeniedError(f"cannot {what}: {redact(str(error))}") from error
        except IsADirectoryError as error:
            raise InvalidInputError(f"cannot {what}: it is a folder") from error
        except NotImplementedError as error:
            raise UnsupportedError(f"cannot {what}: the file system has no such call") from error
        except OSError as error:
            if error.errno:
                raise from_oserror(error, what) from error
            raise UnavailableError(f"cannot {what}: {redact(str(error))}") from error
        except Exception as error:
            # The libraries behind fsspec have exceptions of their own (aiohttp, ftplib, ...).
            reason = redact(str(error)) or type(error).__name__
            raise UnavailableError(f"cannot {what}: {reason}") from error

    def _full(self, path: str, *, file: bool = False) -> str:
        names = self._names_of_file(path) if file else split_path(path)
        return "/".join((self._root, *names))


def _info(path: str, entry: dict[str, Any]) -> FileInfo:
    is_dir = entry["type"] == "directory"
    when = next(
        (entry[key] for key in ("LastModified", "mtime", "modified", "created") if entry.get(key)),
        0,
    )
    seconds = when.timestamp() if isinstance(when, datetime) else when
    modified_ns = int(seconds * 1e9) if isinstance(seconds, int | float) else 0
    return FileInfo(path, 0 if is_dir else int(entry.get("size") or 0), modified_ns, is_dir)
