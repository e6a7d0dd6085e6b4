"""What Bootseer needs of a remote file system, and nothing more.

One `Backend` per kind of storage (folder, HDFS, bucket, registry, any other fsspec file system, and
the rate-limited wrapper used by demo and benchmarks). Its `Traits` say what the storage can do in
one step; what only some can do has a default that does without. The key-value `Store` and the
striped file system stand on this interface. Paths are POSIX strings relative to the backend's root
URL ("" is the root), never start with "/" and never contain "..".

Threading: every method may be called from any thread at once; a `Writer` belongs to one thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, TypeVar, runtime_checkable

from msgspec import Struct

from bootseer.errors import NotFoundError, UnsupportedError
from bootseer.transfer.attempt import Attempt

Result = TypeVar("Result")

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
    version: str = ""
    """Differs between a file and the one that replaces it, where the storage can tell: size and
    time may be the same. A bucket's times are whole seconds."""


class Traits(Struct, frozen=True):
    """What a kind of storage can do; the same for the life of a backend."""

    one_step_rename: bool = False
    """Whether `rename` is one atomic step on the server (buckets: no)."""
    one_step_replace: bool = False
    """Whether what `create(overwrite=True)` writes replaces a file in one atomic step, when it is
    closed (buckets: yes)."""


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


class Reader(Protocol):
    """One generation of a stored file. Any thread, several at once. Closed when it is dropped."""

    @property
    def block_bytes(self) -> int:
        """Where the file is cut into blocks on different disks; 0: nowhere that is known of."""
        ...

    @property
    def can_stop(self) -> bool:
        """Whether it leaves the buffer alone once its attempt was given up."""
        ...

    @property
    def has_replicas(self) -> bool:
        """Whether another reader of the same file may be served by other disks."""
        ...

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` from `offset`; returns the count, short only at the end of the file or
        when the attempt was given up.

        Raises: NotFoundError, UnavailableError, DeadlineError.
        """
        ...

    def current(self) -> FileInfo:
        """What file the bytes that it reads belong to now."""
        ...


@runtime_checkable
class HasDescriptor(Reader, Protocol):
    """A reader of a file that the kernel of this node can read by itself."""

    def fileno(self) -> int:
        """A descriptor of the file; the reader's own, good as long as it is."""
        ...


class _PathReader:
    """Reads by name, for backends that keep nothing open."""

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
    """A remote file system. Errors are `bootseer.errors` classes naming the full URL."""

    url: str
    """The root URL, without credentials, as shown to people."""
    traits: Traits
    writer_bytes = 0
    """What the client's library takes for an open writer at most, beside what was handed to it and
    `Writer.held_bytes`."""

    @abstractmethod
    def stat(self, path: str) -> FileInfo:
        """Raises: NotFoundError."""

    @abstractmethod
    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes `[offset, offset + length)`; shorter only at the end of the file.

        `length=None` reads to the end. Raises: NotFoundError, UnavailableError, DeadlineError.
        """

    @abstractmethod
    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        """Fill `buffer` from `offset`; returns the count, short only at the end of the file or
        when `attempt`, which is told how much has come, was given up."""

    @abstractmethod
    def create(self, path: str, *, overwrite: bool = False) -> Writer:
        """Start a new file; missing parents are made.

        `overwrite=False` is atomic: of two callers one gets the file, the other
        AlreadyExistsError.
        """

    @abstractmethod
    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Move a file or directory. With `overwrite`, an existing target file is replaced in one
        atomic step; without, AlreadyExistsError. Missing parents of the target are made.
        """

    @abstractmethod
    def list(self, path: str) -> Iterator[FileInfo]:
        """The names directly in a directory, sorted by path. Raises: NotFoundError."""

    @abstractmethod
    def mkdir(self, path: str) -> None:
        """Make a directory and its parents; no error when it exists already."""

    @abstractmethod
    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, an empty directory, or a tree. A missing path is no error."""

    @abstractmethod
    def space(self) -> Space | None:
        """Capacity, or None where the storage cannot tell."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads. Idempotent."""

    # ---- what some can do better --------------------------------------------------------------

    def open_reader(self, path: str, *, is_checked: bool = False) -> Reader:
        """Start reading the file at `path`, which is kept open where that saves something.

        `is_checked`: by attempts of that kind, for the most part. Raises: NotFoundError,
        UnavailableError.
        """
        return _PathReader(self, path)

    def stat_file(self, path: str) -> FileInfo:
        """As `stat`, where nothing but a file is looked for. Raises: NotFoundError, also for a
        folder."""
        info = self.stat(path)
        if info.is_dir:
            raise NotFoundError(f"{self.url}/{path} is a folder and no file")
        return info

    def list_tree(self, path: str) -> Iterator[FileInfo] | None:
        """Return all files below a folder, at any depth, sorted by path; None where the storage
        lists one folder at a time. Nothing is there: nothing is yielded."""
        return None

    def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files, by as few requests as the storage can; missing ones are no error.

        After an error some are gone and some are not. Raises: PermissionDeniedError,
        UnavailableError, DeadlineError.
        """
        for path in paths:
            self.delete(path)

    def can_join(self) -> bool:
        """Tell whether the storage joins files without moving bytes, and lets us. Asked once."""
        return False

    def join(self, target: str, sources: Sequence[str]) -> None:
        """Append `sources`, in order, to the file `target` in one atomic step; they vanish.

        All are closed files of ours; see `can_join`. Raises: NotFoundError, UnavailableError,
        DeadlineError.
        """
        raise UnsupportedError(f"{self.url} cannot join files")

    def group(self) -> "FileGroup":
        """Begin a group of files that are written at once, and read at once later on."""
        return FileGroup(self)

    def is_being_written(self, path: str) -> bool:
        """Tell whether the file at `path` is open for writing, or that cannot be told; False where
        the storage does not know. Changes nothing. Never raises.

        HDFS changes a file's time when it is created and when it is closed, however long it is
        written in between; its NameNode says with the places of a file's blocks whether it is open.
        """
        return False

    def wait_for_servers(self, patience_s: float) -> None:
        """Wait for servers that are gone for longer than one call may take: from now on ask for so
        long what changes nothing, or no more when it is done twice."""
        return


class FileGroup:
    """Files that are written at the same time, and that are best spread over different servers.

    This one leaves their places to the storage. Any thread may call any method.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def block_bytes(self) -> int:
        """Size up to which a file of the group stays on the servers that were chosen for it; 0 if
        the storage does not choose, or the size is not known yet."""
        return 0

    def create(self, path: str, *, is_checked: bool = False) -> Writer:
        """Start a new file, as `Backend.create`. Where its servers fail it fails soon: the caller
        is expected to begin another one, on other servers.

        `is_checked`: whether readers of the file have checksums of its bytes, so that the storage's
        own may be of larger pieces.
        """
        return self.backend.create(path)

    def end(self) -> None:
        """Note that all files of the group are closed, and that there will be no more of them."""


@runtime_checkable
class IsFolder(Protocol):
    """A backend whose files programs of this node can reach by themselves. Thread-safe."""

    @property
    def root(self) -> str:
        """The folder's path."""
        ...

    def within_deadline(self, verb: str, path: str, work: Callable[[], Result]) -> Result:
        """Return what `work`, which makes system calls in the folder, returns.

        Raises: DeadlineError, saying what was not done ("begin a store in", ""); as `work`.
        """
        ...
