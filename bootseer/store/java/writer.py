"""Writing one file to HDFS by Hadoop's own client, which gets over DataNodes that fail by itself.

A writer belongs to one thread.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Self

from bootseer.errors import AlreadyExistsError, BootseerError, InvalidInputError
from bootseer.store.backend import Piece, Writer
from bootseer.store.deadline import Call
from bootseer.store.java import file_system as java_fs
from bootseer.store.java.calls import Java, JavaError, address_of
from bootseer.store.java.connection import JavaHdfsConnection

# Copied through an array of Java's; each is progress for the deadline.
_PIECE_BYTES = 1 << 20


class JavaHdfsWriter(Writer):
    """A new file, complete and durable when closed."""

    def __init__(self, connection: JavaHdfsConnection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._full = connection.full(path, file=True)
        self._stream = 0

    def open(self, *, overwrite: bool) -> Self:
        """Create the file. Raises: AlreadyExistsError."""
        options = self._connection.options

        def work(java: Java, system: int) -> int:
            mode = self._connection.mode(java, system) & 0o664
            try:
                return java_fs.create(
                    java,
                    system,
                    self._full,
                    overwrite=overwrite,
                    mode=mode,
                    replication=options.replication,
                    block_bytes=options.block_size_bytes,
                )
            except JavaError as error:
                # Another client has created it, and writes it now.
                if not overwrite and str(error).startswith("AlreadyBeingCreatedException"):
                    raise AlreadyExistsError("it exists already") from error
                raise

        self._stream = self._connection.call(work, "create", self._path)
        return self

    def write(self, data: Piece) -> None:
        self.write_all([data], lambda: None)

    def write_all(self, pieces: Sequence[Piece], note_progress: Callable[[], None]) -> None:
        stream = self._stream
        if not stream:
            raise InvalidInputError(f"cannot write {self._connection.name(self._path)}: closed")

        def work(call: Call[None], java: Java, _: int) -> None:
            size_bytes = min(_PIECE_BYTES, max(map(len, pieces), default=0))
            array = java.bytes_array(size_bytes) if size_bytes else 0
            for piece in pieces:
                for start in range(0, len(piece), _PIECE_BYTES):
                    if call.abandoned:
                        return
                    part = piece[start : start + _PIECE_BYTES]
                    java.copy_in(array, len(part), address_of(part))
                    java_fs.write(java, stream, array, len(part))
                    call.progress_count += 1
                note_progress()

        self._connection.run(work, "write", self._path)

    def close(self) -> None:
        stream, self._stream = self._stream, 0
        if stream:
            self._connection.call(lambda java, _: _close(java, stream), "write", self._path)

    def abort(self) -> None:
        if self._stream:
            self.abandon()
            with contextlib.suppress(BootseerError):
                self._connection.call(
                    lambda java, system: java_fs.delete(java, system, self._full, recursive=False),
                    "delete",
                    self._path,
                )

    def abandon(self) -> bool:
        with contextlib.suppress(BootseerError):
            self.close()
        return True


def _close(java: Java, stream: int) -> None:
    try:
        java_fs.close(java, stream)
    finally:
        java.drop(stream)
