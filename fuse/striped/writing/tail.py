"""The end of a file that is being written: bytes not yet sent, still open to change.

Pure data structure, not thread-safe. Keeps what comes in large pieces as it is, so that they reach
the backend with one copy in all, and joins small ones, so that a million tiny writes stay cheap.
"""

_LARGE_BYTES = 128 * 2**10
_JOINED_BYTES = 256 * 2**10


class Tail:
    """Append, patch and cut bytes."""

    __slots__ = ("_pieces", "_small", "length")

    def __init__(self, data: bytes = b"") -> None:
        self._pieces: list[bytes] = [data] if data else []
        self._small = bytearray()
        self.length = len(data)

    def append(self, data: bytes | memoryview) -> None:
        """Add `data` at the end; it is copied."""
        self.length += len(data)
        if len(data) >= _LARGE_BYTES:
            self._settle()
            self._pieces.append(bytes(data))
            return
        self._small += data
        if len(self._small) >= _JOINED_BYTES:
            self._settle()

    def patch(self, offset: int, data: bytes | memoryview) -> None:
        """Replace the bytes from `offset`; beyond the end, `data` is appended."""
        joined = bytearray(self.join())
        joined[offset : offset + len(data)] = data
        self._replace(joined)

    def cut(self, length: int) -> None:
        """Keep the first `length` bytes."""
        self._replace(bytearray(self.join()[:length]))

    def pieces(self) -> list[bytes]:
        """The content, in order."""
        self._settle()
        return list(self._pieces)

    def join(self) -> bytes:
        """The content in one piece."""
        self._settle()
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def clear(self) -> None:
        """Forget everything."""
        self._replace(bytearray())

    def _settle(self) -> None:
        if self._small:
            self._pieces.append(bytes(self._small))
            self._small = bytearray()

    def _replace(self, data: bytearray) -> None:
        # Random writes into one small file come in runs: keep the content mutable.
        self._pieces = []
        self._small = data
        self.length = len(data)
