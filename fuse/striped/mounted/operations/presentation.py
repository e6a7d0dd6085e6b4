"""How nodes look to the kernel: attributes, and how long it may keep them. Pure.

Owns the numbers that every file and directory shows; docs/SEMANTICS.md promises them.
"""

import stat

from msgspec import Struct

from bootseer.fuse.kernel.operations import Attributes, Entry, Opened
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node

CACHE_S = 1.0
"""How long a name or attribute may be taken from memory before the storage is asked again."""
BLOCK_BYTES = 4096


class Ownership(Struct, frozen=True):
    """Whose everything is, and who may do what with it: storages keep no such thing for us."""

    uid: int
    gid: int
    umask: int = 0o022


def attributes_ttl_s(node: Node, *, is_quiet: bool) -> float:
    """How long the kernel may keep the attributes; `is_quiet`: whether no file is written.

    A file that is published changes the time of its directory behind the kernel's back, and `tar`
    takes what it then sees late for a change while it reads.
    """
    may_change = node.writer() is not None or (node.status.is_dir and not is_quiet)
    return 0.0 if may_change else CACHE_S


def attributes_of(node: Node, owner: Ownership) -> Attributes:
    """What stat(2) shows."""
    status = node.status
    if status.is_dir:
        mode, size_bytes, links = stat.S_IFDIR | 0o777 & ~owner.umask, BLOCK_BYTES, 2
    else:
        writer = node.writer()
        size_bytes = writer.size_bytes if writer is not None else status.size_bytes
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
    )


def entry_of(node: Node, owner: Ownership, *, is_quiet: bool) -> Entry:
    """The answer to a lookup."""
    # A file that only this mount knows may vanish without the kernel hearing of it.
    ttl_s = 0.0 if node.is_local else CACHE_S
    return Entry(attributes_of(node, owner), ttl_s, attributes_ttl_s(node, is_quiet=is_quiet))


def opened_of(handle: Handle) -> Opened:
    """The answer to open.

    Read-ahead is ours, so pages would only be copied once more. A node is one generation for its
    readers: what the kernel keeps of an mmap stays right.
    """
    descriptor = handle.descriptor
    return Opened(
        handle=handle.id,
        direct_io=True,
        keep_cache=handle.file is not None,
        passthrough_fd=descriptor.fileno() if descriptor is not None else None,
    )
