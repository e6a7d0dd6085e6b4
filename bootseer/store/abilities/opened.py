"""A stored file that is kept open for many reads, and reads that can be given up.

Opening costs a walk through folders, or a call to a NameNode: the striped file system reads a file
in many pieces and opens it once. Backends that have nothing to keep open are served by
`open_reader`, too. Thread-safe.
"""

from typing import Protocol, runtime_checkable

from bootseer.store.backend import Backend, FileInfo
from bootseer.transfer.attempt import Attempt


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
