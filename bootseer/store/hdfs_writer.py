"""Writing one file to HDFS.

Owns what hdfs-native 0.14.7 does not do when a block cannot be started. Either its DataNode has
died and the NameNode does not know yet (ten minutes, by default): then another try is given
another one. Or the NameNode answers NotReplicatedYetException, because the DataNodes' report of
the block before is still on its way (seen for one block in a few hundred on a loaded cluster),
and hdfs-native forgets that block. In both cases the file is finished by lease recovery (0.1 to
1 s), which keeps its whole blocks, and opened again for append. A writer belongs to one thread.
"""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bootseer.errors import (
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)

if TYPE_CHECKING:
    from bootseer.store.hdfs import HdfsBackend

logger = logging.getLogger(__name__)

# A call takes a fraction of a second at this size, so each one is progress for the deadline.
_WRITE_BYTES = 4 << 20
# Each attempt is given a random DataNode: with a third of them dead, one write in 700 fails.
_ATTEMPTS_MAX = 6
_PAUSE_S = 0.02


class HdfsWriter:
    """A new file, complete and durable when closed."""

    def __init__(self, backend: "HdfsBackend", path: str, full: str, writer: Any) -> None:
        self._backend = backend
        self._path = path
        self._full = full
        self._writer = writer
        self._size_bytes = 0

    def write(self, data: bytes) -> None:
        if self._writer is None:
            raise InvalidInputError(f"cannot write {self._backend.name(self._path)}: closed")
        data = bytes(data)  # a no-op for bytes, for which alone hdfs-native is fast
        block_size_bytes = self._backend.block_size_bytes(self._path)
        done = 0
        while done < len(data):
            # No call crosses the end of a block, so that it is known where one failed.
            block_left_bytes = block_size_bytes - self._size_bytes % block_size_bytes
            count = min(len(data) - done, block_left_bytes, _WRITE_BYTES)
            piece = data if count == len(data) else data[done : done + count]
            self._write_piece(piece, at_block_start=block_left_bytes == block_size_bytes)
            done += count
            self._size_bytes += count

    def _write_piece(self, piece: bytes, *, at_block_start: bool) -> None:
        for attempt in range(_ATTEMPTS_MAX):
            try:
                return self._call(lambda: self._writer.write(piece))
            except UnavailableError as error:
                # In the middle of a block nobody can tell what arrived.
                if not at_block_start or attempt == _ATTEMPTS_MAX - 1:
                    raise
                logger.debug("%s: again from byte %d: %s", self._path, self._size_bytes, error)
                time.sleep(_PAUSE_S * 2**attempt)
                self._reopen(error)
        raise AssertionError("unreachable")

    def _reopen(self, cause: UnavailableError) -> None:
        """Have the file as it was at the end of its last whole block, open for writing."""
        backend, full = self._backend, self._full
        if not self._size_bytes:
            self._writer = backend.create_raw(self._path, overwrite=True)
            return
        end_s = time.monotonic() + backend.deadline_s
        while not backend.call(lambda client: client.recover_lease(full), "write", self._path):
            if time.monotonic() > end_s:
                raise DeadlineError(f"{cause}; not recovered within {backend.deadline_s:g} s")
            time.sleep(_PAUSE_S)
        size_bytes = backend.stat(self._path).size_bytes
        if size_bytes != self._size_bytes:
            raise UnavailableError(f"{cause}; the file ends at {size_bytes} bytes")
        self._writer = backend.call(lambda client: client.inner.append(full), "write", self._path)

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._backend.run(lambda _: function(), "write", self._path)
        except NotFoundError as error:
            # Somebody deleted or replaced the file meanwhile; nothing that was asked for is
            # missing.
            raise UnavailableError(str(error)) from error

    def close(self) -> None:
        if self._writer is None:
            return
        writer = self._writer
        try:
            self._call(writer.close)
        except BootseerError:
            self.abort()
            raise
        self._writer = None

    def abort(self) -> None:
        if self._writer is None:
            return
        # The client is not told to close, which would make the file look complete.
        self._writer = None
        try:
            self._backend.delete(self._path)
        except BootseerError as error:
            logger.warning("left %s behind: %s", self._backend.name(self._path), error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
