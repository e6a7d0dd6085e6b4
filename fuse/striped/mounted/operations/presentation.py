"""How nodes look to the kernel: attributes, and how long it may keep them. Pure.

Owns the numbers that every file and directory shows; docs/SEMANTICS.md promises them.
"""

import stat

from msgspec import Struct

from bootseer.fuse.kernel.operations import Attributes, Opened
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node
from bootseer.fuse.striped.writing.writer import FileWriter

CACHE_S = 1.0
"""How old a name or attribute may be that is shown, the kernel's memory of it included."""
BLOCK_BYTES = 4096


class Ownership(Struct, frozen=True):
    """Whose everything is, and who may do what with it: storages keep no such thing for us."""

    uid: int
    gid: int
    umask: int = 0o022


def attributes_of(node: Node, owner: Ownership, writer: FileWriter | None = None) -> Attributes:
    """What stat(2) shows. `writer`: the one of the descriptor that is asked about, if any."""
    status = node.status
    if status.is_dir:
        mode, size_bytes, links = stat.S_IFDIR | 0o777 & ~owner.umask, BLOCK_BYTES, 2
    else:
        writer = writer or node.writer()
        is_growing = writer is not None and not writer.has_failed
        size_bytes = writer.size_bytes if writer and is_growing else status.size_bytes
        if writer is None and node.is_emptied:
            size_bytes = 0
        mode, links = stat.S_IFREG | 0o666 & ~owner.umask, 0 if node.is_detached else 1
    times = status.modified_ns
    return Attributes(
        node.id,
        mode,
        size_bytes,
        link_count=links,
        uid=owner.uid,
        gid=owner.gid,
        atime_ns=times,
        mtime_ns=times,
        ctime_ns=times,
        inode=node.inode,
    )


def opened_of(handle: Handle, *, is_cached: bool = False) -> Opened:
    """The answer to open. `is_cached`: whether the kernel reads through its page cache.

    Read-ahead is ours, so pages would only be copied once more. A node is one generation for its
    readers: what the kernel keeps of an mmap stays right.
    """
    descriptor = handle.descriptor
    return Opened(
        handle=handle.id,
        direct_io=not is_cached,
        keep_cache=handle.file is not None,
        passthrough_fd=descriptor.fileno() if descriptor is not None else None,
    )
