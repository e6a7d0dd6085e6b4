"""Content of the files that are moved: cheap to make, with its position in every MiB."""

import os

BLOCK_BYTES = 2**20
_STAMP_BYTES = 8


class Content:
    """Blocks of the same random bytes, each with its number in front. Immutable."""

    def __init__(self) -> None:
        self._rest = os.urandom(BLOCK_BYTES - _STAMP_BYTES)

    def block(self, index: int) -> bytes:
        """Return the block at `index` MiB."""
        return index.to_bytes(_STAMP_BYTES, "little") + self._rest


class Check:
    """Counts the bytes that were read, and checks their positions."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def feed(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Check `data`, which was read at `offset`.

        Raises: RuntimeError if the bytes belong to another offset.
        """
        self.read_bytes += len(data)
        first = -offset % BLOCK_BYTES
        for start in range(first, len(data) - _STAMP_BYTES + 1, BLOCK_BYTES):
            found = int.from_bytes(data[start : start + _STAMP_BYTES], "little")
            if found != (offset + start) // BLOCK_BYTES:
                raise RuntimeError(f"the bytes of block {found} are at offset {offset + start}")
