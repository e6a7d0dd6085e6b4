"""What one mount of a striped tree knows: its nodes, its handles, and who is asked for bytes.

Owns the state that the FUSE operations on names (`name_operations`) and on open files
(`file_operations`, `close_operations`) share, and what both need of it. Thread-safe: the lock
guards the tables only, never I/O.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable

from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.kernel.operations import Attributes, Caller, Entry, Operations
from bootseer.fuse.striped.mounted.journal import Journal
from bootseer.fuse.striped.mounted.life.status import OpenFigures
from bootseer.fuse.striped.mounted.listing import Listings
from bootseer.fuse.striped.mounted.operations.node_table import NodeTable
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node
from bootseer.fuse.striped.mounted.operations.presentation import (
    CACHE_S,
    Ownership,
    attributes_of,
)
from bootseer.fuse.striped.names.stored import FileStatus, is_hidden, refuse
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.writer import FileWriter
from bootseer.store.paths import PATH_MAX_BYTES

NAME_MAX_BYTES = 255
# Its parts' names are longer.
_PATH_MAX_BYTES = PATH_MAX_BYTES - 100
# Of the eight threads that serve a mount.
_WAITING_MAX = 3
# A stream that read nothing for so long is not shown as active.
_ACTIVE_S = 10.0


class MountTables(Operations):
    """The shared state of one mount."""

    def __init__(
        self,
        storage: StripedStorage,
        *,
        owner: Ownership | None = None,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        passes_files: bool = False,
        maps_direct_io: bool = True,
    ) -> None:
        """`passes_files`: whether the kernel may read ordinary files of this node past us.

        `maps_direct_io`: whether it maps files shared (MAP_SHARED) that it reads without its page
        cache. Otherwise (before Linux 6.6) what is opened for reading goes through the page cache.
        """
        self.unwritten: list[str] = []
        """Files whose last bytes were lost because the mount ended while they were open."""
        self._storage = storage
        self._tree = storage.tree
        self._reader = storage.reader
        self._owner = owner or Ownership(os.geteuid(), os.getegid())
        self._passes_files = passes_files
        self._maps_direct_io = maps_direct_io
        self._request_count = 0
        self._inherited: set[int] = set()
        """Nodes that a predecessor of this process named and the kernel has not forgotten."""
        self._clock = clock
        self._lock = threading.RLock()
        root = FileStatus("", True, 0, time.time_ns(), "")
        self._nodes = NodeTable(root, journal)
        self._listings = Listings(CACHE_S)
        self._waiting = threading.BoundedSemaphore(_WAITING_MAX)
        """Held by who waits for a release: threads must be left to serve that."""

    def figures(self) -> OpenFigures:
        """What is open now."""
        now_s = time.monotonic()
        active = sum(
            file.streams.active_count(now_s - _ACTIVE_S) for file in self._reader.open_files()
        )
        with self._lock:
            unfinished = {
                w.path for w in self._nodes.writers() if w.needs_publishing or w.has_unsaved_bytes
            }
            count = len(self._nodes.handles)
            return OpenFigures(count, active, self._request_count, tuple(sorted(unfinished)))

    def _node(self, node: int) -> Node:
        self._request_count += 1
        known = self._nodes.by_id.get(node)
        if known is None:
            raise refuse(errno.ESTALE)
        return known

    def _handle(self, handle: int) -> Handle:
        with self._lock:
            self._request_count += 1
            opened = self._nodes.handles.get(handle)
        if opened is None:
            raise refuse(errno.EBADF)
        return opened

    def _attached_path(self, node: Node) -> str:
        if node.is_detached:
            raise refuse(errno.ESTALE)
        return node.path

    def _child_path(self, directory: Node, name: bytes) -> tuple[str, str]:
        if len(name) > NAME_MAX_BYTES:
            raise refuse(errno.ENAMETOOLONG)
        text = os.fsdecode(name)
        if is_hidden(text):
            raise refuse(errno.ENOENT, text)
        parent = self._attached_path(directory)
        path = f"{parent}/{text}" if parent else text
        if len(os.fsencode(path)) > _PATH_MAX_BYTES:
            raise refuse(errno.ENAMETOOLONG)
        return text, path

    def _new_name(self, parent: int, name: bytes) -> tuple[Node, str, str]:
        with self._lock:
            directory = self._node(parent)
            if is_hidden(os.fsdecode(name)):
                raise refuse(errno.EPERM, os.fsdecode(name))
            return directory, *self._child_path(directory, name)

    def _status(self, path: str) -> tuple[FileStatus | None, float]:
        """Return what is stored at `path`, and when that was seen."""
        now_s = self._clock()
        listed = self._listings.take(path, now_s)
        try:
            if listed is not None:
                return self._tree.stored.status_of(listed[1]), listed[0]
            return self._tree.stored.status(path), now_s
        except NotFoundError:
            return None, now_s

    def _settle(self, directory: Node, name: str, status: FileStatus) -> Node:
        """The node for what was just seen under a name; the lock is held."""
        known = self._nodes.child(directory, name)
        if known is not None and known.is_local:
            # Somebody else has stored a file of this name: our writer's is another one.
            self._nodes.make_writing(known)
            known = None
        if (
            known is None
            or known.status.is_dir != status.is_dir
            or known.status.identity != status.identity
        ):
            return self._nodes.add(directory, name, status)
        known.status = status
        known.is_forgotten = False
        return known

    def _entry(self, node: Node, seen_s: float | None = None) -> Entry:
        """Return the answer to a lookup. `seen_s`: when the storage was asked; now by default."""
        attributes, ttl_s = self._shown(node, seen_s)
        # A file that only this mount knows may vanish without the kernel hearing of it.
        return Entry(attributes, 0.0 if node.is_local else ttl_s, ttl_s)

    def _shown(
        self, node: Node, seen_s: float | None = None, writer: FileWriter | None = None
    ) -> tuple[Attributes, float]:
        """Return attributes, and for how long the kernel may show them.

        A file that is written here means another node as soon as it is published.
        """
        attributes = attributes_of(node, self._owner, writer)
        if node.is_writing or self._nodes.is_written(node):
            return attributes, 0.0
        age_s = self._clock() - seen_s if seen_s is not None else 0.0
        return attributes, max(0.0, CACHE_S - age_s)

    def _forget_attributes(self, directory: Node) -> None:
        """Let the kernel ask for the attributes of a directory again.

        A file that is published changes the time of its directory behind the kernel's back, and
        `tar` takes what it then sees late for a change while it reads.
        """
        if self.forget_pages is not None:
            with contextlib.suppress(BootseerError):
                self.forget_pages(directory.id, -1, 0)

    def _own_unseen(self, node: Node) -> None:
        """As `_own_node`, for a thread in a pid namespace that cannot be seen from here.

        Nobody can tell such threads apart when they come back: each takes the node that it found,
        or the next one where somebody else has that open. The lock is held.
        """
        if node.is_local:
            return
        if node.is_detached or node.handles or node.was_passed:
            if not node.is_writing:
                self._nodes.detach(node)
            raise refuse(errno.ESTALE, node.path)
        if not node.is_writing:
            self._nodes.make_writing(node)

    def _own_node(self, caller: Caller, node: Node) -> None:
        """Let a writer have a node of its own for the file of `node`; the lock is held.

        Return only if that is `node` itself, since the kernel came back without a lookup.
        Raises: OSError (ESTALE), upon which the kernel looks the name up again.
        """
        if not caller.pid:
            self._own_unseen(node)
            return
        must_look_up = self._nodes.want(node, caller.pid, self._clock())
        is_read = node.handles and not node.is_local and not node.is_writing
        if must_look_up or is_read or node.is_detached:
            # The size and pages of a node that is read are those of what is read.
            raise refuse(errno.ESTALE, node.path)
        if not node.is_local and not node.is_writing:
            self._nodes.make_writing(node)

    def _writer(self, handle: Handle, *, starts_empty: bool = False) -> FileWriter:
        """The one that what is written through `handle` goes to."""
        with self._lock:
            if handle.writer is not None:
                return handle.writer
            base = handle.base
            path = base.path if base is not None else self._attached_path(handle.node)
            if not handle.node.is_detached:
                path = handle.node.path
        if starts_empty:
            base = None
        stale = base is not None and not self._is_current(base.renamed(path))
        if stale:
            base = None
        writer = self._storage.writer(path, base)
        if stale:
            # What it would be added to was replaced, or removed.
            writer.fail(refuse(errno.ESTALE, path))
        if handle.is_nameless:
            writer.detach()
        with self._lock:
            if handle.writer is None:
                handle.writer = writer
            return handle.writer

    def _is_current(self, view: FileView) -> bool:
        """Whether its name still means the generation `view`."""
        try:
            return self._tree.stored.status(view.path).identity == view.identity
        except NotFoundError:
            return False

    def _waiting_at(self, path: str) -> list[Handle]:
        """The handles that may write the file at `path`, and have not begun to. Under the lock."""
        return [
            handle
            for handle in self._nodes.handles.values()
            if handle.base is not None
            and handle.writer is None
            and path == (handle.base.path if handle.node.is_detached else handle.node.path)
        ]

    def _leave_nameless(self, handles: Iterable[Handle]) -> None:
        """Their name was removed or replaced in this mount: what they empty goes nowhere. Under
        the lock."""
        for handle in handles:
            if handle.writer is None:
                handle.is_nameless = True
                self._nodes.note(handle)

    def _writers_of(self, path: str) -> list[FileWriter]:
        """All that write the file at `path`, or may yet: those that add to what is there have read
        its end when this returns, so that it may go."""
        with self._lock:
            waiting = self._waiting_at(path)
        for handle in waiting:
            assert handle.base is not None
            if not self._is_current(handle.base.renamed(path)):
                # Its file is gone already: a write says so, and a close without one need not.
                continue
            # Where nothing can be added, its first write says so.
            with contextlib.suppress(BootseerError, OSError):
                self._writer(handle)
            with self._lock:
                self._nodes.note(handle)
        with self._lock:
            return [writer for writer in self._nodes.writers() if writer.path == path]
