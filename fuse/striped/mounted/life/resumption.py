"""Going on where another server process of the same mount stopped, from its journal.

Readers read on; a writer that had nothing unwritten writes on; one that had fails, since what it
wrote was in the other's memory.
"""

import errno
import logging
import os

from bootseer.errors import UnavailableError
from bootseer.fuse.kernel.operations import ROOT_NODE
from bootseer.fuse.striped.mounted.journal import FileRecord, Inherited, NodeRecord
from bootseer.fuse.striped.mounted.operations.node_table import NodeTable, Wish
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node
from bootseer.fuse.striped.names.stored import FileStatus
from bootseer.fuse.striped.storage import StripedStorage

_log = logging.getLogger(__name__)


def resume(table: NodeTable, inherited: Inherited, storage: StripedStorage, now_s: float) -> None:
    """Fill an empty table with what a predecessor knew. Called once, before the first request.

    Raises: CorruptError, KeyError where the journal makes no sense; the table is as it was.
    """
    nodes = {record.node: _node(record) for record in inherited.nodes.values()}
    for node in inherited.nodes.values():
        # A parent that is unknown was forgotten with all that it led to.
        is_root = node.parent == ROOT_NODE
        nodes[node.node].parent = table.root if is_root else nodes.get(node.parent or 0)
    opened = [
        (_handle(record, nodes[record.node], inherited), record)
        for record in inherited.files.values()
        if record.node in nodes
    ]
    views = [inherited.view(record.reads) for _, record in opened]
    pinned = [
        inherited.pinned[record.reads.identity] if record.is_pinned and record.reads else None
        for _, record in opened
    ]
    table.continue_from(
        list(nodes.values()),
        [handle for handle, _ in opened],
        _wishes(inherited, nodes, now_s),
    )
    for (handle, record), view, content in zip(opened, views, pinned, strict=True):
        can_read = handle.flags & os.O_ACCMODE != os.O_WRONLY
        if view is None and can_read:
            # It was read back through its writer.
            view = handle.base
        if view is not None:
            handle.file = storage.reader.open(view)
            if content is not None:
                handle.file.pinned = content
        _resume_writer(handle, record, storage)
    _log.info("went on with %d names and %d open files", len(nodes), len(opened))


def _wishes(
    inherited: Inherited, nodes: dict[int, Node], now_s: float
) -> dict[tuple[int, str], Wish]:
    return {
        (record.thread, os.fsdecode(record.name)): Wish(
            record.node, now_s, record.only_reads, nodes.get(record.own or 0)
        )
        for record in inherited.wishes.values()
        if record.node is not None
    }


def _node(record: NodeRecord) -> Node:
    identity = os.fsdecode(record.identity)
    status = FileStatus("", record.is_dir, record.size_bytes, record.modified_ns, identity)
    return Node(
        record.node,
        None,
        os.fsdecode(record.name),
        status,
        is_local=record.is_local,
        is_writing=record.is_writing,
        inode=record.inode,
        # Whether the kernel has pages of it, or reads it past us, is not known.
        had_readers=not record.is_dir,
        was_passed=not record.is_dir,
        is_forgotten=record.is_forgotten,
    )


def _handle(record: FileRecord, node: Node, inherited: Inherited) -> Handle:
    return Handle(
        record.file,
        node,
        record.flags,
        base=inherited.view(record.base),
        was_killed=record.was_killed,
        is_nameless=record.is_nameless and not record.has_writer,
        request=record.request,
    )


def _resume_writer(handle: Handle, record: FileRecord, storage: StripedStorage) -> None:
    """Give the handle a writer where it had one that cannot begin anew from its base."""
    node, base = handle.node, handle.base
    if record.is_unfinished:
        path = base.path if base is not None else node.path or node.name
        writer = handle.writer = storage.writer(path)
        writer.fail(
            UnavailableError(
                f"{path} was being written when the mount's server was restarted: what had not "
                "reached a commit is lost; write the file again"
            )
        )
        if record.is_nameless:
            writer.detach()
        _log.error("%s was being written: its writer gets an error", path)
        return
    if not record.has_writer:
        return
    # A node without a name does not tell: one that was read is replaced by each `fsync` of a
    # writer.
    if record.is_nameless if base is not None else node.is_detached:
        writer = handle.writer = storage.writer(node.name)
        writer.fail(OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
        writer.detach()
    elif base is None:
        handle.writer = storage.writer(node.path)
