"""Tables of a mount's nodes and open files.

A node stands for one generation of a file as far as readers go, so that pages and the size that the
kernel keeps for a node never belong to other bytes. When a name comes to mean another generation,
it gets a new node and the old one is *detached*. Who opens a file for writing gets a node of its
own, which no lookup finds: the size of the new generation is seen by that descriptor only, until
the generation is published. A file that is not stored yet has one node for its first writer and for
its readers.

Which node an open file belongs to is settled by the kernel's lookup, before we hear for what it is
opened. So an open for writing is answered with ESTALE, and the *wish* of its thread is noted;
the kernel then looks the name up again (open(2) and truncate(2) do this once) and opens what that
finds: a node of its own.

Every change is told to the journal, from which a successor of this process makes the same tables.
Not thread-safe: callers hold `NodeTable.lock`, which is never held during I/O.
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
    Record,
    WishRecord,
    view_record,
)
from bootseer.fuse.striped.names.stored import FileStatus, refuse
from bootseer.fuse.striped.reading.unit_read import OpenFile
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.file_writer import FileWriter, WriterState
from bootseer.store.backend import HasDescriptor

# A thread that was told to look a name up once more does so at once, unless it is killed.
_WISH_S = 60.0


class Node(Struct, eq=False):
    """A file or directory that the kernel knows."""

    id: int
    parent: "Node | None"
    """None for the root, and for a detached node."""
    name: str
    status: FileStatus
    """As last seen."""
    kind: NodeKind = NodeKind.STORED
    is_wanted: bool = False
    """Whether a thread is about to open, or to cut, this node of a writer."""
    inode: int = 0
    """Inode number that is shown: a writer's node shows that of the file, and a file keeps that of
    its creation; 0: the node's id."""
    had_readers: bool = False
    """Whether the kernel may hold pages of it."""
    may_be_passed: bool = True
    """Whether the kernel may be given the stored file itself to read from."""
    was_passed: bool = False
    """Whether it may have been: then all opens are, and none may be for writing, which the kernel
    would do in the stored file."""
    is_forgotten: bool = False
    """Whether the kernel let go of it, and only its children keep it."""
    handles: "list[Handle]" = field(default_factory=lambda: _NO_HANDLES)
    children: "dict[str, Node]" = field(default_factory=lambda: _NO_NODES)
    """Nodes that lookups in this directory find."""
    writing: "dict[str, list[Node]]" = field(default_factory=lambda: _NO_NODES)
    """Nodes of the writers of this directory's files."""

    @property
    def is_local(self) -> bool:
        """Whether it is a file that was created here and never published."""
        return self.kind is NodeKind.LOCAL

    @property
    def is_writing(self) -> bool:
        """Whether it is the own node of a writer."""
        return self.kind is NodeKind.OWN

    @property
    def is_detached(self) -> bool:
        """Return whether the node's name, or a directory above it, is gone or replaced."""
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
            raise refuse(errno.ESTALE)
        return self.path

    @property
    def shown_inode(self) -> int:
        """Inode number that is shown."""
        return self.inode or self.id

    def writer(self) -> FileWriter | None:
        """Return the writer that was opened last, if any is at work."""
        for handle in reversed(self.handles):
            # The kernel closes the files of a killed process a moment after it is gone.
            writer = handle.writer if not handle.killed else None
            if writer is not None and (writer.was_written or not handle.superseded):
                return writer
        return None

    @property
    def is_emptied(self) -> bool:
        """Return whether the writers only emptied the file, before it was opened again."""
        return (
            self.is_writing
            and len(self.handles) > 0
            and all(handle.is_late for handle in self.handles)
        )

    @property
    def is_unpublished(self) -> bool:
        """Whether the file exists in this mount alone, and is being written here."""
        return self.is_local and any(
            handle.writer is not None and not handle.killed for handle in self.handles
        )

    @property
    def is_written(self) -> bool:
        """Whether the file is open for writing in this mount."""
        if self.writer() is not None:
            return True
        if self.parent is None:
            return False
        return any(node.handles for node in self.parent.writing.get(self.name, ()))

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
    """Descriptors of an open file, as far as the server can know.

    OPEN --a copy is closed--> COPY_CLOSED --nothing follows--> KEPT_OPEN
      ^                            |  |                            |  |
      +----------- write ----------+--|----------------------------+  |
                                      +-- the last one is closed -----+--> RELEASING
    """

    OPEN = enum.auto()
    COPY_CLOSED = enum.auto()
    """A descriptor was closed, and nothing was written since: it may have been the last one."""
    KEPT_OPEN = enum.auto()
    """A descriptor was closed; another one is open still, as it seems."""
    RELEASING = enum.auto()
    """The last descriptor is gone."""


class Handle(Struct, eq=False):
    """State of one open file."""

    id: int
    node: Node
    flags: int
    file: OpenFile | None = None
    """Generation that it reads; of a file that is written through its node, the last one that was
    published."""
    descriptor: HasDescriptor | None = None
    """Stored file that the kernel may read by itself."""
    base: FileView | None = None
    """Generation that it appends to, before the first write."""
    writer: FileWriter | None = None
    unpublished_owners: set[int | None] = field(default_factory=set)
    """Tables of open files (`Caller.lock_owner`) of the processes that wrote since the last commit.
    The close of any other process, such as a child that inherited the descriptor, commits nothing.
    """
    opener: int = 0
    """Process that opened it; 0 if it is unknown."""
    phase: Phase = Phase.OPEN
    killed: bool = False
    """Whether the process that wrote it was ended by a signal."""
    superseded: bool = False
    """Whether the file was opened anew, or cut, since: emptying it would come too late; or whether
    it was opened without being emptied, before somebody else had published it."""
    is_nameless: bool = False
    """Whether this mount removed or replaced its file before anything was written through it, when
    its name meant another file already."""
    publishing: threading.Lock = field(default_factory=threading.Lock)
    """Held from publishing what it wrote until the node shows it."""
    request: int = 0
    """The request that opened it: a successor may be asked to do that once more."""
    noted: FileRecord | None = None
    """What the journal has of it."""

    @property
    def is_writable(self) -> bool:
        """Whether write(2) is allowed."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def is_readable(self) -> bool:
        """Whether read(2) is allowed."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def only_empties(self) -> bool:
        """Whether all that it has done so far is to make its file empty, unseen by others."""
        is_new = self.writer is not None and self.writer.state is WriterState.NEW
        return is_new and not self.killed

    @property
    def will_empty(self) -> bool:
        """Whether it makes its file empty at the last close, if nothing else happens before."""
        return self.only_empties and not self.superseded

    @property
    def is_late(self) -> bool:
        """Whether it has written nothing, and must not make the file empty: see `superseded`."""
        return self.only_empties and self.superseded

    @property
    def is_due(self) -> bool:
        """Whether its writer is to be published at the last close, or when the file is renamed.

        Not after the writing process was killed: half a checkpoint must not appear.
        """
        writer = self.writer
        is_pending = writer is not None and writer.needs_publishing
        return is_pending and not self.killed and not self.is_late

    @property
    def is_unfinished(self) -> bool:
        """Whether bytes would be lost with this process."""
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
            has_writer=writer is not None,
            is_nameless=writer.is_detached if writer is not None else self.is_nameless,
            is_unfinished=self.is_unfinished,
            killed=self.killed,
            superseded=self.superseded,
        )


# Shared by all nodes that have none: most of a million files that the kernel knows. Never changed.
_NO_HANDLES: list[Handle] = []
_NO_NODES: dict[str, Any] = {}


class Wish(Struct, eq=False):
    """A thread that wants to write a file, and looks its name up again for that."""

    node: int
    """Node that it found first."""
    since_s: float
    only_reads: bool = False
    """Whether it found a writer's node, and wants the one that lookups find."""
    own: Node | None = None
    """Node of its own that it found then."""


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
        self._wishes: dict[tuple[int, str], Wish] = {}
        """By thread and name."""
        self._ids = itertools.count(ROOT_NODE + 1)
        self._handle_ids = itertools.count(1)

    # ---- the journal ----------------------------------------------------------------------

    def start_journal(self) -> None:
        """Begin the journal with all nodes, open files and wishes."""
        if self._journal is None:
            return
        with self._journal.anew():
            for node in self.by_id.values():
                self.note_node(node)
            for handle in self.handles.values():
                handle.noted = None
                self.note(handle)
            for key in self._wishes:
                self._note_wish(key)

    def close_journal(self) -> None:
        """Stop telling the journal."""
        if self._journal is not None:
            self._journal.close()

    def note_node(self, node: Node) -> None:
        """Tell the journal of a new or changed node."""
        if self._journal is not None and node is not self.root:
            self._add(node.record())

    def note(self, handle: Handle) -> None:
        """Tell the journal of an open file, if it changed. Before the kernel is answered."""
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
        """Tell the journal about the open files that a published file changes.

        These are the file itself, and readers of a replaced ordinary file, which is in memory now.
        """
        for handle in self.handles.values():
            if handle.node is node or (handle.file is not None and handle.file.view.path == path):
                self.note(handle)

    def note_all(self) -> None:
        """Tell the journal of all open files that changed: names have."""
        for handle in self.handles.values():
            self.note(handle)

    def _add(self, record: Record) -> None:
        if self._journal is None:
            return
        self._journal.add(record)
        if self._journal.is_outgrown:
            self.start_journal()

    def resume(self, inherited: Inherited, now_s: float) -> None:
        """Take over nodes and wishes of a predecessor. No number that it gave is given again."""
        for record in inherited.nodes.values():
            identity = os.fsdecode(record.identity)
            self.by_id[record.node] = Node(
                record.node,
                None,
                os.fsdecode(record.name),
                FileStatus("", record.is_dir, record.size_bytes, record.modified_ns, identity),
                kind=record.kind,
                inode=record.inode,
                # Whether the kernel has pages of it, or reads it past us, is not known.
                had_readers=not record.is_dir,
                was_passed=not record.is_dir,
                is_forgotten=record.is_forgotten,
            )
        for record in inherited.nodes.values():
            # A parent that is unknown was forgotten with all that it led to.
            parent = self.by_id.get(record.parent) if record.parent is not None else None
            if parent is not None:
                self._put(self.by_id[record.node], parent)
        for wish in inherited.wishes.values():
            if wish.node is not None:
                own = self.by_id.get(wish.own) if wish.own is not None else None
                key = wish.thread, os.fsdecode(wish.name)
                self._wishes[key] = Wish(wish.node, now_s, wish.only_reads, own)
                if own is not None:
                    own.is_wanted = True
        self._ids = itertools.count(time.monotonic_ns())
        self._handle_ids = itertools.count(time.monotonic_ns())

    # ---- nodes ----------------------------------------------------------------------------

    def node(self, node_id: int) -> Node:
        """Return a node that the kernel names. Raises: OSError (ESTALE)."""
        self.request_count += 1
        node = self.by_id.get(node_id)
        if node is None:
            raise refuse(errno.ESTALE)
        return node

    def same_file(self, node: Node) -> list[Node]:
        """Return all nodes of the name that a node has; only itself when it is detached."""
        if node.parent is None:
            return [node]
        found = node.parent.children.get(node.name)
        writing = node.parent.writing.get(node.name, ())
        return [*([found] if found is not None else []), *writing]

    def add(
        self, parent: Node, name: str, status: FileStatus, kind: NodeKind = NodeKind.STORED
    ) -> Node:
        """Make a new node for a name and detach the old one."""
        old = parent.children.get(name)
        if old is not None:
            self.detach(old)
        node = Node(next(self._ids), parent, name, status, kind)
        for writing in parent.writing.get(name, ()):
            if writing.status.identity == status.identity:
                # The kernel forgot the node that had the name before.
                node.inode = writing.inode
        return self._add_node(node, parent)

    def add_writing(self, parent: Node, name: str, status: FileStatus) -> Node:
        """Make a node for a thread that is about to write the file `name`."""
        node = Node(next(self._ids), parent, name, status, NodeKind.OWN, is_wanted=True)
        found = parent.children.get(name)
        if found is not None:
            node.inode = found.shown_inode
        return self._add_node(node, parent)

    def _add_node(self, node: Node, parent: Node) -> Node:
        self.by_id[node.id] = node
        self._put(node, parent)
        self.note_node(node)
        return node

    def make_writing(self, node: Node) -> None:
        """Turn a node that lookups find into the node of its writers."""
        self._turn(node, NodeKind.OWN)

    def make_found(self, node: Node) -> None:
        """Turn a writer's node of a file that is not stored into one that lookups find."""
        self._turn(node, NodeKind.LOCAL)

    def _turn(self, node: Node, kind: NodeKind) -> None:
        parent = node.parent
        if parent is not None:
            self._take(node, parent)
        node.kind = kind
        if parent is not None:
            self._put(node, parent)
        self.note_node(node)

    def detach(self, node: Node) -> None:
        """Take a node's name away: the name means another file now, or none."""
        parent = node.parent
        if parent is not None:
            self._take(node, parent)
            if node.id in self.by_id:
                self.note_node(node)
            if parent.is_forgotten:
                self.forget(parent.id)

    def move(self, node: Node, parent: Node, name: str) -> None:
        """Give a node another name and detach the node that had it."""
        replaced = parent.children.get(name)
        if replaced is not None and replaced is not node and not node.is_writing:
            self.detach(replaced)
        self.detach(node)
        node.name = name
        self._put(node, parent)
        self.note_node(node)

    def move_bases(self, source: str, target: str) -> None:
        """Follow a rename with the bases of files that are opened for writing, not written yet."""
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
        if node.handles or node.children or node.writing or node.is_wanted:
            return
        self._drop(node)

    def _drop(self, node: Node) -> None:
        self.by_id.pop(node.id, None)
        self._add(NodeGoneRecord(node.id))
        self.detach(node)

    def _put(self, node: Node, parent: Node) -> None:
        node.parent = parent
        if node.is_writing:
            if parent.writing is _NO_NODES:
                parent.writing = {}
            parent.writing.setdefault(node.name, []).append(node)
        else:
            if parent.children is _NO_NODES:
                parent.children = {}
            parent.children[node.name] = node

    def _take(self, node: Node, parent: Node) -> None:
        node.parent = None
        if not node.is_writing:
            if parent.children.get(node.name) is node:
                del parent.children[node.name]
            return
        found = parent.writing.get(node.name, [])
        if node in found:
            found.remove(node)
        if not found:
            parent.writing.pop(node.name, None)

    # ---- wishes ---------------------------------------------------------------------------

    def want(self, node: Node, thread: int, now_s: float, *, only_reads: bool = False) -> bool:
        """Note that `thread` wants to write the file of `node`, and is to look its name up again.

        Return False where that thread was told so before and came back without a lookup, as one
        does that opens a file by its descriptor in /proc, or a file that is a mount point.
        """
        if not thread:
            return True
        for old_key, old in list(self._wishes.items()):
            if old.since_s + _WISH_S < now_s:  # whoever had it was killed
                self._fulfil(old_key)
        key = thread, node.name
        wish = self._wishes.get(key)
        if wish is not None:
            self._fulfil(key)
            if wish.own is None and wish.node == node.id:
                return False
        self._wishes[key] = Wish(node.id, now_s, only_reads)
        self._note_wish(key)
        return True

    def look_up_own(self, parent: Node, name: str, thread: int, status: FileStatus) -> Node | None:
        """Return a node of its own for a thread that looks a name up because it wants to write."""
        key = thread, name
        wish = self._wishes.get(key) if thread else None
        if wish is None or status.is_dir:
            return None
        if wish.only_reads:
            self._fulfil(key)
            return None
        own = wish.own
        if own is not None and (own.parent is not parent or own.name != name):
            # The thread gave up writing, and the file was renamed: the node means another name now.
            if not own.handles:
                self._drop(own)
            own = None
        if own is None:
            own = wish.own = self.add_writing(parent, name, status)
            self._note_wish(key)
        own.status, own.is_forgotten = status, False
        return own

    def end_wishes(self, thread: int, name: str | None = None) -> None:
        """Drop the wishes of a thread that does something else now: all of them, or one name's."""
        for key in list(self._wishes):
            if key[0] == thread and name in (None, key[1]):
                self._fulfil(key)

    def give(self, node: Node) -> None:
        """End the wish of the thread that has opened its own node."""
        for key, wish in list(self._wishes.items()):
            if wish.own is node:
                wish.own = None
                self._fulfil(key)
        node.is_wanted = False

    def _fulfil(self, key: tuple[int, str]) -> None:
        wish = self._wishes.pop(key)
        self._note_wish(key)
        if wish.own is not None and not wish.own.handles:
            self._drop(wish.own)

    def _note_wish(self, key: tuple[int, str]) -> None:
        wish = self._wishes.get(key)
        own = wish.own if wish is not None else None
        self._add(
            WishRecord(
                key[0],
                os.fsencode(key[1]),
                wish.node if wish is not None else None,
                own.id if own is not None else None,
                wish is not None and wish.only_reads,
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
        if node.is_writing and not node.handles:
            self.detach(node)
        if node.is_forgotten:
            self.forget(node.id)

    def handle(self, handle_id: int) -> Handle:
        """Return an open file that the kernel names. Raises: OSError (EBADF)."""
        with self.lock:
            self.request_count += 1
            handle = self.handles.get(handle_id)
        if handle is None:
            raise refuse(errno.EBADF)
        return handle

    def opened_by(self, request: int) -> Handle | None:
        """Return the file that a request has opened."""
        return next((h for h in self.handles.values() if h.request == request), None)

    def writers(self) -> Iterator[FileWriter]:
        """Yield every writer at work."""
        for handle in self.handles.values():
            if handle.writer is not None:
                yield handle.writer
