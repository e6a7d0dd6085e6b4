"""A file of HDFS that is kept open for many reads; see `Backend.open_reader`. Thread-safe."""

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from bootseer.store.backend import FileInfo
from bootseer.store.hdfs.rpc.calls import StoredBlock
from bootseer.transfer.attempt import Attempt

if TYPE_CHECKING:
    from hdfs_native import FileReader, FileStatus

    from bootseer.store.hdfs.backend import HdfsBackend

# The tokens with which DataNodes let us read blocks are good for some hours (10 by default), and
# hdfs-native asks for new ones only when it opens a file.
OPENED_S = 3600.0


class HdfsReader:
    """A file whose blocks the NameNode has named: us, hdfs-native, or both.

    It names the nearest replica first, and equally near ones in random order, so that another
    reader of hdfs-native's may be served by other DataNodes.
    """

    can_stop = True

    def __init__(
        self, backend: "HdfsBackend", path: str, blocks: tuple[StoredBlock, ...] = ()
    ) -> None:
        """`blocks`: those that a reader which checks the bytes reads without hdfs-native."""
        self._backend = backend
        self._path = path
        self.blocks = blocks
        self._lock = threading.Lock()
        self._opened: tuple[FileReader, FileInfo, int] | None = None
        self._opened_until_s = 0.0

    @property
    def opened(self) -> "tuple[FileReader, FileInfo, int]":
        """hdfs-native's reader, what it opened, and the number of replicas. Raises as that does;
        to be called within the deadline."""
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
                self._opened_until_s = time.monotonic() + OPENED_S
            return self._opened

    def _open(self) -> "tuple[FileReader, FileInfo, int]":
        client, full = self._backend.client(), self._backend.full(self._path)
        reader = client.read(full)
        # In this order: what was replaced meanwhile does not look like what is read.
        status = client.get_file_info(full)
        return reader, info_of(self._path, status), status.replication or 1

    def _usable(self) -> "FileReader":
        """As `opened`, and opened again now and then, where that is the same file still."""
        reader, info, _ = self.opened
        with self._lock:
            is_due = time.monotonic() > self._opened_until_s
            if is_due:
                # For one reader to do; the others go on with what there is.
                self._opened_until_s = time.monotonic() + OPENED_S
        if is_due:
            with contextlib.suppress(Exception):
                again = self._open()
                if again[1] == info:
                    with self._lock:
                        self._opened = again
                    return again[0]
        return reader

    @property
    def block_bytes(self) -> int:
        return self.blocks[0].length if self.blocks else self.opened[1].block_bytes

    @property
    def has_replicas(self) -> bool:
        if self.blocks:
            return any(len(block.replicas) > 1 for block in self.blocks)
        return self.opened[2] > 1

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """As the protocol says."""
        if attempt.is_checked and self.blocks:
            count = self._backend.data_nodes.read_into(self.blocks, offset, buffer, attempt)
            if count == len(buffer) or attempt.is_given_up:
                return count
            attempt.done_bytes = 0
            attempt.server = ""
        return self._backend.fill(self._usable, self._path, offset, buffer, attempt)

    def current(self) -> FileInfo:
        """What was opened: blocks never change, whatever happens to the name."""
        return self.opened[1]


def info_of(path: str, status: "FileStatus") -> FileInfo:
    """What hdfs-native says of the file or folder at `path`."""
    size_bytes = 0 if status.isdir else status.length
    block_bytes = status.blocksize or 0
    return FileInfo(
        path, size_bytes, status.modification_time * 1_000_000, status.isdir, block_bytes
    )
