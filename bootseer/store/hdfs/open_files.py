"""Whether a client writes to a stored file right now, where its time does not tell.

HDFS changes a file's time when it is created and when it is closed, however long it is written in
between. Thread-safe.
"""

from typing import Protocol, runtime_checkable

from bootseer.errors import BootseerError, NotFoundError
from bootseer.store.backend import Backend
from bootseer.store.hdfs.connection import HdfsConnection


@runtime_checkable
class KnowsClosed(Protocol):
    """A backend that can ask whether a file is closed."""

    def is_closed(self, path: str) -> bool:
        """Returns whether no client has the file open for writing. Raises: BootseerError."""
        ...


def is_being_written(backend: Backend, path: str) -> bool:
    """Whether the file at `path` is open for writing, or that cannot be told; False but on HDFS.

    For files that nothing needs, for it may change their time: by hdfs-native the NameNode can only
    be asked to let us append, which it refuses while a writer lives (whose client renews its lease
    every 30 s).
    """
    if isinstance(backend, KnowsClosed):
        try:
            return not backend.is_closed(path)
        except NotFoundError:
            return False
        except BootseerError:
            return True
    if not isinstance(backend, HdfsConnection):
        return False
    full = backend.full(path, file=True)
    try:
        backend.call(lambda client: client.inner.append(full).close(), "append to", path)
    except NotFoundError:
        return False
    except BootseerError:
        return True
    return False
