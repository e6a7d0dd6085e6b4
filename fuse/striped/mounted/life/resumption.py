"""Going on where another server process of the same mount stopped, from its journal.

Owns what becomes of each open file: readers read on; a writer that had nothing unwritten writes
on; one that had fails, since what it wrote was in the other's memory. Called once, before the first
request.
"""

import base64
import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bootseer.errors import UnavailableError
from bootseer.fuse.kernel.operations import ROOT_NODE
from bootseer.fuse.striped.mounted.life.journal import Record, view_from_json
from bootseer.fuse.striped.mounted.operations.node_table import NodeTable, Wish
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node
from bootseer.fuse.striped.names.stored import FileStatus
from bootseer.fuse.striped.reading.reader import StripedReader
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.writer import FileWriter

_log = logging.getLogger(__name__)

NewWriter = Callable[[str], FileWriter]


def resume(
    table: NodeTable,
    records: Sequence[Record],
    reader: StripedReader,
    new_writer: NewWriter,
    now_s: float,
) -> None:
    """Fill an empty table with what a predecessor knew.

    Raises: CorruptError, ValueError, KeyError, TypeError where the journal makes no sense; the
    table is as it was.
    """
    nodes, files, layouts, pinned, wishes = _last_words(records)
    made = {ROOT_NODE: table.root}
    for node_id, record in nodes.items():
        made[node_id] = _node(node_id, record)
    for node_id, record in nodes.items():
        # A parent that is unknown was forgotten with all that it led to.
        made[node_id].parent = made.get(record["parent"])
    handles: list[Handle] = []
    reads: dict[int, FileView | None] = {}
    for record in files.values():
        node = made.get(record["node"])
        if node is not None:
            handle = _handle(record, node, layouts)
            reads[handle.id] = _view(record["reads"], layouts)
            handles.append(handle)
    del made[ROOT_NODE]
    table.continue_from(list(made.values()), handles, _wishes(wishes, made, now_s))
    for handle in handles:
        record = files[handle.id]
        _open(handle, record, reads[handle.id], reader, new_writer)
        if record["pinned"] and handle.file is not None:
            handle.file.pinned = pinned[handle.file.view.identity]
    _log.info("went on with %d names and %d open files", len(made), len(handles))


def _last_words(
    records: Sequence[Record],
) -> tuple[
    dict[int, Record],
    dict[int, Record],
    dict[str, str],
    dict[str, bytes],
    dict[tuple[int, str], Record],
]:
    nodes: dict[int, Record] = {}
    files: dict[int, Record] = {}
    layouts: dict[str, str] = {}
    pinned: dict[str, bytes] = {}
    wishes: dict[tuple[int, str], Record] = {}
    for record in records:
        if "file" in record:
            files[int(record["file"])] = record
        elif "closed" in record:
            files.pop(int(record["closed"]), None)
        elif "wish" in record:
            thread, name = record["wish"]
            wishes[int(thread), str(name)] = record
        elif "node" in record:
            nodes[int(record["node"])] = record
        elif "gone" in record:
            nodes.pop(int(record["gone"]), None)
        elif "pinned" in record:
            pinned[str(record["pinned"])] = base64.b64decode(record["data"])
        else:
            layouts[str(record["layout"])] = str(record["data"])
    return nodes, files, layouts, pinned, wishes


def _wishes(
    records: Mapping[tuple[int, str], Record], nodes: Mapping[int, Node], now_s: float
) -> dict[tuple[int, str], Wish]:
    wishes: dict[tuple[int, str], Wish] = {}
    for key, record in records.items():
        if record["node"] is not None:
            own = nodes.get(record["own"]) if record["own"] is not None else None
            wishes[key] = Wish(int(record["node"]), now_s, bool(record["only_reads"]), own)
    return wishes


def _node(node_id: int, record: Record) -> Node:
    is_dir, size_bytes, modified_ns, identity = record["status"]
    status = FileStatus("", bool(is_dir), int(size_bytes), int(modified_ns), str(identity))
    return Node(
        node_id,
        None,
        str(record["name"]),
        status,
        seen_s=0.0,
        is_local=bool(record["local"]),
        is_writing=bool(record["writing"]),
        inode=int(record["inode"]),
        # Whether the kernel has pages of it, or reads it past us, is not known.
        had_readers=not is_dir,
        was_passed=not is_dir,
        is_forgotten=bool(record["forgotten"]),
    )


def _handle(record: Record, node: Node, layouts: Mapping[str, str]) -> Handle:
    return Handle(
        int(record["file"]),
        node,
        int(record["flags"]),
        base=_view(record["base"], layouts),
        was_killed=bool(record["killed"]),
        is_nameless=bool(record.get("detached", False)) and not record["writes"],
        request=int(record["request"]),
    )


def _view(value: Any, layouts: Mapping[str, str]) -> FileView | None:
    return view_from_json(value, layouts)


def _is_gone(handle: Handle, record: Record) -> bool:
    """Whether what the handle wrote to has no name any more, or none that we know.

    A node without a name does not tell: one that was read is replaced by each `fsync` of a writer.
    """
    if handle.base is None:
        return handle.node.is_detached
    # Where a release that did not note it went before, only the node is left to ask.
    return bool(record.get("detached", handle.node.is_detached))


def _open(
    handle: Handle,
    record: Record,
    view: FileView | None,
    reader: StripedReader,
    new_writer: NewWriter,
) -> None:
    can_read = handle.flags & os.O_ACCMODE != os.O_WRONLY
    if view is None and can_read and handle.base is not None:
        # It was read back through its writer.
        view = handle.base
    if view is not None:
        handle.file = reader.open(view)
    if record["unfinished"]:
        path = handle.base.path if handle.base is not None else handle.node.path or handle.node.name
        handle.writer = new_writer(path)
        handle.writer.fail(
            UnavailableError(
                f"{path} was being written when the mount's server was restarted: what had not "
                "reached a commit is lost; write the file again"
            )
        )
        if record.get("detached", handle.node.is_detached):
            handle.writer.detach()
        _log.error("%s was being written: its writer gets an error", path)
    elif record["writes"] and _is_gone(handle, record):
        handle.writer = new_writer(handle.node.name)
        handle.writer.fail(OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
        handle.writer.detach()
    elif record["writes"] and handle.base is None:
        handle.writer = new_writer(handle.node.path)
