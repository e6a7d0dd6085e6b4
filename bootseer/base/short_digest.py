"""SHA-256 of names and other short texts, without OpenSSL.

`hashlib` loads OpenSSL, which takes longer than everything else that a start hashes. So this module
takes the implementation inside the interpreter if there is one, as `random` of the standard library
does. `hashlib` is up to seven times as fast: `Sha256` takes it for more than half a megabyte. Pure.
Standard library alone. One thread for each object.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import hashlib

# The interpreter's implementation hashes as much in half of the time that OpenSSL takes to load.
_SHORT_BYTES = 512 * 1024

try:
    if sys.version_info >= (3, 12):
        from _sha2 import sha256 as _sha256  # type: ignore[import-not-found, unused-ignore]
    else:
        from _sha256 import sha256 as _sha256  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    from hashlib import sha256 as _sha256


def short_digest(data: bytes | bytearray) -> str:
    """Return the SHA-256 of `data` in hexadecimal digits."""
    digest: str = _sha256(data).hexdigest()
    return digest


class Sha256:
    """SHA-256 of pieces that may be many. OpenSSL is loaded once they are."""

    def __init__(self, data: bytes | bytearray | memoryview = b"") -> None:
        self._short = bytearray(data)
        self._digest: hashlib._Hash | None = None

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add a piece."""
        if self._digest is None:
            self._short += data
            if len(self._short) <= _SHORT_BYTES:
                return
            from hashlib import sha256  # here: see the module

            self._digest, data = sha256(), self._short
        self._digest.update(data)

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal digits. No piece may be added after that."""
        return self._digest.hexdigest() if self._digest else short_digest(self._short)
