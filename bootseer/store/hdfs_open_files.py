"""Whether somebody writes to a stored file right now, where its time does not tell.

HDFS changes a file's time when it is created and when it is closed, however long it is written in
between. Thread-safe.
"""

from bootseer.errors import BootseerError, NotFoundError
from bootseer.store.backend import Backend
from bootseer.store.hdfs_connection import HdfsConnection


def is_being_written(backend: Backend, path: str) -> bool:
    """Whether the file at `path` is open for writing, or nobody can say; False but on HDFS.

    For files that nothing needs, for it changes their time: the NameNode is asked to let us append,
    which it refuses while a writer lives (its client renews its lease every 30 s).
    """
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
