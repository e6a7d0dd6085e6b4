"""How nodes look to the kernel: attributes, and how long it may keep them. Pure.

Owns the numbers that every file and directory shows; docs/SEMANTICS.md promises them.
"""

import stat

from msgspec import Struct

from bootseer.fuse.kernel.operations import Attributes, Entry, Opened
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


def left_s(node: Node, now_s: float) -> float:
    """Return for how long what was seen of a node may still be shown."""
    return max(0.0, node.seen_s + CACHE_S - now_s)


def attributes_ttl_s(node: Node, now_s: float, *, is_quiet: bool, is_written: bool) -> float:
    """How long the kernel may keep the attributes; `is_quiet`: whether no file is written,
    `is_written`: whether this one is.

    A file that is published changes the time of its directory behind the kernel's back, and `tar`
    takes what it then sees late for a change while it reads.
    """
    may_change = is_written or node.is_writing or (node.status.is_dir and not is_quiet)
    return 0.0 if may_change else left_s(node, now_s)


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


def entry_of(
    node: Node, owner: Ownership, now_s: float, *, is_quiet: bool, is_written: bool
) -> Entry:
    """The answer to a lookup."""
    # A file that only this mount knows may vanish without the kernel hearing of it, and one that is
    # written here means another node as soon as it is published.
    may_change = is_written or node.is_local or node.is_writing
    return Entry(
        attributes_of(node, owner),
        0.0 if may_change else left_s(node, now_s),
        attributes_ttl_s(node, now_s, is_quiet=is_quiet, is_written=is_written),
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
