"""The storage's own clock, by which the ages of stored files are told: a node's may be days off.

Thread-safe: no state.
"""

import contextlib

from bootseer.errors import BootseerError
from bootseer.store.backend import Backend


def storage_time_ns(backend: Backend, path: str) -> int:
    """What the storage's clock says, in nanoseconds since 1970: the time of a new file, which is
    written at `path` and removed again. 0 where the storage tells no times.

    Beside an image in a registry (`oci://`) it is this node's clock: objects there carry the time
    of the node that wrote them. Raises: PermissionDeniedError, NoSpaceError, UnavailableError,
    DeadlineError.
    """
    with backend.create(path) as writer:
        writer.write(b"\n")
    try:
        return backend.stat(path).modified_ns
    finally:
        with contextlib.suppress(BootseerError):
            backend.delete(path)
