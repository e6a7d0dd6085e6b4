"""`hdfs://`: HDFS through hdfs-native (Rust, no JVM), as a backend.

Owns the mapping of paths, the deadline of every call, and the work-arounds for reading with
hdfs-native 0.14.7 (writing is in `hdfs_writer`). Options in the URL's query: `deadline_s` (no call
goes on for longer without progress; default: what the caller says, else 60), `block_size_bytes`
and `replication` of new files (the cluster's defaults). Permissions: those of the root folder; a
root made here is private.

Every method is thread-safe.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from bootseer.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from bootseer.redact import public_url
from bootseer.store.backend import FileInfo, Space
from bootseer.store.deadline import Call, DeadlineCaller
from bootseer.store.hdfs_errors import translate
from bootseer.store.hdfs_writer import HdfsWriter
from bootseer.store.paths import split_path

if TYPE_CHECKING:
    from hdfs_native import Client, FileStatus

Result = TypeVar("Result")

_DEADLINE_S = 60.0
# More parallel calls than any plan of ours makes; a call that is stuck keeps one.
_THREADS_MAX = 128
_REPLACE_DATANODE = "dfs.client.block.write.replace-datanode-on-failure"


class HdfsBackend:
    """Files beneath one folder of an HDFS."""

    has_atomic_rename = True

    def __init__(self, url: str, *, deadline_s: float | None = None) -> None:
        options = _Options(url, deadline_s or _DEADLINE_S)
        parts = urlsplit(url, allow_fragments=False)
        self.url = public_url(url)
        self._cluster = f"{parts.scheme}://{parts.netloc}"
        # Hadoop does not percent-decode paths, so neither is done here.
        self._root = "/" + "/".join(split_path(parts.path.strip("/")))
        self.deadline_s = options.deadline_s
        self._options = options
        self._connect()
        self._mode_or_none: int | None = None

    def _connect(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._caller = DeadlineCaller(_THREADS_MAX, "bootseer-hdfs")
        self._client_or_none: Client | None = None

    def stat(self, path: str) -> FileInfo:
        full = self._full(path)
        status = self.call(lambda client: client.get_file_info(full), "look at", path)
        return _info(path, status)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        full = self._full(path)

        def work(call: Call[bytes]) -> bytes:
            chunks = []
            for chunk in self._stream(full, offset, length):
                chunks.append(chunk)
                call.progress_count += 1
                if call.abandoned:
                    break
            # One copy; a bytearray turned into bytes would be two.
            return b"".join(chunks)

        return self.run(work, "read", path)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        full = self._full(path)

        def work(call: Call[int]) -> int:
            done = 0
            for chunk in self._stream(full, offset, len(buffer)):
                with call.handover:
                    if call.abandoned:
                        break
                    buffer[done : done + len(chunk)] = chunk
                done += len(chunk)
                call.progress_count += 1
            return done

        return self.run(work, "read", path)

    def _stream(self, full: str, offset: int, length: int | None) -> Iterator[bytes]:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidInputError(f"the range ({offset}, {length}) is negative")
        reader = self._client().read(full)
        # Reading past the end is a panic of the Rust code, so never ask for it.
        wanted = max(0, len(reader) - offset)
        if length is not None:
            wanted = min(wanted, length)
        if not wanted:
            return iter(())
        stream: Iterator[bytes] = reader.read_range_stream(offset, wanted)
        return stream

    def create(self, path: str, *, overwrite: bool = False) -> HdfsWriter:
        full = self._full(path, file=True)
        return HdfsWriter(self, path, full).open(overwrite=overwrite)

    def create_raw(self, path: str, *, overwrite: bool, replication: int | None = None) -> Any:
        """A new file as hdfs-native's own writer, for `HdfsWriter`."""
        full = self._full(path)
        return self.call(
            # `inner`: the Python wrapper is an io.RawIOBase, whose finalizer closes, which would
            # make a half-written file look complete.
            lambda client: client.inner.create(full, self._write_options(overwrite, replication)),
            "create",
            path,
        )

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        old, new = self._full(source, file=True), self._full(target, file=True)
        verb = f"rename {self.name(source)} to"

        def move(client: "Client") -> None:
            try:
                client.rename(old, new, overwrite)
            except FileNotFoundError:
                client.get_file_info(old)  # raises the same when it is the source that is missing
                client.mkdirs(new.rpartition("/")[0] or "/", self._mode(client), True)
                client.rename(old, new, overwrite)

        self.call(move, verb, target)

    def list(self, path: str) -> Iterator[FileInfo]:
        full = self._full(path)

        def work(call: Call[list[FileInfo]]) -> list[FileInfo]:
            found = []
            for status in self._client().list_status(full):
                if status.path == full and not status.isdir:
                    raise NotFoundError("not a folder")
                name = status.path.rpartition("/")[2]
                found.append(_info(f"{path}/{name}" if path else name, status))
                call.progress_count += 1
            return found

        infos = self.run(work, "list", path)
        infos.sort(key=lambda info: info.path)
        return iter(infos)

    def mkdir(self, path: str) -> None:
        full = self._full(path)
        try:
            self.call(lambda client: client.mkdirs(full, self._mode(client), True), "create", path)
        except AlreadyExistsError as error:
            raise InvalidInputError(str(error)) from error

    def delete(self, path: str, *, recursive: bool = False) -> None:
        full = self._full(path, file=True)
        with contextlib.suppress(NotFoundError):
            self.call(lambda client: client.delete(full, recursive), "delete", path)

    def space(self) -> Space | None:
        """None: hdfs-native has no call for it, and a content summary walks the whole tree."""
        return None

    def close(self) -> None:
        self._caller.close()
        self._client_or_none = None

    def call(self, function: "Callable[[Client], Result]", verb: str, path: str) -> Result:
        """What `function` returns, within the deadline; errors say `verb` and `path`."""
        return self.run(lambda _: function(self._client()), verb, path)

    def run(self, work: Callable[[Call[Result]], Result], verb: str, path: str) -> Result:
        """As `call`, for work that reports its progress."""
        if self._pid != os.getpid():
            self._connect()  # forked: the parent's threads and connections stayed there
        try:
            return self._caller.run(work, self.deadline_s)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # PanicException is no Exception
            raise translate(error, f"{verb} {self.name(path)}") from error

    def _client(self) -> "Client":
        """The connection, made by the first call (so that opening a store costs nothing)."""
        with self._lock:
            if self._client_or_none is None:
                from hdfs_native import Client

                config = {
                    # A DataNode that hangs is left in time for another replica to be tried.
                    "dfs.client.socket-timeout": str(int(self.deadline_s * 500)),
                    # On a cluster with no DataNode to spare, a write goes on with those that
                    # are left (and the NameNode replicates later) rather than fail.
                    f"{_REPLACE_DATANODE}.best-effort": "true",
                }
                try:
                    self._client_or_none = Client(self._cluster, config)
                except (RuntimeError, ValueError) as error:
                    raise InvalidInputError(f"cannot use {self._cluster}: {error}") from error
            return self._client_or_none

    def _mode(self, client: "Client") -> int:
        """Permission bits for folders: the root's, but never write for others."""
        if self._mode_or_none is None:
            try:
                mode = client.get_file_info(self._root).permission
            except FileNotFoundError:
                client.mkdirs(self._root, 0o700, True)
                mode = 0o700
            self._mode_or_none = mode & 0o775 | 0o700
        return self._mode_or_none

    def _write_options(self, overwrite: bool, replication: int | None) -> Any:
        from hdfs_native import WriteOptions

        return WriteOptions(
            block_size=self._options.block_size_bytes,
            replication=replication or self._options.replication,
            permission=self._mode(self._client()) & 0o664,
            overwrite=overwrite,
            create_parent=True,
        )

    def _full(self, path: str, *, file: bool = False) -> str:
        names = split_path(path)
        if file and not names:
            raise InvalidInputError(f"the root of {self.url} is a folder and stays one")
        return "/".join((self._root.rstrip("/"), *names)) or "/"

    def name(self, path: str) -> str:
        """The full URL, for messages."""
        return f"{self.url}/{path}" if path else self.url


class _Options:
    """What the query of an `hdfs://` URL says."""

    def __init__(self, url: str, deadline_s: float) -> None:
        try:
            query = urlsplit(url, allow_fragments=False).query
            values = {
                key: each[-1] for key, each in parse_qs(query, strict_parsing=bool(query)).items()
            }
            self.deadline_s = float(values.pop("deadline_s", deadline_s))
            block_size_bytes = int(values.pop("block_size_bytes", 0))
            replication = int(values.pop("replication", 0))
        except ValueError as error:
            raise InvalidInputError(f"{public_url(url)!r} is not a usable URL: {error}") from error
        if values or self.deadline_s <= 0 or block_size_bytes < 0 or replication < 0:
            raise InvalidInputError(
                f"{public_url(url)}: options are deadline_s, block_size_bytes, replication; "
                "each a positive number"
            )
        self.block_size_bytes = block_size_bytes or None
        self.replication = replication or None


def _info(path: str, status: "FileStatus") -> FileInfo:
    size_bytes = 0 if status.isdir else status.length
    return FileInfo(path, size_bytes, status.modification_time * 1_000_000, status.isdir)
