"""The blobs of a snapshot as files on this node's own disks, where the store is a folder there.

Alone decides what counts as such: a file system that reads from a disk or from memory of this node.
Any other is asked through the store, in parallel and with deadlines. One thread.
"""

import os

from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Tree
from bootseer.fuse.kernel.mounting import mounts
from bootseer.store import Store
from bootseer.store.abilities import HasDescriptor, open_reader
from bootseer.transfer.attempt import Attempt

# File systems of one disk, whose device numbers files show; any other is taken for a remote one.
LOCAL_KINDS = frozenset({b"ext2", b"ext3", b"ext4", b"f2fs", b"ramfs", b"tmpfs", b"xfs"})


class LocalBlobs:
    """Open files, one for each of a tree's blobs. Closed when it is dropped."""

    def __init__(self, readers: list[HasDescriptor]) -> None:
        self._readers = readers

    @property
    def files(self) -> list[int]:
        """Their descriptors."""
        return [reader.fileno() for reader in self._readers]

    def read(self, blob: int, offset: int, length: int) -> bytes:
        """Stored bytes of a blob; fewer at its end. Raises: UnavailableError."""
        buffer = bytearray(length)
        count = self._readers[blob].read_into(offset, memoryview(buffer), Attempt())
        return bytes(memoryview(buffer)[:count])


def find_local_blobs(store: Store, tree: Tree) -> LocalBlobs | None:
    """The tree's blobs, if all of them are files of this node; else None, and the store is asked as
    any other. Raises: NotFoundError, UnavailableError."""
    readers: list[HasDescriptor] = []
    devices = {one.device for one in mounts.mount_points() if one.kind in LOCAL_KINDS}
    for blob in tree.blobs:
        reader = open_reader(store.backend, blob_key(blob.digest))
        if not isinstance(reader, HasDescriptor):
            return None
        if os.fstat(reader.fileno()).st_dev not in devices:
            return None
        readers.append(reader)
    return LocalBlobs(readers)
