"""Writing one file to HDFS.

Owns the recovery of a file whose next block was not granted: a NameNode may answer the request
for it with NotReplicatedYetException, because the DataNodes' report of the last block is still
on its way (seen for one block in a few hundred on a loaded cluster). hdfs-native 0.14.7 does not
retry that and forgets the last block. The file is then finished by lease recovery (0.1 to 1 s),
which keeps all whole blocks, and opened again for append. A writer belongs to one thread.
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
_RECOVERY_POLL_S = 0.02
# Recoveries of one file before it is given up: each is followed by at least one block.
_RECOVERIES_MAX = 1000


class HdfsWriter:
    """A new file, complete and durable when closed."""

    def __init__(self, backend: "HdfsBackend", path: str, full: str, writer: Any) -> None:
        self._backend = backend
        self._path = path
        self._full = full
        self._writer = writer
        self._size_bytes = 0
        self._recoveries_count = 0

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
            try:
                self._call(lambda: self._writer.write(piece))  # noqa: B023  # called at once
            except UnavailableError as error:
                at_block_start = self._size_bytes and block_left_bytes == block_size_bytes
                if not at_block_start or "NotReplicatedYet" not in str(error):
                    raise
                self._recover(error)
                continue
            done += count
            self._size_bytes += count

    def _recover(self, cause: UnavailableError) -> None:
        """Finish the file as far as it is written, and open it for append."""
        self._recoveries_count += 1
        if self._recoveries_count > _RECOVERIES_MAX:
            raise cause
        logger.debug("%s: recovering after %s", self._path, cause)
        backend, full = self._backend, self._full
        end_s = time.monotonic() + backend.deadline_s
        while not backend.call(lambda client: client.recover_lease(full), "write", self._path):
            if time.monotonic() > end_s:
                raise DeadlineError(f"{cause}; not recovered within {backend.deadline_s:g} s")
            time.sleep(_RECOVERY_POLL_S)
        size_bytes = backend.stat(self._path).size_bytes
        if size_bytes != self._size_bytes:
            raise UnavailableError(f"{cause}; {self._size_bytes - size_bytes} bytes were lost")
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
