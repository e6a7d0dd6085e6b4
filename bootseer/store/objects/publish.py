"""Atomic publication of an object: written under a temporary name, then renamed.

Thread-safe: functions without state.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from bootseer.errors import AlreadyExistsError, BootseerError, UnavailableError, from_oserror
from bootseer.store.backend import Backend
from bootseer.store.paths import TEMPORARY

logger = logging.getLogger(__name__)

# Size of the pieces in which a file is sent.
_PIECE_BYTES = 4 << 20


def publish_object(
    backend: Backend, path: str, data: bytes | Path | Iterable[bytes], *, replace: bool
) -> bool:
    """Create the file `path` atomically; return False if it exists and `replace` is not set.

    On a backend without an atomic rename the file is written in place: such a backend shows a new
    file only when it is closed.
    """
    if not backend.traits.one_step_rename:
        try:
            _write(backend, path, data, overwrite=replace)
        except AlreadyExistsError:
            if replace:
                raise
            return False
        return True
    temporary = f"{TEMPORARY}/{os.urandom(16).hex()}"
    try:
        _write_hidden(backend, temporary, data)
        backend.rename(temporary, path, overwrite=replace)
    except AlreadyExistsError:
        _forget(backend, temporary)
        if replace:
            raise
        return False
    except BaseException:
        _forget(backend, temporary)
        raise
    return True


def _write_hidden(backend: Backend, path: str, data: bytes | Path | Iterable[bytes]) -> None:
    """Write a temporary file; write it a second time after a failure if `data` can be read again.

    After the death of a DataNode, the next write may still be sent to that DataNode and fail.
    """
    try:
        _write(backend, path, data, overwrite=False)
    except UnavailableError as error:
        if isinstance(data, Iterator):
            raise
        logger.info("writing %s once more: %s", path, error)
        _write(backend, path, data, overwrite=True)


def _write(
    backend: Backend, path: str, data: bytes | Path | Iterable[bytes], *, overwrite: bool
) -> None:
    with backend.create(path, overwrite=overwrite) as writer:
        for piece in _pieces(data):
            writer.write(piece)


def _forget(backend: Backend, temporary: str) -> None:
    try:
        backend.delete(temporary)
    except BootseerError as error:
        logger.warning("left %s/%s behind, to be swept later: %s", backend.url, temporary, error)


def _pieces(data: bytes | Path | Iterable[bytes]) -> Iterator[bytes]:
    if isinstance(data, bytes | bytearray | memoryview):
        # The writers of some backends copy anything but `bytes` slowly.
        yield data if isinstance(data, bytes) else bytes(data)
        return
    if not isinstance(data, Path):
        yield from data
        return
    try:
        with data.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise from_oserror(error, f"read {data}") from error
