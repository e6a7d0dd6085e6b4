"""A writer for storage that takes an object only as a whole: keeps it until it is closed.

For one thread, as every `Writer`.
"""

import tempfile
from collections.abc import Callable
from typing import IO

from bootseer.errors import InvalidInputError, from_oserror
from bootseer.store.backend import Piece, Writer

# An object up to this size is kept in memory; a larger one lies in an unnamed temporary file.
SPOOL_BYTES = 64 << 20


class SpoolingWriter(Writer):
    """Writer that keeps all bytes and puts them as one object when it is closed."""

    def __init__(self, put: Callable[[IO[bytes], int], None], name: str) -> None:
        """`put` gets the object, from its start, and its size; `name` is for messages."""
        self._put = put
        self._name = name
        self._size_bytes = 0
        # Closed by `close` or `abort`, which a writer's owner has to call in any case.
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
