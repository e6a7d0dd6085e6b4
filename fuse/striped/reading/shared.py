"""Stripe units that the nodes of a start send each other (`bootseer.fanout`).

`shared_chunks` names the units of a file by their digests, which are in its layout. `Sources` is
what the reads of a mount ask: the backend, and while a start has a fan-out, the ranges of parts
that it brings. A part belongs to one generation, so bytes of a file that was replaced are never
taken for those of the new one. Any thread.
"""

from typing import TYPE_CHECKING

from bootseer.fuse.striped.view import FileView
from bootseer.store.backend import Backend
from bootseer.transfer.ranges import Chunk

if TYPE_CHECKING:
    # A mount that no start with a fan-out uses does not load it.
    from bootseer.fanout.local import SharedRanges

FANOUT_SOURCE = "fan-out"
"""Name of the place in the statistics of reads."""


class Sources:
    """Places that stored bytes are read from."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.shared: SharedRanges | None = None
        """Ranges of parts that the fan-out brings; set by `StripedReader.share`."""


def shared_chunks(view: FileView, length: int) -> list[Chunk]:
    """Return the stripe units of the first `length` bytes of a file as chunks of its parts. Pure.

    An ordinary file has none, because it has no digests.
    """
    chunks = []
    position, end = 0, min(length, view.size_bytes)
    while position < end and view.layout is not None:
        unit = view.unit_at(position)
        path, offset = view.source(unit)
        chunks.append(Chunk(path, offset, unit.length, view.digest(unit)))
        position = unit.end
    return chunks
