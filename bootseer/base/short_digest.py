"""SHA-256 of names and other short texts, without OpenSSL.

`hashlib` loads OpenSSL, which takes longer than everything else that a start hashes. So this module
takes the implementation inside the interpreter if there is one, as `random` of the standard library
does; contents of files are hashed by `hashlib`, which is faster. Pure. Standard library alone.
"""

import sys

try:
    if sys.version_info >= (3, 12):
        from _sha2 import sha256 as _sha256  # type: ignore[import-not-found, unused-ignore]
    else:
        from _sha256 import sha256 as _sha256  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    from hashlib import sha256 as _sha256


def short_digest(data: bytes) -> str:
    """Return the SHA-256 of `data` in hexadecimal digits."""
    digest: str = _sha256(data).hexdigest()
    return digest
