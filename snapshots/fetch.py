"""Extraction of a snapshot's tree from the store, by frames that are fetched ahead.

Blobs that are files on a disk of this node are read directly instead.
"""

import os
from pathlib import Path

from msgspec import Struct

from bootseer.blob.keys import blob_key
from bootseer.blob.pack.stat_record import Records
from bootseer.blob.tree import Tree
from bootseer.fanout.local import decline
from bootseer.linux import mount_table
from bootseer.prefetch.stored_frames import StoredFrames, plan_stored_frames
from bootseer.settings.config import Settings
from bootseer.snapshots.manifest import Target
from bootseer.snapshots.scan import text_of
from bootseer.store import Store
from bootseer.store.backend import HasDescriptor, IsFolder
from bootseer.transfer.attempt import Attempt

LOCAL_KINDS = frozenset({b"ext2", b"ext3", b"ext4", b"f2fs", b"ramfs", b"tmpfs", b"xfs"})
"""File systems of a local disk or memory, whose files show its device number."""


class Fetched(Struct, frozen=True):
    """Result of `fetch_tree`."""

    moved_bytes: int
    """Bytes of blobs that came from the store."""
    records: Records


def fetch_tree(
    store: Store,
    target: Target,
    tree: Tree,
    directory: Path,
    deadline_s: float,
    *,
    recorded: bytes = b"",
    start: Settings | None = None,
) -> Fetched:
    """Extract a target's tree to `directory`, whole or not at all.

    `recorded`: see `blob.extract`; `start`: see `StoredFrames`. Raises: as `restore`.
    """
    # Imported here, since a mount needs none of it.
    from bootseer.base.progress import ProgressBar
    from bootseer.blob.extract.extraction import extract

    label = f"restoring {text_of(target.path)}"
    local = find_local_blobs(store, tree)
    if local is not None:
        with ProgressBar(label, sum(tree.columns.extent_length)) as progress:
            records = extract(
                tree,
                local.read,
                directory,
                files=local.files,
                recorded=recorded,
                on_progress=progress.advance,
            )
        if len(tree.blobs) == 1:
            return Fetched(tree.blobs[0].size_bytes, records)
        return Fetched(plan_stored_frames(tree).wanted_bytes, records)
    plan = plan_stored_frames(tree)
    with (
        ProgressBar(label, plan.wanted_bytes) as progress,
        StoredFrames(
            store, plan, deadline_s=deadline_s, on_progress=progress.advance, start=start
        ) as source,
    ):
        records = extract(tree, source.read, directory, is_verified=True, recorded=recorded)
    return Fetched(plan.wanted_bytes, records)


def decline_tree(settings: Settings, tree: Tree) -> None:
    """Tell the other nodes of the start that this one has the tree, and will not fetch it."""
    decline(settings, settings.store_url, plan_stored_frames(tree).chunks())


class LocalBlobs:
    """Open files of a tree's blobs. They are closed with the last reference to this object."""

    def __init__(self, readers: list[HasDescriptor]) -> None:
        self._readers = readers

    @property
    def files(self) -> list[int]:
        """Descriptors of the files."""
        return [reader.fileno() for reader in self._readers]

    def read(self, blob: int, offset: int, length: int) -> bytes:
        """Return stored bytes of a blob; fewer at its end. Raises: UnavailableError."""
        buffer = bytearray(length)
        count = self._readers[blob].read_into(offset, memoryview(buffer), Attempt())
        return bytes(memoryview(buffer)[:count])


def find_local_blobs(store: Store, tree: Tree) -> LocalBlobs | None:
    """Open the tree's blobs as files, if all of them are on disks or in memory of this node.

    Return None if not: then the store is read, in parallel and with deadlines.
    Raises: NotFoundError, UnavailableError.
    """
    if not isinstance(store.backend, IsFolder):
        return None
    readers: list[HasDescriptor] = []
    devices = {one.device for one in mount_table.mount_points() if one.kind in LOCAL_KINDS}
    for blob in tree.blobs:
        reader = store.backend.open_reader(blob_key(blob.digest))
        if not isinstance(reader, HasDescriptor):
            return None
        if os.fstat(reader.fileno()).st_dev not in devices:
            return None
        readers.append(reader)
    return LocalBlobs(readers)
