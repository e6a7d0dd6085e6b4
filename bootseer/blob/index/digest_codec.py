"""Digests as text (`sha256:<hex>`, as everywhere outside) and as 33 bytes in an index. Pure."""

from bootseer.errors import CorruptError

_ALGORITHMS = ("sha256", "blake3")
"""Their positions are part of the format."""

ENCODED_BYTES = 33
"""The number of the algorithm, and 32 bytes."""


def encode_digest(digest: str) -> bytes:
    """Raises: CorruptError for anything but an algorithm that we know and 64 hex digits."""
    algorithm, _, value = digest.partition(":")
    try:
        raw = bytes.fromhex(value)
    except ValueError:
        raw = b""
    if algorithm not in _ALGORITHMS or len(raw) != 32 or value != raw.hex():
        raise CorruptError(f"{digest!r} is not a digest like sha256:<64 hex digits>")
    return bytes((_ALGORITHMS.index(algorithm),)) + raw


def decode_digests(encoded: bytes, count: int) -> list[str]:
    """`count` digests. Raises: CorruptError."""
    if len(encoded) != ENCODED_BYTES * count:
        raise CorruptError("a table of digests has a wrong length")
    found = []
    for start in range(0, len(encoded), ENCODED_BYTES):
        number, raw = encoded[start], encoded[start + 1 : start + ENCODED_BYTES]
        if number >= len(_ALGORITHMS):
            raise CorruptError("a digest has an unknown algorithm")
        found.append(f"{_ALGORITHMS[number]}:{raw.hex()}")
    return found
