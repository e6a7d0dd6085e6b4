"""Functions that return bytes, as the transfer engine's readers."""

from collections.abc import Callable

from bootseer.transfer.attempt import Attempt
from bootseer.transfer.chunks import Reader


def as_reader(read: Callable[[str, int, int], bytes]) -> Reader:
    """Return `read(key, offset, length)` as a `Reader` that reports no progress before its end."""

    def read_into(key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        data = read(key, offset, len(buffer))[: len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    return read_into
