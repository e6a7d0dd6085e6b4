"""One rank's part of the loading of one checkpoint.

Owns the order of its steps: a thread reads this rank's next pieces while the present ones are
handed on, round by round, to the ranks that need them; what is whole goes where the planner of
torch.distributed.checkpoint wants it. For one thread. Importing this imports torch.
"""

import io
import pickle
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from bootseer.errors import CorruptError
from bootseer.fuse.striped.group.assembly import Assembly, BytesFile
from bootseer.fuse.striped.group.channel import GroupChannel
from bootseer.fuse.striped.group.piece_reader import PieceReader
from bootseer.fuse.striped.group.plan import Extent, GroupPlan, Piece
from bootseer.fuse.striped.storage import StripedStorage


class Loading:
    """One rank's part of one load: `run` it once."""

    def __init__(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        channel: GroupChannel,
        *,
        extent_of: Callable[[ReadItem], Extent],
        piece_bytes: int,
    ) -> None:
        """`plan`: torch's, with this rank's `GroupPlan` in it. `extent_of`: where an item is
        stored. `piece_bytes`: no piece of the plan is longer."""
        self.read_bytes = 0
        """Asked of the storage."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self._plan: GroupPlan = plan.storage_data
        self._planner = planner
        self._channel = channel
        self._piece_bytes = piece_bytes
        self._items: dict[Extent, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            self._items[extent_of(item)].append(item)
        self._buffers: list[bytearray] = []
        self._assembly = Assembly([extent for extent in self._items if extent.length], self._load)

    def run(self, storage: StripedStorage) -> None:
        """Read, hand on and load all that the plan says. Raises on all ranks when one fails."""
        plan, rank = self._plan, self._channel.rank
        own = PieceReader(
            storage,
            [Extent(plan.files[piece.file], piece.start, piece.length) for piece in plan.own(rank)],
        )
        with own:
            error: BaseException | None = None
            for pieces in plan.rounds:
                error = self._run_round(pieces, own, error)
            self._channel.agree(error)
            # From here on no rank waits for this one before it is done.
            for piece in plan.private:
                with own.take() as view:
                    self._deliver(piece, view)
        self._assembly.finish()
        self.read_bytes = own.read_bytes

    def _run_round(
        self, pieces: tuple[Piece, ...], own: PieceReader, error: BaseException | None
    ) -> BaseException | None:
        """Hand on the pieces of one round; returns what failed here since ranks last agreed."""
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

    def _deliver(self, piece: Piece, view: memoryview) -> None:
        self._assembly.add(self._plan.files[piece.file], piece.start, view)

    def _load(self, extent: Extent, data: memoryview) -> None:
        """Put a stored item where the planner wants it."""
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
    def _tensor(extent: Extent, data: memoryview) -> torch.Tensor:
        try:
            loaded = torch.load(BytesFile(data), map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CorruptError(
                f"{extent.path} holds no tensor at byte {extent.start}: {error}"
            ) from error
        if not isinstance(loaded, torch.Tensor):
            raise CorruptError(f"{extent.path} holds no tensor at byte {extent.start}")
        return loaded
