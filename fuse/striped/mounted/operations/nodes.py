"""What a mount knows of one file or directory, and of one open file.

A node stands for one generation of a file as far as readers go, so that pages and the size that the
kernel keeps for a node never belong to other bytes. Who opens a file for writing gets a node of its
own, which no lookup finds: the size of the new generation is seen by that descriptor only, until
the generation is published. A file that is not stored yet has one node for its first writer and for
its readers. `node_table` holds them all. Not thread-safe: the file system holds its lock.
"""

import os
import threading

from msgspec import Struct, field

from bootseer.fuse.kernel.operations import ROOT_NODE
from bootseer.fuse.striped.mounted.journal import FileRecord, NodeRecord, view_record
from bootseer.fuse.striped.names.stored import FileStatus
from bootseer.fuse.striped.reading.chunks import OpenFile
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.writer import FileWriter
from bootseer.store.backend import HasDescriptor


class Node(Struct, eq=False):
    """A file or directory that the kernel knows."""

    id: int
    parent: "Node | None"
    """None for the root, and for a detached node."""
    name: str
    status: FileStatus
    """As last seen."""
    is_local: bool = False
    """A file that was created here and never published: no other node sees it."""
    is_writing: bool = False
    """Whether this is the own node of a writer, which no lookup finds."""
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
    handles: "list[Handle]" = field(default_factory=list)
    child_count: int = 0
    """How many nodes have this one as their parent: their paths lead through it."""
    is_forgotten: bool = False
    """Whether the kernel let go of it, and only its children keep it."""

    @property
    def is_detached(self) -> bool:
        """Whether the node's name, or that of a directory above it, is gone or means something else
        now."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node.id != ROOT_NODE

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

    @property
    def is_emptied(self) -> bool:
        """Whether it is the node of those alone who emptied the file, and wrote nothing, before it
        was opened anew."""
        return (
            self.is_writing
            and len(self.handles) > 0
            and all(handle.is_superseded and handle.only_empties for handle in self.handles)
        )

    @property
    def is_unpublished(self) -> bool:
        """Whether the file exists in this mount alone, because somebody writes it here."""
        return self.is_local and any(
            handle.writer is not None and not handle.was_killed for handle in self.handles
        )


class Handle(Struct, eq=False):
    """One open file."""

    id: int
    node: Node
    flags: int
    file: OpenFile | None = None
    """Generation that it reads; of a file that is written through its node, the last one that was
    published."""
    descriptor: HasDescriptor | None = None
    """What the kernel may read it from."""
    base: FileView | None = None
    """What it appends to, before the first write."""
    writer: FileWriter | None = None
    unpublished_owners: set[int | None] = field(default_factory=set)
    """Tables of open files (`Caller.lock_owner`) of the processes that wrote since the last commit.
    The close of any other process, such as a child that inherited the descriptor, commits nothing.
    """
    opener: int = 0
    """Process that opened it; 0 if it is unknown."""
    was_killed: bool = False
    """Whether the process that wrote it was ended by a signal."""
    was_flushed: bool = False
    """Whether a descriptor of it was closed, and nothing was written since."""
    is_kept_open: bool = False
    """Whether a copy of a descriptor that was closed is open still, as far as the server can know.
    """
    is_releasing: bool = False
    """Whether its last descriptor is known to be gone."""
    is_superseded: bool = False
    """Whether the file was opened anew, or cut, since: emptying it would come too late."""
    publishing: threading.Lock = field(default_factory=threading.Lock)
    """Held from publishing what it wrote until the node shows it."""
    is_nameless: bool = False
    """Whether this mount removed or replaced its file before anything was written through it, when
    its name meant another file already."""
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
    def is_at_work(self) -> bool:
        """Returns whether a process writes through the handle, as far as the server can know."""
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

    def record(self) -> FileRecord:
        """Return what a successor must know of the open file."""
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
            was_killed=self.was_killed,
        )


def node_record(node: Node) -> NodeRecord:
    """Return what a successor must know of a node."""
    status = node.status
    return NodeRecord(
        node.id,
        node.parent.id if node.parent is not None else None,
        os.fsencode(node.name),
        status.is_dir,
        status.size_bytes,
        status.modified_ns,
        os.fsencode(status.identity),
        node.is_local,
        node.is_writing,
        node.inode,
        node.is_forgotten,
    )
