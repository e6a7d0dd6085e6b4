"""The tables of the nodes and open handles of a mounted tree.

Owns both. When a name comes to mean another generation of its file, it gets a new node and the old
one is *detached* (see `nodes`). Nodes of writers have a name, too, but are not found by it.

Which node an open file belongs to is settled by the kernel's lookup, before we hear for what it is
opened. So an open for writing is answered with ESTALE, and the *wish* of its thread is noted;
the kernel then looks the name up again (open(2) and truncate(2) do this once) and opens what that
finds: a node of its own. Not thread-safe: the file system holds its lock around every call.
Every change is told to the journal, from which a successor of this process makes the same tables.
"""

import itertools
import os
import time
from collections.abc import Iterator

from msgspec import Struct

from bootseer.fuse.kernel.operations import ROOT_NODE
from bootseer.fuse.striped.mounted.journal import (
    FileClosedRecord,
    Journal,
    NodeGoneRecord,
    Record,
    WishRecord,
)
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node, node_record
from bootseer.fuse.striped.names.stored import FileStatus
from bootseer.fuse.striped.writing.writer import FileWriter

# A thread that was told to look a name up once more does so at once, unless it is killed.
_WISH_S = 60.0


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
    """All nodes and handles."""

    def __init__(self, root: FileStatus, journal: Journal | None = None) -> None:
        """With a journal, `start_journal` must follow."""
        self._journal = journal
        self.root = Node(ROOT_NODE, None, "", root)
        self.by_id: dict[int, Node] = {ROOT_NODE: self.root}
        self.handles: dict[int, Handle] = {}
        self._by_name: dict[int, dict[str, Node]] = {}
        """By the parent's id."""
        self._writing: dict[tuple[int, str], list[Node]] = {}
        """Nodes of writers, which have a name and are not found by it."""
        self._wishes: dict[tuple[int, str], Wish] = {}
        """By thread and name."""
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
            for key in self._wishes:
                self._note_wish(key)

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
        self._journal.add_layout(handle.base)
        if handle.file is not None:
            self._journal.add_layout(handle.file.view)
            if handle.file.pinned is not None:
                self._journal.add_pinned(handle.file.view, handle.file.pinned)
        if handle.writer is not None:
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

    def continue_from(
        self, nodes: list[Node], handles: list[Handle], wishes: dict[tuple[int, str], Wish]
    ) -> None:
        """Take over what a predecessor knew. Nothing new gets a number that it may have used."""
        for node in nodes:
            self.by_id[node.id] = node
            if node.parent is not None:
                self._put(node, node.parent)
        for handle in handles:
            self.handles[handle.id] = handle
            handle.node.handles.append(handle)
        self._wishes = wishes
        for wish in wishes.values():
            if wish.own is not None:
                wish.own.is_wanted = True
        self._ids = itertools.count(time.monotonic_ns())
        self._handle_ids = itertools.count(time.monotonic_ns())

    # ---- nodes ----------------------------------------------------------------------------

    def child(self, parent: Node, name: str) -> Node | None:
        """The node that now has this name."""
        return self._by_name.get(parent.id, {}).get(name)

    def children(self, parent: Node) -> dict[str, int]:
        """The inode numbers of a directory's known names."""
        names = self._by_name.get(parent.id, {})
        return {name: node.inode or node.id for name, node in names.items()}

    def writing(self, parent: Node, name: str) -> list[Node]:
        """Return the writers' nodes of a name."""
        return list(self._writing.get((parent.id, name), ()))

    def same_file(self, node: Node) -> list[Node]:
        """Return all nodes of the name that a node has; only itself when it is detached."""
        if node.parent is None:
            return [node]
        found = self.child(node.parent, node.name)
        return [*([found] if found is not None else []), *self.writing(node.parent, node.name)]

    def is_written(self, node: Node) -> bool:
        """Whether somebody has the file of a node open for writing in this mount."""
        if node.parent is None:
            return node.writer() is not None
        writing = self._writing.get((node.parent.id, node.name), ())
        return node.writer() is not None or any(other.handles for other in writing)

    def add_writing(self, parent: Node, name: str, status: FileStatus) -> Node:
        """Make a node for a writer of the file `name`."""
        node = Node(next(self._ids), parent, name, status, is_writing=True)
        found = self.child(parent, name)
        if found is not None:
            node.inode = found.inode or found.id
        self.by_id[node.id] = node
        self._put(node, parent)
        return node

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
        wish = self._wishes.get((thread, name)) if thread else None
        if wish is None or status.is_dir:
            return None
        if wish.only_reads:
            self._fulfil((thread, name))
            return None
        own = wish.own
        if own is None or own.parent is not parent:
            own = wish.own = self.add_writing(parent, name, status)
            own.is_wanted = True
            self.note_node(own)
            self._note_wish((thread, name))
        own.status, own.is_forgotten = status, False
        return own

    def give(self, node: Node) -> None:
        """The thread that wanted a node of its own has it now."""
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

    def make_writing(self, node: Node) -> None:
        """Let no lookup find a node any more: it is that of its writers."""
        if node.parent is not None:
            self._take(node, node.parent)
            node.is_writing = True
            self._put(node, node.parent)
        node.is_writing, node.is_local = True, False
        self.note_node(node)

    def make_found(self, node: Node) -> None:
        """Let lookups find a writer's node of a file that is not stored."""
        assert node.parent is not None
        self._take(node, node.parent)
        node.is_writing, node.is_local = False, True
        self._put(node, node.parent)
        self.note_node(node)

    def _drop(self, node: Node) -> None:
        self.by_id.pop(node.id, None)
        self._add(NodeGoneRecord(node.id))
        self.detach(node)

    def _put(self, node: Node, parent: Node) -> None:
        node.parent = parent
        parent.child_count += 1
        if node.is_writing:
            self._writing.setdefault((parent.id, node.name), []).append(node)
        else:
            self._by_name.setdefault(parent.id, {})[node.name] = node

    def _take(self, node: Node, parent: Node) -> None:
        parent.child_count -= 1
        key = parent.id, node.name
        if node.is_writing:
            found = self._writing.get(key, [])
            if node in found:
                found.remove(node)
            if not found:
                self._writing.pop(key, None)
            return
        names = self._by_name.get(parent.id, {})
        if names.get(node.name) is node:
            del names[node.name]
        if not names:
            self._by_name.pop(parent.id, None)

    def add(self, parent: Node, name: str, status: FileStatus) -> Node:
        """A new node for a name; the one that had it before is detached."""
        old = self.child(parent, name)
        if old is not None:
            self.detach(old)
        node = Node(next(self._ids), parent, name, status)
        for writing in self.writing(parent, name):
            if writing.status.identity == status.identity:
                # The kernel forgot the node that had the name before.
                node.inode = writing.inode
        self.by_id[node.id] = node
        self._put(node, parent)
        self.note_node(node)
        return node

    def detach(self, node: Node) -> None:
        """The name no longer means this node."""
        parent = node.parent
        if parent is not None:
            self._take(node, parent)
            node.parent = None
            if node.id in self.by_id:
                self.note_node(node)
            if parent.is_forgotten:
                self.forget(parent.id)

    def move(self, node: Node, parent: Node, name: str) -> None:
        """The node has another name now; what had that name is detached."""
        replaced = self.child(parent, name)
        if replaced is not None and replaced is not node and not node.is_writing:
            self.detach(replaced)
        self.detach(node)
        node.name = name
        self._put(node, parent)
        self.note_node(node)

    def forget(self, node_id: int) -> None:
        """The kernel does not know the node any more."""
        node = self.by_id.get(node_id)
        if node is None or node.id == ROOT_NODE:
            return
        node.is_forgotten = True
        if node.handles or node.child_count or node.is_wanted:
            return
        del self.by_id[node_id]
        self._add(NodeGoneRecord(node_id))
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
        self._add(FileClosedRecord(handle.id))
        node = handle.node
        node.handles.remove(handle)
        if node.is_writing and not node.handles:
            self.detach(node)
        if node.is_forgotten:
            self.forget(node.id)

    def writers(self) -> Iterator[FileWriter]:
        """Every writer at work."""
        for handle in self.handles.values():
            if handle.writer is not None:
                yield handle.writer

    def local_children(self, parent: Node) -> list[Node]:
        """Files of a directory that only this mount knows."""
        return [node for node in self._by_name.get(parent.id, {}).values() if node.is_unpublished]
