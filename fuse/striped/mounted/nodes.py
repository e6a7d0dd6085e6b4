"""Tables of a mount's nodes and open files.

Readers of a node all read one generation of the file, so that the pages and the size that the
kernel caches for a node match its bytes. When another generation is published under a name, the
name gets a new node, and the old node is *detached*. A descriptor that is opened for writing gets
a *writer node*, which no lookup finds: only that descriptor sees the size of the new generation,
until the generation is published. A file that is not stored yet has one node for its first writer
and for its readers.

The kernel's lookup chooses the node of an open file before the mount learns whether the file is
opened for writing. So the first open for writing fails with ESTALE, and a `PendingLookup` of its
thread is noted. The kernel then looks the name up once more, as open(2) and truncate(2) do, and
opens the node that this lookup returns: the writer node of the thread.

Every change is written to the journal, from which a successor of this process builds the same
tables. Not thread-safe: callers hold `NodeTable.lock`, which is never held during I/O.
"""

import enum
import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from msgspec import Struct, field

from bootseer.fuse.kernel.operations import ROOT_NODE
from bootseer.fuse.striped.mounted.journal import (
    FileClosedRecord,
    FileRecord,
    Inherited,
    Journal,
    NodeGoneRecord,
    NodeKind,
    NodeRecord,
    PendingLookupRecord,
    Record,
    view_record,
)
from bootseer.fuse.striped.names.stored import FileStatus, os_error
from bootseer.fuse.striped.reading.opened import OpenFile
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.file_writer import FileWriter, WriterState
from bootseer.store.backend import HasDescriptor

# Age at which a pending lookup is dropped: only a killed thread does not repeat the lookup at once.
_PENDING_S = 60.0


class Node(Struct, eq=False):
    """A file or directory that the kernel knows."""

    id: int
    parent: "Node | None"
    """None for the root, and for a detached node."""
    name: str
    status: FileStatus
    """Status as of the last lookup."""
    kind: NodeKind = NodeKind.STORED
    is_wanted: bool = False
    """Whether a thread is about to open or truncate this writer node."""
    inode: int = 0
    """Inode number that stat(2) returns; 0: the node's id. A writer node has the number of the
    file, and a file keeps the number with which it was created."""
    had_readers: bool = False
    """Whether the kernel may cache pages of the node."""
    allows_passthrough: bool = True
    """Whether the kernel may read the stored file itself (passthrough)."""
    used_passthrough: bool = False
    """Whether an open of the node may have used passthrough. Then every open must use it, and none
    may be for writing: the kernel would write into the stored file."""
    is_forgotten: bool = False
    """Whether the kernel has forgotten the node, which only its children or files need."""
    handles: "list[Handle]" = field(default_factory=lambda: _NO_HANDLES)
    children: "dict[str, Node]" = field(default_factory=lambda: _NO_NODES)
    """Nodes that lookups in this directory find."""
    writer_nodes: "dict[str, list[Node]]" = field(default_factory=lambda: _NO_NODES)
    """Writer nodes of files in this directory, by name."""

    @property
    def is_local(self) -> bool:
        """Whether the file was created in this mount and never published."""
        return self.kind is NodeKind.LOCAL

    @property
    def is_writer_node(self) -> bool:
        """Whether this is a writer node."""
        return self.kind is NodeKind.WRITER

    @property
    def is_detached(self) -> bool:
        """Whether the node, or a directory above it, has lost its name."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node.id != ROOT_NODE

    @property
    def path(self) -> str:
        """Path from the root, "" for the root itself."""
        names: list[str] = []
        node = self
        while node.parent is not None:
            names.append(node.name)
            node = node.parent
        return "/".join(reversed(names))

    @property
    def attached_path(self) -> str:
        """Path from the root. Raises: OSError (ESTALE) for a detached node."""
        if self.is_detached:
            raise os_error(errno.ESTALE)
        return self.path

    @property
    def shown_inode(self) -> int:
        """Inode number that stat(2) returns."""
        return self.inode or self.id

    def writer(self) -> FileWriter | None:
        """Return the active writer that was opened last, or None."""
        for handle in reversed(self.handles):
            # The kernel closes the files of a killed process a moment after its end.
            writer = handle.writer if not handle.killed else None
            if writer is not None and (writer.was_written or not handle.superseded):
                return writer
        return None

    @property
    def is_truncated(self) -> bool:
        """Whether all writers only truncated the file, and it was opened again since."""
        return (
            self.is_writer_node
            and len(self.handles) > 0
            and all(handle.is_obsolete for handle in self.handles)
        )

    @property
    def is_unpublished(self) -> bool:
        """Whether the file exists only in this mount, and is being written."""
        return self.is_local and any(
            handle.writer is not None and not handle.killed for handle in self.handles
        )

    @property
    def is_open_for_writing(self) -> bool:
        """Whether the file is open for writing in this mount."""
        if self.writer() is not None:
            return True
        if self.parent is None:
            return False
        return any(node.handles for node in self.parent.writer_nodes.get(self.name, ()))

    def local_children(self) -> "list[Node]":
        """Return the files of a directory that only this mount knows."""
        return [node for node in self.children.values() if node.is_unpublished]

    def record(self) -> NodeRecord:
        """Return the journal's record of the node."""
        return NodeRecord(
            self.id,
            self.parent.id if self.parent is not None else None,
            os.fsencode(self.name),
            self.status.is_dir,
            self.status.size_bytes,
            self.status.modified_ns,
            os.fsencode(self.status.identity),
            self.kind,
            self.inode,
            self.is_forgotten,
        )


class Phase(enum.Enum):
    """State of the descriptors of an open file, as far as the server can know.

    OPEN --a copy is closed--> COPY_CLOSED --nothing follows--> KEPT_OPEN
      ^                            |  |                            |  |
      +----------- write ----------+--|----------------------------+  |
                                      +-- the last one is closed -----+--> RELEASING
    """

    OPEN = enum.auto()
    COPY_CLOSED = enum.auto()
    """A descriptor, maybe the last one, was closed, and nothing was written since."""
    KEPT_OPEN = enum.auto()
    """A descriptor was closed; another one still seems to be open."""
    RELEASING = enum.auto()
    """The last descriptor is closed."""


class Handle(Struct, eq=False):
    """State of one open file."""

    id: int
    node: Node
    flags: int
    file: OpenFile | None = None
    """Generation to read; on a writer node, the generation that was published last."""
    descriptor: HasDescriptor | None = None
    """Stored file that the kernel reads itself (passthrough)."""
    base: FileView | None = None
    """Generation to append to; set until the first write."""
    writer: FileWriter | None = None
    unpublished_owners: set[int | None] = field(default_factory=set)
    """Tables of open files (`Caller.lock_owner`) of the processes that wrote since the last commit.
    The close of any other process, such as a child that inherited the descriptor, commits nothing.
    """
    opener: int = 0
    """Process that opened the file; 0 if it is unknown."""
    phase: Phase = Phase.OPEN
    killed: bool = False
    """Whether the process that wrote was ended by a signal."""
    superseded: bool = False
    """Whether the handle must not truncate the file: the file was opened or truncated again since,
    or the handle was opened without O_TRUNC, before another handle published the file."""
    is_nameless: bool = False
    """Whether this mount removed or replaced the file before the first write, so that its name
    belongs to another file."""
    publishing: threading.Lock = field(default_factory=threading.Lock)
    """Held while the written bytes are published, until the node has the new generation."""
    request: int = 0
    """The request that opened the file. The kernel may send it again to a successor."""
    noted: FileRecord | None = None
    """The journal's last record of the handle."""

    @property
    def is_writable(self) -> bool:
        """Whether write(2) is allowed."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def is_readable(self) -> bool:
        """Whether read(2) is allowed."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def has_only_truncated(self) -> bool:
        """Whether the handle has truncated its file, and written and published nothing so far."""
        is_new = self.writer is not None and self.writer.state is WriterState.NEW
        return is_new and not self.killed

    @property
    def will_truncate(self) -> bool:
        """Whether the last close will publish an empty file, unless something is written before."""
        return self.has_only_truncated and not self.superseded

    @property
    def is_obsolete(self) -> bool:
        """Whether the handle has written nothing and must not truncate the file: `superseded`."""
        return self.has_only_truncated and self.superseded

    @property
    def is_due(self) -> bool:
        """Whether the last close, or a rename of the file, publishes the written bytes.

        False after the writing process was killed: half a checkpoint must not appear.
        """
        writer = self.writer
        is_pending = writer is not None and writer.needs_publishing
        return is_pending and not self.killed and not self.is_obsolete

    @property
    def is_unfinished(self) -> bool:
        """Whether bytes would be lost if this process ended."""
        return self.writer is not None and (self.writer.was_written or self.writer.has_failed)

    def record(self) -> FileRecord:
        """Return the journal's record of the open file."""
        file, writer = self.file, self.writer
        return FileRecord(
            self.id,
            self.node.id,
            self.flags,
            self.request,
            reads=view_record(file.view if file is not None else None),
            is_pinned=file is not None and file.pinned is not None,
            base=view_record(writer.view if writer is not None else self.base),
            writer_path=os.fsencode(writer.path) if writer is not None else None,
            is_nameless=writer.is_detached if writer is not None else self.is_nameless,
            is_unfinished=self.is_unfinished,
            killed=self.killed,
            superseded=self.superseded,
        )


# Shared by all nodes without files or children, since the kernel may know a million nodes. Never
# changed.
_NO_HANDLES: list[Handle] = []
_NO_NODES: dict[str, Any] = {}


class PendingLookup(Struct, eq=False):
    """Second lookup of a name by a thread that wants to write the file."""

    node: int
    """Node of the first lookup."""
    since_s: float
    only_reads: bool = False
    """Whether the first lookup returned a writer node to a thread that only reads."""
    writer_node: Node | None = None
    """Writer node that the second lookup returned."""


class NodeTable:
    """Table of the nodes and open files of a mount."""

    def __init__(self, root: FileStatus, journal: Journal | None = None) -> None:
        """With a journal, `start_journal` must follow."""
        self.lock = threading.RLock()
        self.root = Node(ROOT_NODE, None, "", root)
        self.by_id: dict[int, Node] = {ROOT_NODE: self.root}
        self.handles: dict[int, Handle] = {}
        self.request_count = 0
        """Requests for nodes and open files so far."""
        self._journal = journal
        self._pending: dict[tuple[int, str], PendingLookup] = {}
        """Pending lookups by thread and name."""
        self._ids = itertools.count(ROOT_NODE + 1)
        self._handle_ids = itertools.count(1)

    # ---- the journal ----------------------------------------------------------------------

    def start_journal(self) -> None:
        """Begin the journal with all nodes, open files and pending lookups."""
        if self._journal is None:
            return
        with self._journal.anew():
            for node in self.by_id.values():
                self.note_node(node)
            for handle in self.handles.values():
                handle.noted = None
                self.note(handle)
            for key in self._pending:
                self._note_pending(key)

    def close_journal(self) -> None:
        """Close the journal; later changes are not recorded."""
        if self._journal is not None:
            self._journal.close()

    def note_node(self, node: Node) -> None:
        """Record a new or changed node in the journal."""
        if self._journal is not None and node is not self.root:
            self._add(node.record())

    def note(self, handle: Handle) -> None:
        """Record an open file in the journal if it changed. Call before the reply to the kernel."""
        if self._journal is None:
            return
        record = handle.record()
        if record == handle.noted:
            return
        handle.noted = record
        self._journal.add_layout(handle.base)
        if handle.file is not None:
            self._journal.add_layout(handle.file.view)
            if handle.file.pinned is not None:
                self._journal.add_pinned(handle.file.view, handle.file.pinned)
        if handle.writer is not None:
            self._journal.add_layout(handle.writer.view)
        self._add(record)

    def note_published(self, node: Node, path: str) -> None:
        """Record the open files that a publication changes in the journal.

        These are the open files of `node`, and readers of the ordinary file that was replaced: its
        content is in memory now.
        """
        for handle in self.handles.values():
            if handle.node is node or (handle.file is not None and handle.file.view.path == path):
                self.note(handle)

    def note_all(self) -> None:
        """Record all changed open files in the journal, after names have changed."""
        for handle in self.handles.values():
            self.note(handle)

    def _add(self, record: Record) -> None:
        if self._journal is None:
            return
        self._journal.add(record)
        if self._journal.is_outgrown:
            self.start_journal()

    def resume(self, inherited: Inherited, now_s: float) -> None:
        """Take over nodes and pending lookups of a predecessor. Its numbers are not used again."""
        for record in inherited.nodes.values():
            identity = os.fsdecode(record.identity)
            self.by_id[record.node] = Node(
                record.node,
                None,
                os.fsdecode(record.name),
                FileStatus("", record.is_dir, record.size_bytes, record.modified_ns, identity),
                kind=record.kind,
                inode=record.inode,
                # It is unknown whether the kernel has pages of the node, or uses passthrough.
                had_readers=not record.is_dir,
                used_passthrough=not record.is_dir,
                is_forgotten=record.is_forgotten,
            )
        for record in inherited.nodes.values():
            # An unknown parent was forgotten together with everything below it.
            parent = self.by_id.get(record.parent) if record.parent is not None else None
            if parent is not None:
                self._add_to_parent(self.by_id[record.node], parent)
        for lookup in inherited.pending.values():
            if lookup.node is not None:
                writer_node = (
                    self.by_id.get(lookup.writer_node) if lookup.writer_node is not None else None
                )
                key = lookup.thread, os.fsdecode(lookup.name)
                self._pending[key] = PendingLookup(
                    lookup.node, now_s, lookup.only_reads, writer_node
                )
                if writer_node is not None:
                    writer_node.is_wanted = True
        self._ids = itertools.count(time.monotonic_ns())
        self._handle_ids = itertools.count(time.monotonic_ns())

    # ---- nodes ----------------------------------------------------------------------------

    def node(self, node_id: int) -> Node:
        """Return a node that the kernel names. Raises: OSError (ESTALE)."""
        self.request_count += 1
        node = self.by_id.get(node_id)
        if node is None:
            raise os_error(errno.ESTALE)
        return node

    def same_file(self, node: Node) -> list[Node]:
        """Return all nodes with the name of `node`; only `node` itself if it is detached."""
        if node.parent is None:
            return [node]
        found = node.parent.children.get(node.name)
        writing = node.parent.writer_nodes.get(node.name, ())
        return [*([found] if found is not None else []), *writing]

    def add(
        self, parent: Node, name: str, status: FileStatus, kind: NodeKind = NodeKind.STORED
    ) -> Node:
        """Make a new node for a name and detach the old one."""
        old = parent.children.get(name)
        if old is not None:
            self.detach(old)
        node = Node(next(self._ids), parent, name, status, kind)
        for writing in parent.writer_nodes.get(name, ()):
            if writing.status.identity == status.identity:
                # The kernel forgot the earlier node of the name.
                node.inode = writing.inode
        return self._add_node(node, parent)

    def add_writer_node(self, parent: Node, name: str, status: FileStatus) -> Node:
        """Make a node for a thread that is about to write the file `name`."""
        node = Node(next(self._ids), parent, name, status, NodeKind.WRITER, is_wanted=True)
        found = parent.children.get(name)
        if found is not None:
            node.inode = found.shown_inode
        return self._add_node(node, parent)

    def _add_node(self, node: Node, parent: Node) -> Node:
        self.by_id[node.id] = node
        self._add_to_parent(node, parent)
        self.note_node(node)
        return node

    def make_writer_node(self, node: Node) -> None:
        """Turn a node that lookups find into a writer node."""
        self._set_kind(node, NodeKind.WRITER)

    def make_local(self, node: Node) -> None:
        """Turn a writer node of a file that is not stored into a node that lookups find."""
        self._set_kind(node, NodeKind.LOCAL)

    def _set_kind(self, node: Node, kind: NodeKind) -> None:
        parent = node.parent
        if parent is not None:
            self._remove_from_parent(node, parent)
        node.kind = kind
        if parent is not None:
            self._add_to_parent(node, parent)
        self.note_node(node)

    def detach(self, node: Node) -> None:
        """Remove a node from its directory: its name belongs to another file now, or to none."""
        parent = node.parent
        if parent is not None:
            self._remove_from_parent(node, parent)
            if node.id in self.by_id:
                self.note_node(node)
            if parent.is_forgotten:
                self.forget(parent.id)

    def move(self, node: Node, parent: Node, name: str) -> None:
        """Give a node another name, and detach the node that had that name."""
        replaced = parent.children.get(name)
        if replaced is not None and replaced is not node and not node.is_writer_node:
            self.detach(replaced)
        self.detach(node)
        node.name = name
        self._add_to_parent(node, parent)
        self.note_node(node)

    def move_bases(self, source: str, target: str) -> None:
        """Rename the `base` of files that are open for writing and not written yet."""
        for handle in self.handles.values():
            base = handle.base
            if base is not None and (base.path == source or base.path.startswith(source + "/")):
                handle.base = base.renamed(target + base.path[len(source) :])

    def forget(self, node_id: int) -> None:
        """Drop a node that the kernel has forgotten, unless open files or children need it."""
        node = self.by_id.get(node_id)
        if node is None or node is self.root:
            return
        node.is_forgotten = True
        if node.handles or node.children or node.writer_nodes or node.is_wanted:
            return
        self._drop(node)

    def _drop(self, node: Node) -> None:
        self.by_id.pop(node.id, None)
        self._add(NodeGoneRecord(node.id))
        self.detach(node)

    def _add_to_parent(self, node: Node, parent: Node) -> None:
        node.parent = parent
        if node.is_writer_node:
            if parent.writer_nodes is _NO_NODES:
                parent.writer_nodes = {}
            parent.writer_nodes.setdefault(node.name, []).append(node)
        else:
            if parent.children is _NO_NODES:
                parent.children = {}
            parent.children[node.name] = node

    def _remove_from_parent(self, node: Node, parent: Node) -> None:
        node.parent = None
        if not node.is_writer_node:
            if parent.children.get(node.name) is node:
                del parent.children[node.name]
            return
        found = parent.writer_nodes.get(node.name, [])
        if node in found:
            found.remove(node)
        if not found:
            parent.writer_nodes.pop(node.name, None)

    # ---- pending lookups ------------------------------------------------------------------

    def expect_lookup(
        self, node: Node, thread: int, now_s: float, *, only_reads: bool = False
    ) -> bool:
        """Note that `thread` will look up the name of `node` again, to write the file.

        Return False if the thread opened the node again without a second lookup: it opens the file
        by its descriptor in /proc, or the file is a mount point.
        """
        if not thread:
            return True
        for old_key, old in list(self._pending.items()):
            if old.since_s + _PENDING_S < now_s:  # The thread was killed.
                self._end_pending(old_key)
        key = thread, node.name
        pending = self._pending.get(key)
        if pending is not None:
            self._end_pending(key)
            if pending.writer_node is None and pending.node == node.id:
                return False
        self._pending[key] = PendingLookup(node.id, now_s, only_reads)
        self._note_pending(key)
        return True

    def look_up_writer_node(
        self, parent: Node, name: str, thread: int, status: FileStatus
    ) -> Node | None:
        """Return the writer node of a thread that is about to write; None for other threads."""
        key = thread, name
        pending = self._pending.get(key) if thread else None
        if pending is None or status.is_dir:
            return None
        if pending.only_reads:
            self._end_pending(key)
            return None
        writer_node = pending.writer_node
        if writer_node is not None and (
            writer_node.parent is not parent or writer_node.name != name
        ):
            # The thread gave up writing, and the node was renamed with the file.
            if not writer_node.handles:
                self._drop(writer_node)
            writer_node = None
        if writer_node is None:
            writer_node = pending.writer_node = self.add_writer_node(parent, name, status)
            self._note_pending(key)
        writer_node.status, writer_node.is_forgotten = status, False
        return writer_node

    def end_pending_lookups(self, thread: int, name: str | None = None) -> None:
        """End all pending lookups of a thread, or only the one for `name`."""
        for key in list(self._pending):
            if key[0] == thread and name in (None, key[1]):
                self._end_pending(key)

    def finish_pending_lookup(self, node: Node) -> None:
        """End the pending lookup of the thread that has opened `node`, its writer node."""
        for key, pending in list(self._pending.items()):
            if pending.writer_node is node:
                pending.writer_node = None
                self._end_pending(key)
        node.is_wanted = False

    def _end_pending(self, key: tuple[int, str]) -> None:
        pending = self._pending.pop(key)
        self._note_pending(key)
        if pending.writer_node is not None and not pending.writer_node.handles:
            self._drop(pending.writer_node)

    def _note_pending(self, key: tuple[int, str]) -> None:
        pending = self._pending.get(key)
        writer_node = pending.writer_node if pending is not None else None
        self._add(
            PendingLookupRecord(
                key[0],
                os.fsencode(key[1]),
                pending.node if pending is not None else None,
                writer_node.id if writer_node is not None else None,
                pending is not None and pending.only_reads,
            )
        )

    # ---- open files -----------------------------------------------------------------------

    def open(self, node: Node, flags: int, request: int, opener: int = 0) -> Handle:
        """Return a new open file of a node. `note` must follow when it is complete."""
        handle = Handle(next(self._handle_ids), node, flags, request=request, opener=opener)
        self.add_handle(handle)
        return handle

    def add_handle(self, handle: Handle) -> None:
        """Add the handle of an open file."""
        node = handle.node
        if node.handles is _NO_HANDLES:
            node.handles = []
        node.handles.append(handle)
        self.handles[handle.id] = handle

    def close(self, handle: Handle) -> None:
        """Drop an open file."""
        self.handles.pop(handle.id, None)
        self._add(FileClosedRecord(handle.id))
        node = handle.node
        node.handles.remove(handle)
        if node.is_writer_node and not node.handles:
            self.detach(node)
        if node.is_forgotten:
            self.forget(node.id)

    def handle(self, handle_id: int) -> Handle:
        """Return an open file that the kernel names. Raises: OSError (EBADF)."""
        with self.lock:
            self.request_count += 1
            handle = self.handles.get(handle_id)
        if handle is None:
            raise os_error(errno.EBADF)
        return handle

    def opened_by(self, request: int) -> Handle | None:
        """Return the file that a request has opened."""
        return next((h for h in self.handles.values() if h.request == request), None)

    def writers(self) -> Iterator[FileWriter]:
        """Yield every writer at work."""
        for handle in self.handles.values():
            if handle.writer is not None:
                yield handle.writer
