"""Reads a known list of extents ahead of their consumer, in a few buffers that go round.

Owns one thread and its buffers: at most `BUFFERS` pieces are held, read or being read. `take` is
for one thread, and takes the pieces in order.
"""

import queue
import threading
from collections.abc import Sequence
from typing import Self

from bootseer.errors import CorruptError
from bootseer.fuse.striped.group.plan import Extent
from bootseer.fuse.striped.reading.chunks import OpenFile
from bootseer.fuse.striped.storage import StripedStorage


class TakenPiece:
    """The bytes of one extent; leaving the `with` block gives the buffer back."""

    def __init__(self, view: memoryview, reader: "PieceReader", buffer: bytearray) -> None:
        self.view = view
        self._reader = reader
        self._buffer = buffer

    def __enter__(self) -> memoryview:
        return self.view

    def __exit__(self, *error: object) -> None:
        self._reader._free.put(self._buffer)


class PieceReader:
    """Extents of one storage, read one after the other, each from all of its parts at once."""

    BUFFERS = 3

    def __init__(self, storage: StripedStorage, extents: Sequence[Extent]) -> None:
        self.read_bytes = 0
        self._storage = storage
        self._extents = extents
        self._free: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[TakenPiece | BaseException] = queue.SimpleQueue()
        self._stopped = False
        for _ in range(min(self.BUFFERS, len(extents))):
            self._free.put(bytearray(max(extent.length for extent in extents)))
        self._thread = threading.Thread(target=self._run, name="group-read", daemon=True)
        if extents:
            self._thread.start()

    def take(self) -> TakenPiece:
        """The next extent's bytes, waiting for them. Raises what reading it failed with: nothing
        is read after that."""
        taken = self._ready.get()
        if isinstance(taken, BaseException):
            raise taken
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, after the read that is under way, which has a deadline of its own."""
        self._stopped = True
        self._free.put(None)
        if self._extents:
            self._thread.join()

    def _run(self) -> None:
        reader = self._storage.reader
        opened: OpenFile | None = None
        try:
            for extent in self._extents:
                buffer = self._free.get()
                if buffer is None or self._stopped:
                    return
                if opened is None or opened.view.path != extent.path:
                    if opened is not None:
                        reader.close(opened)
                    opened = None
                    opened = reader.open(self._storage.tree.stored.view(extent.path))
                if opened.view.size_bytes < extent.start + extent.length:
                    raise CorruptError(
                        f"{extent.path} in {self._storage.backend.url} ends before byte "
                        f"{extent.start + extent.length}, which the checkpoint's metadata names"
                    )
                view = memoryview(buffer)[: extent.length]
                reader.read_into(opened, extent.start, view)
                self.read_bytes += extent.length
                self._ready.put(TakenPiece(view, self, buffer))
        except BaseException as error:
            # hdfs-native panics with exceptions that are no `Exception`; the taker must get them.
            self._ready.put(error)
        finally:
            if opened is not None:
                reader.close(opened)
