"""A function that returns bytes as one that a fetcher reads with."""

from collections.abc import Callable

from bootseer.transfer.attempt import Attempt
from bootseer.transfer.chunks import Reader


def into(read: Callable[[str, int, int], bytes]) -> Reader:
    """`read(key, offset, length)` as a `Reader`, which tells nothing before it has ended."""

    def read_into(key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        data = read(key, offset, len(buffer))[: len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    return read_into
