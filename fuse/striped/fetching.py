"""Fetching one run of bytes of a file, verified; and what a reader is told when that fails.

Owns what is tried again, and how often. Thread-safe; waits at most for its deadline, and for the
backend's own.
"""

import errno
import logging
import os
import time

from bootseer.errors import BootseerError, CorruptError, NotFoundError, UnavailableError
from bootseer.fuse.striped.chunks import OpenFile
from bootseer.fuse.striped.view import FileView, Span
from bootseer.store.backend import Backend

_log = logging.getLogger(__name__)

_RETRY_PAUSES_S = (0.1, 0.5)


class Fetcher:
    """Reads of one mount's storage."""

    def __init__(self, backend: Backend, deadline_s: float) -> None:
        self._backend = backend
        self._deadline_s = deadline_s

    def fetch(self, file: OpenFile, span: Span) -> memoryview:
        """The verified bytes of `span`; a mismatch is asked for once more, an outage twice."""
        stop_s = time.monotonic() + self._deadline_s
        pauses = iter(_RETRY_PAUSES_S)
        may_refetch = True
        while True:
            view = file.view
            try:
                return self._fetch_once(view, span)
            except CorruptError as error:
                if not may_refetch:
                    raise
                may_refetch = False
                _log.warning("%s; asking once more", error)
            except (UnavailableError, NotFoundError) as error:
                pause_s = next(pauses, None)
                if pause_s is None or time.monotonic() + pause_s >= stop_s:
                    if isinstance(error, NotFoundError):
                        raise UnavailableError(
                            f"{view.path} cannot be read on: what it was stored in is gone; it was "
                            "replaced or removed elsewhere while open here"
                        ) from error
                    raise
                _log.warning("%s; trying again", error)
                time.sleep(pause_s)

    def _fetch_once(self, view: FileView, span: Span) -> memoryview:
        path, stored_offset = view.source(span)
        buffer = memoryview(bytearray(span.length))
        count = self._backend.read_into(path, stored_offset, buffer)
        view.verify(span, buffer[:count])
        if view.layout is None:
            # An ordinary file has no checksums of ours and may have been replaced under its name:
            # what was read belongs to this generation only if the file is still the same one now.
            info = self._backend.stat(path)
            if (info.size_bytes, info.modified_ns) != (view.size_bytes, view.modified_ns):
                raise UnavailableError(
                    f"{path} was changed elsewhere while open here; open it again"
                )
        return buffer


def as_raisable(error: BaseException | None, path: str) -> BaseException:
    """What a reader is told. One error may be raised to several readers: each gets its own."""
    if isinstance(error, BootseerError):
        return type(error)(*error.args)
    if isinstance(error, OSError):
        return OSError(error.errno, os.strerror(error.errno or errno.EIO), path)
    return UnavailableError(f"cannot read {path}: {type(error).__name__}: {error}")
