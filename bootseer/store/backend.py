"""Interface between Bootseer and storage: `Backend`, with its `Reader`, `Writer` and `FileGroup`.

There is one `Backend` per kind of storage (folder, HDFS, bucket, registry, web server, any other
fsspec file system). `Traits` say which operations the storage does in one atomic step. Optional
operations have a default implementation that needs no support by the storage. The key-value `Store`
and the striped file system use this interface only. Paths are POSIX strings relative to the
backend's root URL ("" is the root); they never start with "/" and never contain "..".

Threading: every method may be called from any thread at once; a `Writer` belongs to one thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, TypeVar, runtime_checkable

from msgspec import Struct

from bootseer.errors import InvalidInputError, NotFoundError, UnsupportedError
from bootseer.store.paths import split_path
from bootseer.transfer.attempt import Attempt

Result = TypeVar("Result")

Piece = bytes | bytearray
"""Data to write. There is no memoryview: hdfs-native would take 13 s/GiB for one."""


KEEP_ALIVE_S = 15.0
"""Interval of `Writer.keep_alive` calls: HDFS drops a writer that is silent for a minute."""


class FileInfo(Struct, frozen=True):
    """Attributes of a file or folder. `path` is relative to the backend's root."""

    path: str
    size_bytes: int
    modified_ns: int
    is_dir: bool
    block_bytes: int = 0
    """Size of the blocks that lie on different disks; 0 if there are none or it is unknown."""
    version: str = ""
    """Text that differs between a file and its replacement, even if size and time are the same (a
    bucket's times are whole seconds); empty if the storage has none."""


class Traits(Struct, frozen=True):
    """Atomic operations of a kind of storage; constant for the life of a backend."""

    one_step_rename: bool = False
    """Whether `rename` is one atomic step on the server (buckets: no)."""
    one_step_replace: bool = False
    """Whether closing a writer of `create(overwrite=True)` replaces the old file in one atomic step
    (buckets: yes)."""


class Space(Struct, frozen=True):
    """Capacity of the storage behind a backend, in bytes."""

    total_bytes: int
    free_bytes: int


class Writer(Protocol):
    """New file that is written from start to end; base class of all writers.

    Bytes are durable, and failures reported, when `close` has returned. Leaving a `with` block by
    an exception aborts. Backends differ in what a reader sees before `close`: callers who need
    atomicity write under a temporary name and rename.
    """

    def write(self, data: Piece) -> None:
        """Append `data`, which must not change until the file is closed.

        Raises: NoSpaceError, UnavailableError, DeadlineError.
        """
        ...

    def write_all(self, pieces: Sequence[Piece], note_progress: Callable[[], None]) -> None:
        """Write each of the `pieces`; `note_progress` is called after each, from any thread."""
        for piece in pieces:
            self.write(piece)
            note_progress()

    def keep_alive(self) -> None:
        """Tell the storage that the writer is alive, after `KEEP_ALIVE_S` without a write.

        Raises: as `write`.
        """
        return

    def close(self) -> None:
        """Flush to stable storage and finish. Raises as `write`. Idempotent."""
        ...

    def abort(self) -> None:
        """Stop writing and remove the file. Never raises. Idempotent."""
        ...

    def abandon(self) -> bool:
        """Stop writing, but keep the bytes that the storage has so far readable. Never raises.

        Return False if the storage did not answer: the end of the file may then be unreadable until
        this is called again. The caller deletes the file.
        """
        self.abort()
        return True

    @property
    def is_buffered(self) -> bool:
        """Whether the client library buffers the data; known after the first write."""
        return True

    @property
    def held_bytes(self) -> int:
        """Number of the last bytes written that the writer may still refer to."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class Reader(Protocol):
    """Open file for reads at any offset, from any thread, several at once.

    The file is closed when the last reference to the reader is dropped.
    """

    @property
    def block_bytes(self) -> int:
        """Size of the blocks that lie on different disks; 0 if unknown."""
        ...

    @property
    def can_stop(self) -> bool:
        """Whether a read stops writing into its buffer once its attempt was given up."""
        ...

    @property
    def has_replicas(self) -> bool:
        """Whether another reader of the same file may be served by other disks."""
        ...

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` from `offset` and return the number of bytes read.

        The number is smaller than the buffer only at the end of the file, or if the attempt was
        given up. Raises: NotFoundError, UnavailableError, DeadlineError.
        """
        ...

    def current(self) -> FileInfo:
        """Return the attributes of the file that reads are served from now."""
        ...


@runtime_checkable
class HasDescriptor(Reader, Protocol):
    """Reader with a file descriptor, from which the kernel of this node can read directly."""

    def fileno(self) -> int:
        """Return the file descriptor, which the reader owns and closes."""
        ...


class _PathReader:
    """Reader that opens the file by its path for each read, for backends that keep nothing open."""

    block_bytes = 0
    can_stop = False
    has_replicas = False

    def __init__(self, backend: "Backend", path: str) -> None:
        self._backend = backend
        self._path = path

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        return self._backend.read_into(self._path, offset, buffer, attempt)

    def current(self) -> FileInfo:
        return self._backend.stat(self._path)


class Backend(ABC):
    """Remote file system. Errors are `bootseer.errors` classes that name the full URL."""

    url: str
    """Root URL for messages, without credentials."""
    traits: Traits
    is_of_this_node = False
    """Whether calls wait for nothing but a disk of this node."""
    writer_bytes = 0
    """Largest memory that the client library takes for an open writer, besides the data passed to
    it and `Writer.held_bytes`."""

    @abstractmethod
    def stat(self, path: str) -> FileInfo:
        """Return the attributes of a file or folder. Raises: NotFoundError."""

    @abstractmethod
    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return the bytes `[offset, offset + length)`, fewer only at the end of the file.

        `length=None` reads to the end. Raises: NotFoundError, UnavailableError, DeadlineError.
        """

    @abstractmethod
    def create(self, path: str, *, overwrite: bool = False) -> Writer:
        """Start a new file, with missing parent folders.

        `overwrite=False` is atomic: of two callers one gets the file, the other an
        AlreadyExistsError.
        """

    @abstractmethod
    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Move a file or folder, creating missing parents of the target.

        With `overwrite`, an existing target file is replaced in one atomic step; without it, an
        existing target is an AlreadyExistsError.
        """

    @abstractmethod
    def list(self, path: str) -> Iterator[FileInfo]:
        """Return the files and folders directly in a folder, sorted by path.

        Raises: NotFoundError.
        """

    @abstractmethod
    def mkdir(self, path: str) -> None:
        """Make a folder and its parents; an existing folder is no error."""

    @abstractmethod
    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, an empty folder, or a tree. A missing path is no error."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads. Idempotent."""

    def _name(self, path: str) -> str:
        """Return the full URL of a path, for messages."""
        return f"{self.url}/{path}" if path else self.url

    def _names_of_file(self, path: str) -> tuple[str, ...]:
        """Return the components of a path that is not the root. Raises: InvalidInputError."""
        names = split_path(path)
        if not names:
            raise InvalidInputError(f"the root of {self.url} is a folder and stays one")
        return names

    # ---- optional operations ------------------------------------------------------------------

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        """Fill `buffer` from `offset`, as `Reader.read_into`."""
        data = self.read(path, offset, len(buffer))
        (attempt or Attempt()).put(0, buffer, data)
        return len(data)

    def space(self) -> Space | None:
        """Return the capacity, or None if the storage does not tell it."""
        return None

    def open_reader(self, path: str, *, is_checked: bool = False) -> Reader:
        """Return a reader of the file at `path`.

        `is_checked`: most reads will be made with `Attempt.is_checked` set. Raises: NotFoundError,
        UnavailableError.
        """
        return _PathReader(self, path)

    def stat_file(self, path: str) -> FileInfo:
        """Return the attributes of a file. Raises: NotFoundError, also for a folder."""
        info = self.stat(path)
        if info.is_dir:
            raise NotFoundError(f"{self.url}/{path} is a folder and no file")
        return info

    def list_tree(self, path: str) -> Iterator[FileInfo] | None:
        """Return all files below a folder, at any depth, sorted by path.

        Return None if the storage can list only one folder at a time. A missing folder has no
        files.
        """
        return None

    def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files by as few requests as possible; missing files are no error.

        After an error some of the files may be left. Raises: PermissionDeniedError,
        UnavailableError, DeadlineError.
        """
        for path in paths:
            self.delete(path)

    def can_join(self) -> bool:
        """Return whether `join` works: the storage can do it, and accepts the call from us."""
        return False

    def join(self, target: str, sources: Sequence[str]) -> None:
        """Append the files `sources`, in order, to the file `target`, and remove them, atomically.

        All of the files are closed. Bytes are not copied. Raises: NotFoundError, UnavailableError,
        DeadlineError; UnsupportedError if `can_join` is false.
        """
        raise UnsupportedError(f"{self.url} cannot join files")

    def group(self) -> "FileGroup":
        """Begin a group of files that are written, and later read, at the same time."""
        return FileGroup(self)

    def is_being_written(self, path: str) -> bool:
        """Return whether the file at `path` may be open for writing. Never raises.

        False if the storage has no notion of it. HDFS changes a file's time only when the file is
        created and closed, so the time does not tell; its NameNode does.
        """
        return False

    def wait_for_servers(self, patience_s: float) -> None:
        """Make later idempotent calls wait up to `patience_s` for servers that are down."""
        return


class FileGroup:
    """Group of files written at the same time, which the storage may spread over its servers.

    This class leaves the placement to the storage. Any thread may call any method.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def block_bytes(self) -> int:
        """Return the size up to which a file of the group stays on its chosen servers.

        0 if the storage does not choose servers, or the size is not known yet.
        """
        return 0

    def create(self, path: str, *, is_checked: bool = False) -> Writer:
        """Start a new file, as `Backend.create`.

        If its servers fail, the writer fails soon: the caller is expected to write the file again,
        which places it on other servers. `is_checked`: readers of the file have checksums of its
        bytes, so that the storage's own checksums may cover larger pieces.
        """
        return self.backend.create(path)

    def end(self) -> None:
        """Note that all files of the group are closed, and that no more will be created."""


@runtime_checkable
class IsFolder(Protocol):
    """Backend whose files are also reachable by path on this node. Thread-safe."""

    @property
    def root(self) -> str:
        """Path of the folder."""
        ...

    def within_deadline(self, verb: str, path: str, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, a function that makes system calls in the folder.

        Raises: DeadlineError with `verb` and `path` in its message; as `work`.
        """
        ...
