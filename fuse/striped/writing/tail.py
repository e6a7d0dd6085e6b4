"""Last bytes of a file that is being written: not sent to the storage yet, and changeable.

Pure data structure, not thread-safe. Large buffers are kept as they are, so that they reach the
backend without a copy; small writes are joined, so that a million of them stay cheap.
"""

from bootseer.store.backend import Piece

Data = Piece | memoryview
"""Bytes of a write. A bytearray belongs to the tail from then on; anything else is copied."""

_LARGE_BYTES = 128 * 2**10
_JOINED_BYTES = 256 * 2**10
_PIECE_BYTES = 2**20


class Tail:
    """Append, patch and cut bytes."""

    __slots__ = ("_last", "_pieces", "_room_bytes", "length")

    def __init__(self, data: bytes = b"") -> None:
        self._pieces: list[Piece] = [data] if data else []
        """Buffers that are never changed again, because they may be on their way."""
        self._last = bytearray()
        """The bytes after `_pieces`, which grow."""
        self._room_bytes = _JOINED_BYTES
        """Number of bytes by which `_last` may still grow."""
        self.length = len(data)

    def append(self, data: Data) -> None:
        """Add `data` at the end."""
        count = len(data)
        self.length += count
        if isinstance(data, bytearray):
            self._settle()
            self._last = data
            # If the writer's buffer is not aligned, the kernel sends its last bytes separately.
            self._room_bytes = _PIECE_BYTES - count
        else:
            if count > self._room_bytes or count >= _LARGE_BYTES:
                self._settle()
            if count >= _LARGE_BYTES:
                self._pieces.append(bytes(data))
                return
            self._last += data
            self._room_bytes -= count
        if self._room_bytes <= 0:
            self._settle()

    def patch(self, offset: int, data: bytes | memoryview) -> None:
        """Replace the bytes from `offset`; beyond the end, `data` is appended."""
        self._open()
        self._last[offset : offset + len(data)] = data
        self.length = len(self._last)

    def cut(self, length: int) -> None:
        """Keep the first `length` bytes."""
        self._open()
        del self._last[length:]
        self.length = len(self._last)

    def pieces(self) -> list[Piece]:
        """Return the content as buffers, in order."""
        self._settle()
        return list(self._pieces)

    def join(self) -> bytes:
        """Return the content as one bytes object."""
        self._settle()
        if len(self._pieces) == 1 and isinstance(self._pieces[0], bytes):
            return self._pieces[0]
        joined = b"".join(self._pieces)
        self._pieces = [joined]
        return joined

    def clear(self) -> None:
        """Remove the content."""
        self._pieces = []
        self._last = bytearray()
        self._room_bytes = _JOINED_BYTES
        self.length = 0

    def _settle(self) -> None:
        if self._last:
            self._pieces.append(self._last)
            self._last = bytearray()
        self._room_bytes = _JOINED_BYTES

    def _open(self) -> None:
        """Make all of the content mutable, for this and further changes."""
        if self._pieces:
            self._last = bytearray(self.join())
            self._pieces = []
            self._room_bytes = _JOINED_BYTES - self.length
