"""Storage reader of torch.distributed.checkpoint that reads each byte on one rank of a group.

    dcp.load(state, storage_reader=GroupReader("hdfs://namenode:8020/ckpt/step-100"))

`plan` divides the reads among the ranks, `channel` has the collectives, `loading` does the work.
One load runs at a time. Importing this module imports torch.
"""

import dataclasses
import logging
import os
import pickle
import uuid
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from bootseer.base.redact import public_url
from bootseer.base.urls import absolute_url
from bootseer.errors import CorruptError, InvalidInputError, UnsupportedError
from bootseer.fuse.striped.group.channel import GroupChannel
from bootseer.fuse.striped.group.loading import Loading, PieceReader
from bootseer.fuse.striped.group.plan import NeededRange, plan_group
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.tools.copy import open_storage
from bootseer.settings.config import Settings, load_settings

_log = logging.getLogger(__name__)

_METADATA = ".metadata"
_MAX_METADATA_BYTES = 2**31
# Four units of a default file: read at once from four of its parts.
DEFAULT_PIECE_BYTES = 16 * 2**20
DEFAULT_MEMORY_BYTES = 256 * 2**20
# Longest wait of a rank for the others, in deadlines: a rank may spend one on a read before it
# reports its failure.
_DEADLINES = 2


class GroupStatistics(Struct, frozen=True):
    """Bytes that one rank moved in its last load."""

    read_bytes: int = 0
    """Bytes asked of the storage by this rank, including metadata."""
    fetched_bytes: int = 0
    """Bytes fetched from the storage for these reads, in whole blocks of verification."""
    sent_bytes: int = 0
    received_bytes: int = 0


class GroupReader(StorageReader):  # type: ignore[misc]
    """Storage reader for `dcp.load`, which all ranks of a process group call."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        process_group: Any = None,
        *,
        settings: Settings | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
    ) -> None:
        """Make a reader. All arguments must be the same on all ranks.

        Args:
            url: Folder of the checkpoint, striped or not.
            process_group: Process group that `dcp.load` gets; None is the default group.
            settings: Settings of the node; by default those of the environment and files.
            memory_bytes: Memory of a rank for pieces on their way. A rank also holds the largest
                stored tensor twice.
            piece_bytes: Length of a piece, which one rank reads at once.
        """
        super().__init__()
        if piece_bytes <= 0 or memory_bytes < (PieceReader.BUFFERS + 1) * piece_bytes:
            raise InvalidInputError(
                f"{memory_bytes} bytes of memory are too few for pieces of {piece_bytes} bytes"
            )
        self.statistics = GroupStatistics()
        self._settings = settings or load_settings()
        self._group = process_group
        self._piece_bytes = piece_bytes
        self._pieces_per_round = memory_bytes // piece_bytes - PieceReader.BUFFERS
        self._storage: StripedStorage | None = None
        self._channel: GroupChannel | None = None
        self._stored: dict[Any, Any] = {}
        self.reset(url)

    # ---- what dcp.load calls, in this order -----------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of `checkpoint_id` if one is given."""
        self.close()
        if checkpoint_id is not None:
            self._url = absolute_url(os.fspath(checkpoint_id))
        self._channel = None
        self._stored = {}

    def read_metadata(self) -> Metadata:
        """Return the checkpoint's metadata, which rank 0 reads for all.

        The metadata is a pickle, which torch.distributed.checkpoint trusts as well. Raises the same
        error on all ranks: NotFoundError if there is no complete checkpoint, CorruptError,
        DeadlineError and others.
        """
        self.statistics = GroupStatistics()
        self._channel = GroupChannel(self._group, _DEADLINES * self._settings.deadline_s)
        data, error = None, None
        if self._channel.rank == 0:
            try:
                data = self._read_metadata()
            except BaseException as caught:
                error = caught
        try:
            data = self._channel.broadcast(data, error)
        except BaseException:
            self.close()
            raise
        try:
            metadata = pickle.loads(data)
        except Exception as error:
            # A pickle may fail in any way.
            raise CorruptError(
                f"{public_url(self._url)}/{_METADATA} is not what torch.distributed.checkpoint "
                f"writes: {error}"
            ) from error
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = str(uuid.uuid4())
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Keep the map of stored items."""
        if metadata.storage_data is None:
            raise CorruptError(f"{public_url(self._url)}/{_METADATA} does not say where items are")
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Divide the reading among the ranks. Raises: InvalidInputError, UnsupportedError."""
        assert self._channel is not None
        if len(plans) != self._channel.size:
            raise InvalidInputError(
                f"dcp.load works with {len(plans)} ranks and GroupReader with "
                f"{self._channel.size}: give both the same process group"
            )
        group_plans = plan_group(
            [{self._extent(item) for item in plan.items} for plan in plans],
            piece_bytes=self._piece_bytes,
            pieces_per_round=self._pieces_per_round,
        )
        return [
            dataclasses.replace(plan, storage_data=own)
            for plan, own in zip(plans, group_plans, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Carry out the plan. The future is done when this returns.

        Raises on all ranks the error of the rank that failed; UnavailableError or DeadlineError if
        a rank dies or does not answer within twice the deadline.
        """
        assert self._channel is not None
        try:
            loading = Loading(
                plan,
                planner,
                self._channel,
                extent_of=self._extent,
                piece_bytes=self._piece_bytes,
            )
            loading.run(self._open())
            self._note(
                read_bytes=loading.read_bytes,
                sent_bytes=loading.sent_bytes,
                received_bytes=loading.received_bytes,
            )
        except BaseException as error:
            # If a rank is gone, dcp.load raises only the failure of its next collective.
            _log.error("%s is not loaded: %s", self.checkpoint_id, error)
            raise
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str:
        """Return the checkpoint's URL without credentials."""
        return public_url(self._url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this can be a checkpoint's folder."""
        return bool(os.fspath(checkpoint_id))

    def close(self) -> None:
        """Close the storage; `dcp.load` does so. Idempotent."""
        if self._storage is not None:
            self._note(fetched_bytes=self._storage.reader.fetched_bytes)
            self._storage.close()
            self._storage = None

    # ---- inside ---------------------------------------------------------------------------

    def _open(self) -> StripedStorage:
        if self._storage is None:
            self._storage = open_storage(self._settings, self._url)
        return self._storage

    def _read_metadata(self) -> bytes:
        storage = self._open()
        file = storage.reader.open(storage.tree.stored.view(_METADATA))
        try:
            size_bytes = file.view.size_bytes
            if size_bytes > _MAX_METADATA_BYTES:
                raise CorruptError(f"{self.checkpoint_id}/{_METADATA} is too large: {size_bytes}")
            self._note(read_bytes=size_bytes)
            return storage.reader.read_bytes(file, 0, size_bytes)
        finally:
            storage.reader.close(file)

    def _extent(self, item: ReadItem) -> NeededRange:
        stored = self._stored[item.storage_index]
        if getattr(stored, "transform_descriptors", None):
            raise UnsupportedError(
                f"{self.checkpoint_id} was written with stream extensions: load it with "
                "torch.distributed.checkpoint.FsspecReader"
            )
        return NeededRange(stored.relative_path, stored.offset, stored.length)

    def _note(self, **counts: int) -> None:
        changes = {name: getattr(self.statistics, name) + count for name, count in counts.items()}
        self.statistics = replace(self.statistics, **changes)
