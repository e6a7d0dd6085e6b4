"""`hdfs://`: HDFS through hdfs-native (Rust, no JVM), as a backend.

Owns the mapping of paths, the deadline of every call, and the work-arounds for reading with
hdfs-native 0.14.7 (writing is in `hdfs_writer`). Options in the URL's query: `deadline_s` (no call
goes on for longer without progress; default: what the caller says, else 60), `block_size_bytes`
and `replication` of new files (the cluster's defaults). Permissions: those of the root folder; a
root made here is private.

Every method is thread-safe.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.store.backend import Backend, FileInfo, Space, Traits
from bootseer.store.deadline import Call
from bootseer.store.hdfs.connection import HdfsConnection
from bootseer.store.hdfs.errors import translate
from bootseer.store.hdfs.reader import HdfsReader, info_of
from bootseer.store.hdfs.rpc.calls import UNANSWERED, NameNode, StoredBlock
from bootseer.store.hdfs.rpc.frames import RpcError
from bootseer.store.hdfs.writer import HdfsWriter
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.policy import Attempts

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader


# More than a part has. Blocks are of a megabyte or more, so that the NameNode's answer stays below
# the megabyte that is taken from it.
_LOCATED_BYTES = 1000 << 20
# Of blocks as most clusters have them a thousand are so much.
_LARGE_BLOCK_BYTES = 64 << 20
_LARGE_LOCATED_BYTES = 1000 * _LARGE_BLOCK_BYTES

# A NameNode that has just become active may not have heard yet who has the latest blocks. Hadoop's
# own client asks again for some seconds, hdfs-native does not.
_UNPLACED = "All DataNodes failed: []"


class HdfsBackend(HdfsConnection, Backend):
    """Files beneath one folder of an HDFS."""

    traits = Traits(one_step_rename=True, can_place=True)
    # A pipeline of hdfs-native: 100 packets of 64 KiB to be sent and 100 to be confirmed; measured
    # 12.4 to 13.4 MiB.
    writer_bytes = 13 << 20

    def stat(self, path: str) -> FileInfo:
        full = self.full(path)
        status = self.call(
            lambda client: client.get_file_info(full), "look at", path, is_question=True
        )
        return info_of(path, status)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        full = self.full(path)

        def work(call: Call[bytes]) -> bytes:
            chunks = []
            for chunk in self._stream(self.client().read(full), offset, length):
                chunks.append(chunk)
                call.progress_count += 1
                if call.abandoned:
                    break
            # One copy; a bytearray turned into bytes would be two.
            return b"".join(chunks)

        attempts = Attempts()
        while True:
            try:
                return self.run(work, "read", path, is_question=True)
            except UnavailableError as error:
                pause_s = attempts.pause_s(error)
                if _UNPLACED not in str(error) or pause_s is None:
                    raise
            time.sleep(pause_s)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        full, attempt = self.full(path), attempt or Attempt()
        return self.fill(lambda: self.client().read(full), path, offset, buffer, attempt)

    def open_reader(self, path: str, *, is_checked: bool = False) -> HdfsReader:
        """As `Backend.open_reader`: the NameNode is asked once for all reads, and again for
        each reader."""
        reader = HdfsReader(self, path, self.stored_blocks(path) if is_checked else ())
        if not reader.blocks:
            self.call(lambda _: reader.opened, "read", path)
        return reader

    def fill(
        self,
        opened: "Callable[[], FileReader]",
        path: str,
        offset: int,
        buffer: memoryview,
        attempt: Attempt,
    ) -> int:
        """`read_into`, which ends early when the attempt is given up."""

        def work(call: Call[int]) -> int:
            done = 0
            for chunk in self._stream(opened(), offset, len(buffer)):
                with attempt.lock:
                    if attempt.is_given_up:
                        break
                    buffer[done : done + len(chunk)] = chunk
                done += len(chunk)
                attempt.done_bytes = done
                call.progress_count += 1
            return done

        try:
            return self.run(work, "read", path)
        except BaseException:
            attempt.stop()  # a helper that is still in the library must not write any more
            raise

    def stored_blocks(self, path: str) -> tuple[StoredBlock, ...]:
        """Where the file lies, for reads without hdfs-native; empty where those cannot be."""
        name_node = self._found.hurried()
        if name_node is None:
            return ()
        full = self.full(path, file=True)
        try:
            blocks = name_node.stored_blocks(full, _LOCATED_BYTES)
            has_more = blocks and blocks[-1].start + blocks[-1].length >= _LOCATED_BYTES
            if has_more and blocks[0].length >= _LARGE_BLOCK_BYTES:
                blocks = name_node.stored_blocks(full, _LARGE_LOCATED_BYTES)
            return blocks
        except UNANSWERED:
            return ()

    def _stream(self, reader: "FileReader", offset: int, length: int | None) -> Iterator[bytes]:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidInputError(f"the range ({offset}, {length}) is negative")
        # Reading past the end is a panic of the Rust code, so never ask for it.
        wanted = max(0, len(reader) - offset)
        if length is not None:
            wanted = min(wanted, length)
        if not wanted:
            return iter(())
        stream: Iterator[bytes] = reader.read_range_stream(offset, wanted)
        return stream

    def create(self, path: str, *, overwrite: bool = False) -> HdfsWriter:
        full = self.full(path, file=True)
        return HdfsWriter(self, path, full).open(overwrite=overwrite)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        old, new = self.full(source, file=True), self.full(target, file=True)
        verb = f"rename {self.name(source)} to"

        def move(client: "Client") -> None:
            try:
                client.rename(old, new, overwrite)
            except FileNotFoundError:
                client.get_file_info(old)  # raises the same when it is the source that is missing
                client.mkdirs(new.rpartition("/")[0] or "/", self.mode(client), True)
                client.rename(old, new, overwrite)

        self.call(move, verb, target)

    def list(self, path: str) -> Iterator[FileInfo]:
        full = self.full(path)

        def work(call: Call[list[FileInfo]]) -> list[FileInfo]:
            found = []
            for status in self.client().list_status(full):
                if status.path == full and not status.isdir:
                    raise NotFoundError("not a folder")
                name = status.path.rpartition("/")[2]
                found.append(info_of(f"{path}/{name}" if path else name, status))
                call.progress_count += 1
            return found

        infos = self.run(work, "list", path, is_question=True)
        infos.sort(key=lambda info: info.path)
        return iter(infos)

    def is_being_written(self, path: str) -> bool:
        """As `Backend.is_being_written`. With Kerberos the NameNode takes no such question from us:
        it cannot be told."""
        name_node = self._found.get()
        if name_node is None:
            return True
        try:
            return name_node.is_being_written(self.full(path, file=True))
        except UNANSWERED as error:
            return "FileNotFoundException" not in str(error)

    def can_join(self) -> bool:
        """Whether the NameNode lets us call `concat`."""
        return self._found.get() is not None

    def join(self, target: str, sources: Sequence[str]) -> None:
        """As `Backend.join`."""
        full = self.full(target, file=True)
        others = [self.full(source, file=True) for source in sources]
        join_files(self._found.patient(), full, others, f"join files to {self.name(target)}")

    @property
    def is_one_rack(self) -> bool:
        """As `Backend.is_one_rack`."""
        return self._placer.is_one_rack

    def place(self, path: str, avoid: Collection[str]) -> tuple[str, ...] | None:
        """As `Backend.place`."""
        return self._placer.place(self.full(path, file=True), avoid)

    def servers_of(self, path: str) -> tuple[str, ...]:
        """As `Backend.servers_of`."""
        return self._placer.servers_of(self.full(path, file=True))

    def mkdir(self, path: str) -> None:
        full = self.full(path)
        try:
            self.call(
                lambda client: client.mkdirs(full, self.mode(client), True),
                "create",
                path,
                is_question=True,
            )
        except AlreadyExistsError as error:
            raise InvalidInputError(str(error)) from error

    def delete(self, path: str, *, recursive: bool = False) -> None:
        full = self.full(path, file=True)
        with contextlib.suppress(NotFoundError):
            self.call(
                lambda client: client.delete(full, recursive), "delete", path, is_question=True
            )

    def space(self) -> Space | None:
        """The quota of the directory, else the cluster; None where the NameNode wants Kerberos."""
        return self._space.space(self.full(""))


def join_files(name_node: NameNode | None, target: str, sources: Sequence[str], what: str) -> None:
    """Absolute paths; `what` is for messages. Raises: errors of `bootseer.errors`."""
    if name_node is None:
        raise UnsupportedError(f"cannot {what}: the NameNode takes no calls from us")
    try:
        name_node.concat(target, sources)
    except RpcError as error:
        text = str(error)
        if "FileNotFoundException" in text:
            raise translate(FileNotFoundError(text), what) from error
        raise translate(RuntimeError(text), what) from error
    except (ConnectionError, TimeoutError) as error:
        raise translate(error, what) from error
