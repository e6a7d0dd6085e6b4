"""Writer for storage that accepts an object only as a whole: registries, fsspec file systems.

One thread, as every `Writer`.
"""

import tempfile
from collections.abc import Callable
from typing import IO

from bootseer.errors import InvalidInputError, from_oserror
from bootseer.store.backend import Piece, Writer

# A larger object is kept in an unnamed temporary file instead of memory.
SPOOL_BYTES = 64 << 20


class SpoolingWriter(Writer):
    """Writer that keeps all bytes, and stores them as one object when it is closed."""

    def __init__(self, put: Callable[[IO[bytes], int], None], name: str) -> None:
        """Prepare to store the object `name` (for messages) by `put(file, size_bytes)`."""
        self._put = put
        self._name = name
        self._size_bytes = 0
        # Closed by `close` or `abort`, one of which the owner of a writer always calls.
        self._spool: IO[bytes] | None = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115

    def write(self, data: Piece) -> None:
        if self._spool is None:
            raise InvalidInputError(f"cannot write {self._name}: closed")
        try:
            self._spool.write(data)
        except OSError as error:
            what = f"keep {self._name} in {tempfile.gettempdir()}"
            raise from_oserror(error, what) from error
        self._size_bytes += len(data)

    def close(self) -> None:
        if self._spool is None:
            return
        spool, self._spool = self._spool, None
        with spool:
            spool.seek(0)
            self._put(spool, self._size_bytes)

    def abort(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None
