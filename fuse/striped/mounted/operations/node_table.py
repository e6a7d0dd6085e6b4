"""The tables of the nodes and open handles of a mounted tree.

Owns both. When a name comes to mean another generation of its file, it gets a new node and the old
one is *detached* (see `nodes`). Not thread-safe: the file system holds its lock around every call.
Every change is told to the journal, from which a successor of this process makes the same tables.
"""

import itertools
import time
from collections.abc import Iterator

from bootseer.fuse.kernel.operations import ROOT_NODE
from bootseer.fuse.striped.mounted.life.journal import Journal, Record
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node, node_record
from bootseer.fuse.striped.names.stored import FileStatus
from bootseer.fuse.striped.writing.writer import FileWriter


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
