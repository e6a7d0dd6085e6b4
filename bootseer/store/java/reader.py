"""A file of HDFS that Hadoop's own client keeps open for many reads; see `abilities.open_reader`.

Thread-safe: that client reads at positions from many threads at once.
"""

import os
import weakref

from bootseer.store.backend import FileInfo
from bootseer.store.deadline import Call, Result
from bootseer.store.java import file_system as java_fs
from bootseer.store.java.calls import Java, address_of
from bootseer.store.java.connection import JavaHdfsConnection
from bootseer.transfer.attempt import Attempt

# Copied through an array of Java's. A call is a request to a DataNode, which takes a fraction of a
# millisecond.
_PIECE_BYTES = 1 << 20


class JavaHdfsReader:
    """A file whose blocks the NameNode has named.

    It names the nearest replica first, and equally near ones in random order, so that another
    reader may be served by other DataNodes.
    """

    can_stop = True

    def __init__(self, connection: JavaHdfsConnection, path: str) -> None:
        """Raises: NotFoundError, UnavailableError, DeadlineError."""
        self._connection = connection
        self._path = path
        full = connection.full(path)

        def work(java: Java, system: int) -> tuple[int, int, java_fs.Status]:
            stream, size_bytes = java_fs.open_file(java, system, full)
            try:
                # In this order, as in `hdfs_reader`.
                return stream, size_bytes, java_fs.status(java, system, full, path)
            except BaseException:
                connection.drop(stream)
                raise

        self._stream, self._size_bytes, self._status = connection.call(work, "read", path)
        self._finalizer = weakref.finalize(self, _drop, connection, self._stream, os.getpid())
        self._finalizer.atexit = False

    @property
    def block_bytes(self) -> int:
        return self._status.info.block_bytes

    @property
    def has_replicas(self) -> bool:
        return self._status.replication > 1

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """As the protocol says."""

        def work(call: Call[int], java: Java, _: int) -> int:
            # With `self`, which would close the stream if it were dropped before a late end.
            return fill(call, java, (self._stream, self._size_bytes), offset, buffer, attempt)

        try:
            return self._connection.run(work, "read", self._path)
        except BaseException:
            attempt.stop()  # a helper that is still in Java must not write any more
            raise

    def current(self) -> FileInfo:
        """What was opened: blocks never change, whatever happens to the name."""
        return self._status.info


def _drop(connection: JavaHdfsConnection, stream: int, pid: int) -> None:
    if pid == os.getpid():
        connection.drop(stream)


def fill(
    call: Call[Result],
    java: Java,
    file: tuple[int, int],
    offset: int,
    buffer: memoryview,
    attempt: Attempt,
) -> int:
    """Read from `file`, a stream and its size, until the buffer is full, the file at its end or the
    attempt given up."""
    stream, size_bytes = file
    wanted = min(len(buffer), max(0, size_bytes - offset))
    done = 0
    array = java.bytes_array(min(wanted, _PIECE_BYTES)) if wanted else 0
    while done < wanted:
        count = java_fs.read(java, stream, offset + done, array, min(_PIECE_BYTES, wanted - done))
        with attempt.lock:
            if count < 0 or attempt.is_given_up or call.abandoned:
                break
            java.copy_out(array, count, address_of(buffer[done : done + count]))
        done += count
        attempt.done_bytes = done
        call.progress_count += 1
    return done
