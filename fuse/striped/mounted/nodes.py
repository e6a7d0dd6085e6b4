"""Node ids and open handles of a mounted tree.

Owns both tables. A node stands for one generation of a file as far as readers go: when a name
comes to mean another generation, it gets a new node and the old one is *detached*, so that pages
the kernel keeps for a node never belong to other bytes. Not thread-safe: the file system holds its
lock around every call. Every change is told to the journal, from which a successor of this process
makes the same tables.
"""

import itertools
import os
import threading
import time
from collections.abc import Iterator

from msgspec import Struct, field

from bootseer.fuse.kernel.operations import ROOT_NODE
from bootseer.fuse.striped.mounted.journal import Journal, Record, view_to_json
from bootseer.fuse.striped.names.stored import FileStatus
from bootseer.fuse.striped.reading.chunks import OpenFile
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.writer import FileWriter
from bootseer.store.opened import HasDescriptor


class Node(Struct, eq=False):
    """A file or directory that the kernel knows."""

    id: int
    parent: "Node | None"
    """None for the root, and for a detached node."""
    name: str
    status: FileStatus
    """As last seen."""
    seen_s: float
    """When, by the monotonic clock."""
    is_local: bool = False
    """A file that was created here and never published: no other node sees it."""
    had_readers: bool = False
    """Whether the kernel may hold pages of it."""
    may_be_passed: bool = True
    """Whether the kernel may be given the stored file itself to read from."""
    was_passed: bool = False
    """Whether it may have been: then all opens are, and none may be for writing, which the kernel
    would do in the stored file."""
    handles: "list[Handle]" = field(default_factory=list)
    child_count: int = 0
    """How many nodes have this one as their parent: their paths lead through it."""
    is_forgotten: bool = False
    """Whether the kernel let go of it, and only its children keep it."""

    @property
    def is_detached(self) -> bool:
        """Whether the node's name is gone, or means something else now."""
        return self.parent is None and self.id != ROOT_NODE

    @property
    def path(self) -> str:
        """The path from the root, "" for the root itself."""
        names: list[str] = []
        node = self
        while node.parent is not None:
            names.append(node.name)
            node = node.parent
        return "/".join(reversed(names))

    def writer(self) -> FileWriter | None:
        """The writer that was opened last, if any is at work."""
        for handle in reversed(self.handles):
            # The kernel closes the files of a killed process a moment after it is gone.
            writer = handle.writer if not handle.was_killed else None
            if writer is not None and (writer.was_written or not handle.is_superseded):
                return writer
        return None


class Handle(Struct, eq=False):
    """One open file."""

    id: int
    node: Node
    flags: int
    file: OpenFile | None = None
    """What it reads."""
    descriptor: HasDescriptor | None = None
    """What the kernel may read it from."""
    base: FileView | None = None
    """What it appends to, before the first write."""
    writer: FileWriter | None = None
    was_killed: bool = False
    """Whether the process that closed it last was ended by a signal."""
    was_flushed: bool = False
    """Whether a descriptor of it was closed, and nothing was written since."""
    is_releasing: bool = False
    """Whether its last descriptor is known to be gone."""
    is_superseded: bool = False
    """Whether the file was opened anew, or cut, since: emptying it would come too late."""
    publishing: threading.Lock = field(default_factory=threading.Lock)
    """Held from publishing what it wrote until the node shows it."""
    request: int = 0
    """The request that opened it: a successor may be asked to do that once more."""
    noted: Record | None = None
    """What the journal has of it."""

    @property
    def is_writable(self) -> bool:
        """Whether write(2) is allowed."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def is_at_work(self) -> bool:
        """Whether somebody writes through it, as far as we can know."""
        return self.writer is not None and not self.was_flushed and not self.is_releasing

    @property
    def only_empties(self) -> bool:
        """Whether all that it has done so far is to make its file empty, unseen by others."""
        writer = self.writer
        return (
            writer is not None
            and writer.needs_publishing
            and not writer.was_written
            and not self.was_killed
        )

    @property
    def is_unfinished(self) -> bool:
        """Whether bytes would be lost with this process."""
        return self.writer is not None and (self.writer.was_written or self.writer.has_failed)

    def record(self) -> Record:
        """What a successor must know."""
        base = self.writer.view if self.writer is not None else self.base
        return {
            "file": self.id,
            "node": self.node.id,
            "flags": self.flags,
            "request": self.request,
            "reads": view_to_json(self.file.view if self.file is not None else None),
            "pinned": self.file is not None and self.file.pinned is not None,
            "base": view_to_json(base),
            "writes": self.writer is not None,
            "detached": self.writer is not None and self.writer.is_detached,
            "unfinished": self.is_unfinished,
            "killed": self.was_killed,
        }


def node_record(node: Node) -> Record:
    """What a successor must know of a node."""
    status = node.status
    return {
        "node": node.id,
        "parent": node.parent.id if node.parent is not None else None,
        "name": node.name,
        "status": [status.is_dir, status.size_bytes, status.modified_ns, status.identity],
        "local": node.is_local,
        "forgotten": node.is_forgotten,
    }


class NodeTable:
    """All nodes and handles."""

    def __init__(self, root: FileStatus, now_s: float, journal: Journal | None = None) -> None:
        """With a journal, `start_journal` must follow."""
        self._journal = journal
        self.root = Node(ROOT_NODE, None, "", root, now_s)
        self.by_id: dict[int, Node] = {ROOT_NODE: self.root}
        self.handles: dict[int, Handle] = {}
        self._by_name: dict[tuple[int, str], Node] = {}
        self._ids = itertools.count(ROOT_NODE + 1)
        self._handle_ids = itertools.count(1)

    # ---- the journal ----------------------------------------------------------------------

    def start_journal(self) -> None:
        """Write all that is known."""
        if self._journal is None:
            return
        with self._journal.anew():
            for node in self.by_id.values():
                self.note_node(node)
            for handle in self.handles.values():
                handle.noted = None
                self.note(handle)

    def close_journal(self) -> None:
        """Nothing more is to be told."""
        if self._journal is not None:
            self._journal.close()

    def note_node(self, node: Node) -> None:
        """A node is new, or not what it was."""
        if self._journal is not None and node is not self.root:
            self._add(node_record(node))

    def note(self, handle: Handle) -> None:
        """A file was opened, or is not what it was. Before the kernel is answered."""
        if self._journal is None:
            return
        record = handle.record()
        if record == handle.noted:
            return
        handle.noted = record
        for view in (handle.file.view if handle.file is not None else None, handle.base):
            if view is not None:
                self._journal.add_layout(view)
        file = handle.file
        if file is not None and file.pinned is not None:
            self._journal.add_pinned(file.view.identity, file.pinned)
        if handle.writer is not None and handle.writer.view is not None:
            self._journal.add_layout(handle.writer.view)
        self._add(record)

    def move_bases(self, source: str, target: str) -> None:
        """A rename: what is opened for writing, and not written yet, lies elsewhere."""
        for handle in self.handles.values():
            base = handle.base
            if base is not None and (base.path == source or base.path.startswith(source + "/")):
                handle.base = base.renamed(target + base.path[len(source) :])

    def note_moved(self) -> None:
        """Names have changed: open files may lie elsewhere now."""
        for handle in self.handles.values():
            self.note(handle)

    def _add(self, record: Record) -> None:
        if self._journal is None:
            return
        self._journal.add(record)
        if self._journal.is_outgrown:
            self.start_journal()

    def continue_from(self, nodes: list[Node], handles: list[Handle]) -> None:
        """Take over what a predecessor knew. Nothing new gets a number that it may have used."""
        for node in nodes:
            self.by_id[node.id] = node
            if node.parent is not None:
                node.parent.child_count += 1
                self._by_name[node.parent.id, node.name] = node
        for handle in handles:
            self.handles[handle.id] = handle
            handle.node.handles.append(handle)
        self._ids = itertools.count(time.monotonic_ns())
        self._handle_ids = itertools.count(time.monotonic_ns())

    # ---- nodes ----------------------------------------------------------------------------

    def child(self, parent: Node, name: str) -> Node | None:
        """The node that now has this name."""
        return self._by_name.get((parent.id, name))

    def children(self, parent: Node) -> dict[str, int]:
        """The node ids of a directory's known names."""
        if not parent.child_count:
            return {}
        return {
            name: node.id
            for (parent_id, name), node in self._by_name.items()
            if parent_id == parent.id
        }

    def add(self, parent: Node, name: str, status: FileStatus, now_s: float) -> Node:
        """A new node for a name; the one that had it before is detached."""
        old = self.child(parent, name)
        if old is not None:
            self.detach(old)
        node = Node(next(self._ids), parent, name, status, now_s)
        parent.child_count += 1
        self.by_id[node.id] = node
        self._by_name[parent.id, name] = node
        self.note_node(node)
        return node

    def detach(self, node: Node) -> None:
        """The name no longer means this node."""
        parent = node.parent
        if parent is not None:
            self._by_name.pop((parent.id, node.name), None)
            node.parent = None
            parent.child_count -= 1
            if node.id in self.by_id:
                self.note_node(node)
            if parent.is_forgotten:
                self.forget(parent.id)

    def move(self, node: Node, parent: Node, name: str) -> None:
        """The node has another name now; what had that name is detached."""
        replaced = self.child(parent, name)
        if replaced is not None and replaced is not node:
            self.detach(replaced)
        self.detach(node)
        node.parent, node.name = parent, name
        parent.child_count += 1
        self._by_name[parent.id, name] = node
        self.note_node(node)

    def forget(self, node_id: int) -> None:
        """The kernel does not know the node any more."""
        node = self.by_id.get(node_id)
        if node is None or node.id == ROOT_NODE:
            return
        node.is_forgotten = True
        if node.handles or node.child_count:
            return
        del self.by_id[node_id]
        self._add({"gone": node_id})
        self.detach(node)

    # ---- handles --------------------------------------------------------------------------

    def open(self, node: Node, flags: int, request: int) -> Handle:
        """A new handle of a node. `note` it when it has what it needs."""
        handle = Handle(next(self._handle_ids), node, flags, request=request)
        self.handles[handle.id] = handle
        node.handles.append(handle)
        return handle

    def close(self, handle: Handle) -> None:
        """The handle is gone."""
        self.handles.pop(handle.id, None)
        self._add({"closed": handle.id})
        handle.node.handles.remove(handle)
        if handle.node.is_forgotten:
            self.forget(handle.node.id)

    def writers(self) -> Iterator[FileWriter]:
        """Every writer at work."""
        for handle in self.handles.values():
            if handle.writer is not None:
                yield handle.writer

    def local_children(self, parent: Node) -> list[Node]:
        """Files of a directory that only this mount knows."""
        return [
            node
            for (parent_id, _), node in self._by_name.items()
            if parent_id == parent.id and node.is_local and node.writer() is not None
        ]
