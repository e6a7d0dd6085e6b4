"""Work of one rank while a group loads one checkpoint.

A thread reads this rank's next pieces while the current ones are sent, round by round, to the ranks
that need them. Complete items are passed to the planner of torch.distributed.checkpoint. For one
thread. Importing this module imports torch.
"""

import io
import os
import pickle
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from bootseer.errors import CorruptError
from bootseer.fuse.striped.group.channel import GroupChannel
from bootseer.fuse.striped.group.plan import Assembly, GroupPlan, NeededRange, PlannedRead
from bootseer.fuse.striped.reading.opened import OpenFile
from bootseer.fuse.striped.storage import StripedStorage


class TakenPiece:
    """Bytes of one extent. Leaving the `with` block returns the buffer."""

    def __init__(self, view: memoryview, reader: "PieceReader", buffer: bytearray) -> None:
        self.view = view
        self._reader = reader
        self._buffer = buffer

    def __enter__(self) -> memoryview:
        return self.view

    def __exit__(self, *error: object) -> None:
        self._reader._free.put(self._buffer)


class PieceReader:
    """Reader of a list of extents, ahead of its consumer, with `BUFFERS` buffers used in turn.

    Extents are read one after the other, each from all of its parts at once. `take` is for one
    thread.
    """

    BUFFERS = 3

    def __init__(self, storage: StripedStorage, extents: Sequence[NeededRange]) -> None:
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
        """Wait for the next extent, and return its bytes. After an error, nothing more is read."""
        taken = self._ready.get()
        if isinstance(taken, BaseException):
            raise taken
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the read that is under way, which has a deadline of its own, and stop."""
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
            # Panics of hdfs-native are not an `Exception`, and must reach the consumer as well.
            self._ready.put(error)
        finally:
            if opened is not None:
                reader.close(opened)


class BytesFile(io.RawIOBase):
    """File of bytes in memory, which torch.load reads without another copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._data)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        part = self._data[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


class Loading:
    """Reading, sending and storing of one rank's pieces and items. `run` it once."""

    def __init__(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        channel: GroupChannel,
        *,
        extent_of: Callable[[ReadItem], NeededRange],
        piece_bytes: int,
    ) -> None:
        """Make a loader of torch's `plan`, whose `storage_data` is this rank's `GroupPlan`.

        `extent_of` returns where an item is stored. `piece_bytes`: length of the plan's longest
        piece.
        """
        self.read_bytes = 0
        """Count of bytes that were requested from the storage."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self._plan: GroupPlan = plan.storage_data
        self._planner = planner
        self._channel = channel
        self._piece_bytes = piece_bytes
        self._items: dict[NeededRange, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            self._items[extent_of(item)].append(item)
        self._buffers: list[bytearray] = []
        self._assembly = Assembly([extent for extent in self._items if extent.length], self._load)

    def run(self, storage: StripedStorage) -> None:
        """Carry out the plan. Raises on all ranks if one fails."""
        plan, rank = self._plan, self._channel.rank
        own = PieceReader(
            storage,
            [
                NeededRange(plan.files[piece.file], piece.start, piece.length)
                for piece in plan.own(rank)
            ],
        )
        with own:
            error: BaseException | None = None
            for pieces in plan.rounds:
                error = self._run_round(pieces, own, error)
            self._channel.agree(error)
            # From here on no rank waits for this one.
            for piece in plan.private:
                with own.take() as view:
                    self._deliver(piece, view)
        self._assembly.finish()
        self.read_bytes = own.read_bytes

    def _run_round(
        self, pieces: tuple[PlannedRead, ...], own: PieceReader, error: BaseException | None
    ) -> BaseException | None:
        """Exchange the pieces of one round. Return the error of this rank after the ranks agree."""
        rank = self._channel.rank
        mine = next((piece for piece in pieces if piece.owner == rank), None)
        taken = None
        try:
            if mine is not None and error is None:
                taken = own.take()
        except BaseException as caught:
            error = caught
        self._channel.agree(error)
        sends = []
        if taken is not None and mine is not None:
            peers = [peer for peer in self._plan.audiences[mine.audience] if peer != rank]
            sends.append((taken.view, peers))
            self.sent_bytes += mine.length * len(peers)
        wanted = [
            piece
            for piece in pieces
            if piece.owner != rank and rank in self._plan.audiences[piece.audience]
        ]
        while len(self._buffers) < len(wanted):
            self._buffers.append(bytearray(self._piece_bytes))
        arrived = [
            memoryview(buffer)[: piece.length]
            for buffer, piece in zip(self._buffers, wanted, strict=False)
        ]
        self._channel.exchange(
            sends,
            [(view, piece.owner) for view, piece in zip(arrived, wanted, strict=True)],
        )
        self.received_bytes += sum(piece.length for piece in wanted)
        try:
            if taken is not None and mine is not None:
                with taken as view:
                    self._deliver(mine, view)
            for piece, view in zip(wanted, arrived, strict=True):
                self._deliver(piece, view)
        except BaseException as caught:
            return caught
        return None

    def _deliver(self, piece: PlannedRead, view: memoryview) -> None:
        self._assembly.add(self._plan.files[piece.file], piece.start, view)

    def _load(self, extent: NeededRange, data: memoryview) -> None:
        """Load a stored item into the planner's tensors."""
        tensor: torch.Tensor | None = None
        for item in self._items[extent]:
            if item.type == LoadItemType.BYTE_IO:
                self._planner.load_bytes(item, io.BytesIO(data))
                continue
            if tensor is None:
                tensor = self._tensor(extent, data)
            part = tensor
            for dimension, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dimension, start, length)
            target = self._planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                raise CorruptError(
                    f"{item.storage_index.fqn} in {extent.path} has another size than the "
                    f"metadata says: {tuple(part.size())}, not {tuple(target.size())}"
                )
            target.copy_(part)
            self._planner.commit_tensor(item, target)

    @staticmethod
    def _tensor(extent: NeededRange, data: memoryview) -> torch.Tensor:
        try:
            loaded = torch.load(BytesFile(data), map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CorruptError(
                f"{extent.path} holds no tensor at byte {extent.start}: {error}"
            ) from error
        if not isinstance(loaded, torch.Tensor):
            raise CorruptError(f"{extent.path} holds no tensor at byte {extent.start}")
        return loaded
