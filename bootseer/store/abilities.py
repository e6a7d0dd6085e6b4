"""What some backends can do besides, and how it is asked for: files that are kept open for many
reads, files that are joined, servers that are chosen, writes that a library buffers, files of which
the storage knows that they are being written.

Opening costs a walk through folders, or a call to a NameNode: the striped file system reads a file
in many pieces and opens it once. Backends that have nothing to keep open are served by
`open_reader`, too. Thread-safe.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from bootseer.errors import BootseerError, NotFoundError
from bootseer.store.backend import Backend, FileInfo
from bootseer.transfer.attempt import Attempt

Result = TypeVar("Result")


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


@runtime_checkable
class OpensReaders(Protocol):
    """A backend that can keep files open."""

    def open_reader(self, path: str, *, is_checked: bool = False) -> Reader:
        """Start reading the file at `path`; `is_checked`: by attempts of that kind, for the most
        part. Raises: NotFoundError, UnavailableError."""
        ...


class _PathReader:
    """Reads by name, for backends that keep nothing open."""

    block_bytes = 0
    can_stop = False
    has_replicas = False

    def __init__(self, backend: Backend, path: str) -> None:
        self._backend = backend
        self._path = path

    def read_into(self, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        return self._backend.read_into(self._path, offset, buffer, attempt)

    def current(self) -> FileInfo:
        return self._backend.stat(self._path)


def open_reader(backend: Backend, path: str, *, is_checked: bool = False) -> Reader:
    """The file at `path`, kept open where the backend can do so."""
    if isinstance(backend, OpensReaders):
        return backend.open_reader(path, is_checked=is_checked)
    return _PathReader(backend, path)


@runtime_checkable
class JoinsFiles(Protocol):
    """A backend that can join stored files into one without moving bytes. Thread-safe."""

    def can_join(self) -> bool:
        """Whether the server at the other end can, and lets us. Asked once, then remembered."""
        ...

    def join(self, target: str, sources: Sequence[str]) -> None:
        """Append `sources`, in order, to the file `target` in one atomic step; they vanish.

        All are closed files of ours. Raises: NotFoundError, UnavailableError, DeadlineError.
        """
        ...


def joiner(backend: Backend) -> JoinsFiles | None:
    """`backend` as one that can join files; None where it cannot."""
    if isinstance(backend, JoinsFiles) and backend.can_join():
        return backend
    return None


@runtime_checkable
class PlacesFiles(Protocol):
    """A backend that lets a writer choose the servers of a file. Thread-safe. Nothing raises:
    nothing depends on it but speed."""

    @property
    def is_one_rack(self) -> bool:
        """Whether replicas may lie on any servers: as far as is known, none are nearer to each
        other than the rest."""
        ...

    def place(self, path: str, avoid: Collection[str]) -> tuple[str, ...] | None:
        """Have servers chosen, other than `avoid`, for the first block of a file that was just
        created, before anything is written to it.

        Returns them, one for each replica; empty where the storage does not say; None where there
        are too few others, and nothing was chosen.
        """
        ...

    def servers_of(self, path: str) -> tuple[str, ...]:
        """The servers that take the block which is being written now, one for each replica.

        Empty where the storage does not say.
        """
        ...


@runtime_checkable
class WaitsForServers(Protocol):
    """A backend that can wait for servers that are gone for longer than one call may take."""

    def wait_for_servers(self, patience_s: float) -> None:
        """Ask for so long, from now on, what changes nothing, or no more when it is done twice."""
        ...


@runtime_checkable
class BuffersWrites(Protocol):
    """A backend whose client library holds much of files that are being written."""

    writer_bytes: int
    """What an open writer takes at most, beside what was handed to it and `Writer.held_bytes`."""


@runtime_checkable
class KnowsClosed(Protocol):
    """A backend that can ask whether a file is closed. Thread-safe."""

    def is_closed(self, path: str) -> bool:
        """Returns whether no client has the file open for writing. Raises: BootseerError."""
        ...


def is_being_written(backend: Backend, path: str) -> bool:
    """Whether the file at `path` is open for writing, or that cannot be told; False where the
    storage does not know. Changes nothing.

    HDFS changes a file's time when it is created and when it is closed, however long it is written
    in between; its NameNode says with the places of a file's blocks whether it is open.
    """
    if not isinstance(backend, KnowsClosed):
        return False
    try:
        return not backend.is_closed(path)
    except NotFoundError:
        return False
    except BootseerError:
        return True


@runtime_checkable
class DeletesMany(Protocol):
    """A backend that deletes many files by one request. Thread-safe."""

    def delete_files(self, paths: Sequence[str]) -> None:
        """Remove files; missing ones are no error. After an error some are gone and some are not.
        Raises: PermissionDeniedError, UnavailableError, DeadlineError."""
        ...


def delete_files(backend: Backend, paths: Sequence[str]) -> None:
    """Remove files, by as few requests as the backend can. Raises: as `DeletesMany`."""
    if isinstance(backend, DeletesMany):
        backend.delete_files(paths)
    else:
        for path in paths:
            backend.delete(path)


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
