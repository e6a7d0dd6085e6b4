"""Backend for the files below one folder of an HDFS cluster (`hdfs://`).

Three clients share the work. hdfs-native (`native`) does names, folders and streams. Our own RPC
calls (`namenode`) do what hdfs-native lacks. Small files, and bytes for which Bootseer has
checksums, go to and from DataNodes directly (`reading`, `direct_write`). Options in the URL's
query: `deadline_s` (longest time of a call without progress; by default the caller's, else 60),
`block_size_bytes` and `replication` of new files (the cluster's defaults). New files and folders
get the root folder's permissions; a root that is created is private.

Every method is thread-safe.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from bootseer.base.redact import public_url
from bootseer.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
)
from bootseer.store.backend import Backend, FileInfo, Space, Traits
from bootseer.store.deadline import DEFAULT_DEADLINE_S, Call
from bootseer.store.hdfs.direct_write import Placer
from bootseer.store.hdfs.namenode import UNANSWERED, NameNodes, NoCallsError, RpcError
from bootseer.store.hdfs.native import Native, translate
from bootseer.store.hdfs.placement import PlacedGroup, ServerChooser
from bootseer.store.hdfs.reading import (
    SILENCES_PER_DEADLINE,
    DataNodes,
    HdfsReader,
    file_info,
    fill_buffer,
    read_bytes,
)
from bootseer.store.hdfs.writer import RETRY_IN_GROUP, HdfsWriter
from bootseer.store.paths import split_path
from bootseer.transfer.attempt import Attempt

if TYPE_CHECKING:
    from hdfs_native import Client


class HdfsBackend(Backend):
    """Files below one folder of an HDFS cluster."""

    traits = Traits(one_step_rename=True)
    # A pipeline of hdfs-native has 100 packets of 64 KiB to send and 100 to be confirmed; measured
    # 12.4 to 13.4 MiB.
    writer_bytes = 13 << 20

    def __init__(self, url: str, *, deadline_s: float | None = None) -> None:
        """Parse the URL; no request is sent. Raises: InvalidInputError."""
        self.url = public_url(url)
        # The options come first, since parsing them refuses a malformed URL.
        deadline_s, block_bytes, replication = _options(url, deadline_s or DEFAULT_DEADLINE_S)
        parts = urlsplit(url, allow_fragments=False)
        # The path is not percent-decoded, since Hadoop does not decode it either.
        self._root = "/" + "/".join(split_path(parts.path.strip("/")))
        cluster = f"{parts.scheme}://{parts.netloc}"
        self._name_nodes = NameNodes(cluster, deadline_s)
        self._native = Native(
            cluster,
            self._root,
            self._name_nodes,
            deadline_s=deadline_s,
            block_bytes=block_bytes,
            replication=replication,
        )
        self._placer = Placer(self._name_nodes)
        self._placement = ServerChooser()
        self._data_nodes = DataNodes(deadline_s / SILENCES_PER_DEADLINE)

    def wait_for_servers(self, patience_s: float) -> None:
        self._native.patience_s = patience_s

    def close(self) -> None:
        self._native.close()
        self._data_nodes.close()

    def _full(self, path: str) -> str:
        """Return the absolute path in HDFS."""
        return "/".join((self._root.rstrip("/"), *split_path(path))) or "/"

    def _full_file(self, path: str) -> str:
        """Return the absolute path of a file in HDFS. Raises: InvalidInputError for the root."""
        return "/".join((self._root.rstrip("/"), *self._names_of_file(path)))

    # ---- reading --------------------------------------------------------------------------------

    def stat(self, path: str) -> FileInfo:
        full = self._full(path)
        status = self._native.call(
            lambda client: client.get_file_info(full),
            "look at",
            self._name(path),
            is_idempotent=True,
        )
        return file_info(path, status)

    def list(self, path: str) -> Iterator[FileInfo]:
        full = self._full(path)

        def work(call: Call[list[FileInfo]]) -> list[FileInfo]:
            found = []
            for status in self._native.client().list_status(full):
                if status.path == full and not status.isdir:
                    raise NotFoundError("not a folder")
                name = status.path.rpartition("/")[2]
                found.append(file_info(f"{path}/{name}" if path else name, status))
                call.progress()
            return found

        infos = self._native.run(work, "list", self._name(path), is_idempotent=True)
        infos.sort(key=lambda info: info.path)
        return iter(infos)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return read_bytes(self._native, self._full(path), self._name(path), offset, length)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        full, native = self._full(path), self._native
        name, attempt = self._name(path), attempt or Attempt()
        return fill_buffer(
            native, lambda: native.client().read(full), name, offset, buffer, attempt
        )

    def open_reader(self, path: str, *, is_checked: bool = False) -> HdfsReader:
        """Open a file for many reads; only this call asks the NameNode."""
        full = self._full_file(path)
        try:
            blocks = self._name_nodes.stored_blocks(full) if is_checked else ()
        except UNANSWERED:
            blocks = ()
        return HdfsReader(self._native, self._data_nodes, full, path, self._name(path), blocks)

    # ---- writing --------------------------------------------------------------------------------

    def create(self, path: str, *, overwrite: bool = False) -> HdfsWriter:
        full, name = self._full_file(path), self._name(path)
        return HdfsWriter(self._native, self._placer, full, name, overwrite=overwrite)

    def group(self) -> PlacedGroup:
        def create(path: str) -> HdfsWriter:
            full, name = self._full_file(path), self._name(path)
            return HdfsWriter(self._native, self._placer, full, name, retry_policy=RETRY_IN_GROUP)

        return PlacedGroup(self, self._placement, create, lambda: self._placer.is_one_rack)

    def is_being_written(self, path: str) -> bool:
        """Return whether the file is open for writing; True if no NameNode answers."""
        try:
            return self._name_nodes.is_being_written(self._full_file(path))
        except UNANSWERED as error:
            return "FileNotFoundException" not in str(error)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        old, new = self._full_file(source), self._full_file(target)
        verb = f"rename {self._name(source)} to"

        def move(client: "Client") -> None:
            try:
                client.rename(old, new, overwrite)
            except FileNotFoundError:
                client.get_file_info(old)  # raises the same when it is the source that is missing
                mode = self._native.folder_mode(client)
                client.mkdirs(new.rpartition("/")[0] or "/", mode, True)
                client.rename(old, new, overwrite)

        self._native.call(move, verb, self._name(target))

    def can_join(self) -> bool:
        """Return whether the NameNode accepts calls of `concat` from us."""
        return self._name_nodes.take_calls()

    def join(self, target: str, sources: Sequence[str]) -> None:
        full = self._full_file(target)
        others = [self._full_file(source) for source in sources]
        what = f"join files to {self._name(target)}"
        try:
            self._name_nodes.concat(full, others)
        except NoCallsError as error:
            raise UnsupportedError(f"cannot {what}: {error}") from error
        except RpcError as error:
            text = str(error)
            is_missing = "FileNotFoundException" in text
            raise translate(
                FileNotFoundError(text) if is_missing else RuntimeError(text), what
            ) from error
        except (ConnectionError, TimeoutError) as error:
            raise translate(error, what) from error

    def mkdir(self, path: str) -> None:
        full, native = self._full(path), self._native
        try:
            native.call(
                lambda client: client.mkdirs(full, native.folder_mode(client), True),
                "create",
                self._name(path),
                is_idempotent=True,
            )
        except AlreadyExistsError as error:
            raise InvalidInputError(str(error)) from error

    def delete(self, path: str, *, recursive: bool = False) -> None:
        full = self._full_file(path)
        with contextlib.suppress(NotFoundError):
            self._native.call(
                lambda client: client.delete(full, recursive),
                "delete",
                self._name(path),
                is_idempotent=True,
            )

    def space(self) -> Space | None:
        """Return the capacity of the root's quota, else of the cluster; None with Kerberos."""
        return self._name_nodes.space(self._root)


def _options(url: str, deadline_s: float) -> tuple[float, int | None, int | None]:
    """Return the URL's options: deadline, block size in bytes and replication of new files.

    `deadline_s` is the default of the first; None stands for the cluster's default of the others.
    Raises: InvalidInputError.
    """
    try:
        parts = urlsplit(url, allow_fragments=False)
        _, query = parts.port, parts.query  # a malformed port raises ValueError
        found = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
        values = {key: each[-1] for key, each in found.items()}
        deadline_s = float(values.pop("deadline_s", deadline_s))
        block_bytes = int(values.pop("block_size_bytes", 0))
        replication = int(values.pop("replication", 0))
    except ValueError as error:
        raise InvalidInputError(f"{public_url(url)!r} is not a usable URL: {error}") from error
    if values or not 0 < deadline_s < math.inf or block_bytes < 0 or replication < 0:
        raise InvalidInputError(
            f"{public_url(url)}: options are deadline_s, block_size_bytes, replication; "
            "each a positive number"
        )
    return deadline_s, block_bytes or None, replication or None
