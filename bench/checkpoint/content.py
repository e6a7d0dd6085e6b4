"""The content of the files that are moved: cheap to make, and every MiB of it names itself."""

import os

BLOCK_BYTES = 2**20
_STAMP_BYTES = 8


class Content:
    """Random blocks, all the same but for their number in front. Immutable after creation."""

    def __init__(self) -> None:
        self._rest = os.urandom(BLOCK_BYTES - _STAMP_BYTES)

    def block(self, index: int) -> bytes:
        """The 1 MiB at `index` MiB."""
        return index.to_bytes(_STAMP_BYTES, "little") + self._rest


class Check:
    """Counts what was read, and sees that it is what belongs there."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def feed(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """`data` was read at `offset`. Raises: RuntimeError when it belongs elsewhere."""
        self.read_bytes += len(data)
        first = -offset % BLOCK_BYTES
        for start in range(first, len(data) - _STAMP_BYTES + 1, BLOCK_BYTES):
            found = int.from_bytes(data[start : start + _STAMP_BYTES], "little")
            if found != (offset + start) // BLOCK_BYTES:
                raise RuntimeError(f"at {offset + start} are the bytes of block {found}")
