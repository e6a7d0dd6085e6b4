"""A block of HDFS that is to be written: what the NameNode said of it. Pure (no I/O)."""

from msgspec import Struct

from bootseer.store.hdfs.rpc import protobuf as pb


def rack_of(info: bytes) -> tuple[bytes, ...]:
    """Where a DataNode stands, by its DatanodeInfoProto. Raises: ValueError, IndexError."""
    return tuple(pb.every(info, 8))


class AddedBlock(Struct, frozen=True):
    """A block that was allocated, and is still empty."""

    block: bytes
    """ExtendedBlockProto."""
    servers: dict[str, bytes]
    """DatanodeInfoProto by UUID."""
    token: bytes
    """TokenProto."""
    storage_types: tuple[int, ...]
    storages: tuple[bytes, ...]
    """One for each of the servers, in their order."""
    address: tuple[str, int]
    """Of the first server."""

    @property
    def infos(self) -> tuple[bytes, ...]:
        """DatanodeInfoProto, in the order in which they pass on what is written."""
        return tuple(self.servers.values())

    @property
    def generation_stamp(self) -> int:
        """Of the block. Raises: ValueError."""
        return pb.positive(dict(pb.fields(self.block)).get(3))

    def block_of(self, size_bytes: int) -> bytes:
        """The block with so much in it, as ExtendedBlockProto. Raises: ValueError."""
        facts = dict(pb.fields(self.block))
        (pool,) = pb.every(self.block, 1)
        head = pb.blob(1, pool) + pb.number(2, pb.positive(facts.get(2)))
        return head + pb.number(3, self.generation_stamp) + pb.number(4, size_bytes)
