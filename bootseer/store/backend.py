"""What Bootseer needs of a remote file system, and nothing more.

One `Backend` per kind of storage (local folder, HDFS, any other fsspec file system, and the
rate-limited wrapper used by demo and benchmarks). The key-value `Store` and the striped file
system stand on this interface. Paths are POSIX strings relative to the backend's root URL
("" is the root), never start with "/" and never contain "..".

Threading: every method may be called from any thread at once; a `Writer` belongs to one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self

from msgspec import Struct

from bootseer.transfer.attempt import Attempt

Piece = bytes | bytearray
"""What is written: a memoryview costs hdfs-native 13 s/GiB."""


KEEP_ALIVE_S = 15.0
"""HDFS forgets a writer that says nothing for a minute."""


class FileInfo(Struct, frozen=True):
    """One name in a backend. `path` is relative to the backend's root."""

    path: str
    size_bytes: int
    modified_ns: int
    is_dir: bool
    block_bytes: int = 0
    """Where the storage cuts a file into blocks on different disks; 0: it does not, or not say."""


class Space(Struct, frozen=True):
    """Capacity of the storage behind a backend, in bytes."""

    total_bytes: int
    free_bytes: int


class Writer(Protocol):
    """A new file being written from start to end.

    Bytes are durable, and failures reported, when `close` has returned. Leaving a `with` block
    by an exception aborts. What a reader sees before `close` is the backend's affair: callers
    who need atomicity write under a temporary name and rename. Implementations subclass it, for the
    `with` block.
    """

    def write(self, data: Piece) -> None:
        """Append `data`, which must stay as it is until the file is closed.

        Raises: NoSpaceError, UnavailableError, DeadlineError.
        """
        ...

    def write_all(self, pieces: Sequence[Piece], note_progress: Callable[[], None]) -> None:
        """As `write` of each of the `pieces`; `note_progress` is called after each, by any
        thread."""
        for piece in pieces:
            self.write(piece)
            note_progress()

    def expect_checksums(self) -> None:
        """The caller has checksums of all that will be written, so that those of the storage may be
        of larger pieces. Before anything is written."""
        return

    def keep_alive(self) -> None:
        """Keeps the writer alive: to be called every `KEEP_ALIVE_S` in which nothing is written.
        Raises as `write`."""
        return

    def close(self) -> None:
        """Flush to stable storage and finish. Raises as `write`. Idempotent."""
        ...

    def abort(self) -> None:
        """Give up and remove the file. Never raises. Idempotent."""
        ...

    def abandon(self) -> bool:
        """Give up, and leave to be read what the storage has: a prefix, or nothing.

        Returns False where the storage did not answer: its end may be missing, unless this is
        called again. Never raises. The caller deletes the file.
        """
        self.abort()
        return True

    @property
    def stays_placed(self) -> bool:
        """Whether what was written lies on the servers that were chosen, and a failure of one of
        them is the writer's."""
        return False

    @property
    def is_buffered(self) -> bool:
        """Whether the storage's library takes memory for it; known once something was written."""
        return True

    @property
    def held_bytes(self) -> int:
        """How many of the last bytes written the writer may still refer to."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class Backend(Protocol):
    """A remote file system. Errors are `bootseer.errors` classes naming the full URL."""

    @property
    def url(self) -> str:
        """The root URL, without credentials, as shown to people."""
        ...

    @property
    def has_atomic_rename(self) -> bool:
        """Whether `rename` is one atomic step on the server (S3-like stores: no)."""
        ...

    @property
    def has_atomic_put(self) -> bool:
        """Whether what `create(overwrite=True)` writes replaces a file in one atomic step, when
        it is closed (S3-like stores: yes)."""
        ...

    def stat(self, path: str) -> FileInfo:
        """Raises: NotFoundError."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes `[offset, offset + length)`; shorter only at the end of the file.

        `length=None` reads to the end. Raises: NotFoundError, UnavailableError, DeadlineError.
        """
        ...

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        """Fill `buffer` from `offset`; returns the count, short only at the end of the file or
        when `attempt`, which is told how much has come, was given up."""
        ...

    def create(self, path: str, *, overwrite: bool = False) -> Writer:
        """Start a new file; missing parents are made.

        `overwrite=False` is atomic: of two callers one gets the file, the other
        AlreadyExistsError.
        """
        ...

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Move a file or directory. With `overwrite`, an existing target file is replaced in one
        atomic step; without, AlreadyExistsError. Missing parents of the target are made.
        """
        ...

    def list(self, path: str) -> Iterator[FileInfo]:
        """The names directly in a directory, sorted by path. Raises: NotFoundError."""
        ...

    def mkdir(self, path: str) -> None:
        """Make a directory and its parents; no error when it exists already."""
        ...

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, an empty directory, or a tree. A missing path is no error."""
        ...

    def space(self) -> Space | None:
        """Capacity, or None where the storage cannot tell."""
        ...

    def close(self) -> None:
        """Release connections and threads. Idempotent."""
        ...
