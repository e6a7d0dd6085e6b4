"""What a storage's client library holds of files that are being written."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class BuffersWrites(Protocol):
    """A backend whose library holds much."""

    writer_bytes: int
    """What an open writer takes at most, beside what was handed to it and `Writer.held_bytes`."""
