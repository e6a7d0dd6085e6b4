"""Whether a client writes to a stored file right now, where its time does not tell.

HDFS changes a file's time when it is created and when it is closed, however long it is written in
between. Thread-safe.
"""

from typing import Protocol, runtime_checkable

from bootseer.errors import BootseerError, NotFoundError
from bootseer.store.backend import Backend


@runtime_checkable
class KnowsClosed(Protocol):
    """A backend that can ask whether a file is closed."""

    def is_closed(self, path: str) -> bool:
        """Returns whether no client has the file open for writing. Raises: BootseerError."""
        ...


def is_being_written(backend: Backend, path: str) -> bool:
    """Whether the file at `path` is open for writing, or that cannot be told; False but on HDFS.

    Changes nothing: the NameNode is asked where the file's blocks are, and says it with them.
    """
    if not isinstance(backend, KnowsClosed):
        return False
    try:
        return not backend.is_closed(path)
    except NotFoundError:
        return False
    except BootseerError:
        return True
