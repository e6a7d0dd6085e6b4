"""The striped file system as the kernel sees it: an adapter from FUSE operations to the core.

Owns the tables of nodes and handles and the times for which the kernel may cache. What a striped
file is, and what is durable when, is decided in `tree`, `reader` and `writer`; docs/SEMANTICS.md
says what users may rely on. Thread-safe: the lock guards the tables only, never I/O.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from bootseer.errors import BootseerError, NotFoundError, UnsupportedError
from bootseer.fuse.kernel.operations import (
    Attributes,
    Buffer,
    Caller,
    DirectoryEntry,
    Entry,
    FileSystemStatistics,
    Opened,
    Operations,
    SetAttributes,
)
from bootseer.fuse.striped.callers import is_dying, was_killed
from bootseer.fuse.striped.graveyard import is_hidden
from bootseer.fuse.striped.listing import Listings
from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.nodes import Handle, Node, NodeTable
from bootseer.fuse.striped.presentation import (
    BLOCK_BYTES,
    CACHE_S,
    attributes_of,
    attributes_ttl_s,
    entry_of,
    opened_of,
)
from bootseer.fuse.striped.reader import StripedReader
from bootseer.fuse.striped.stored import FileStatus
from bootseer.fuse.striped.tree import StripedTree
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writer import FileWriter, StripeSettings

_log = logging.getLogger(__name__)

_NAME_MAX_BYTES = 255
# Shown where the storage cannot say how large it is: programs refuse to write to a full disk.
_UNKNOWN_SPACE_BYTES = 2**50
_RENAME_NOREPLACE = 1
# At the end of a mount: how long to wait for the parts of an unfinished file to be removed.
_ABORT_WAIT_S = 2.0


def _refuse(code: int, path: str = "") -> OSError:
    return OSError(code, os.strerror(code), path)


class StripedFileSystem(Operations):
    """A tree of striped and ordinary files, mounted."""

    def __init__(
        self,
        tree: StripedTree,
        budget: MemoryBudget,
        settings: StripeSettings,
        *,
        uid: int | None = None,
        gid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.unwritten: list[str] = []
        """Files whose last bytes were lost because the mount ended while they were open."""
        self._tree = tree
        self._reader: StripedReader = tree.reader
        self._budget = budget
        self._settings = settings
        self._uid = os.geteuid() if uid is None else uid
        self._gid = os.getegid() if gid is None else gid
        self._clock = clock
        self._lock = threading.RLock()
        root = FileStatus("", True, 0, time.time_ns(), "")
        self._nodes = NodeTable(root, clock())
        self._listings = Listings(CACHE_S)

    def destroyed(self) -> None:
        """A file that is still open was not finished by whoever wrote it: it does not appear."""
        with self._lock:
            handles = list(self._nodes.handles.values())
        for handle in handles:
            writer = handle.writer
            if writer is not None:
                if writer.needs_publishing:
                    self.unwritten.append(writer.path)
                    _log.error("%s was still being written: nothing of it is kept", writer.path)
                writer.close(_ABORT_WAIT_S)
            if handle.file is not None:
                self._reader.close(handle.file)
        self._tree.close()

    # ---- names and attributes -------------------------------------------------------------

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Entry:
        with self._lock:
            directory = self._node(parent)
            text, path = self._child_path(directory, name)
            known = self._nodes.child(directory, text)
            if known is not None and known.writer() is not None:
                return self._entry(known)
        status = self._status(path)
        with self._lock:
            known = self._nodes.child(directory, text)
            if status is None:
                if known is not None:
                    self._nodes.detach(known)
                raise _refuse(errno.ENOENT, path)
            return self._entry(self._settle(directory, text, status))

    def _settle(self, directory: Node, name: str, status: FileStatus) -> Node:
        """The node for what was just seen under a name; the lock is held."""
        known = self._nodes.child(directory, name)
        same = (
            known is not None
            and known.status.is_dir == status.is_dir
            and (known.status.identity == status.identity or known.writer() is not None)
        )
        if known is None or not same:
            return self._nodes.add(directory, name, status, self._clock())
        known.status, known.seen_s = status, self._clock()
        known.is_forgotten = False
        return known

    def dropped(self, node: int) -> None:
        with self._lock:
            self._nodes.forget(node)

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        with self._lock:
            known = self._node(node)
            fresh = self._clock() - known.seen_s < CACHE_S
            if fresh or known.is_local or known.is_detached or known.writer() is not None:
                return self._shown(known)
            path = known.path
        status = self._status(path) if path else None
        with self._lock:
            if path and (status is None or status.identity != known.status.identity):
                # The name means something else now. Who has the file open keeps what was opened;
                # everybody else is sent (ESTALE) to look the name up again.
                self._nodes.detach(known)
                if not known.handles:
                    raise _refuse(errno.ESTALE, path)
            elif status is not None:
                known.status, known.seen_s = status, self._clock()
            return self._shown(known)

    def setattr(
        self, caller: Caller, node: int, changes: SetAttributes
    ) -> tuple[Attributes, float]:
        # Modes, owners and times belong to the storage: accepted, so that cp -p and tar work, and
        # not kept.
        if changes.size_bytes is not None:
            self._truncate(caller, node, changes.handle, changes.size_bytes)
        return self.getattr(caller, node, changes.handle)

    def _truncate(self, caller: Caller, node: int, handle_id: int | None, size_bytes: int) -> None:
        with self._lock:
            known = self._node(node)
            if known.status.is_dir:
                raise _refuse(errno.EISDIR)
            handle = self._nodes.handles.get(handle_id) if handle_id is not None else None
            if handle is None or not handle.is_writable:
                # truncate(2) of a file that is being written here acts on that writing.
                handle = next((h for h in known.handles if h.writer is not None), None)
        if handle is not None:
            writer = self._writer(handle, starts_empty=size_bytes == 0)
            writer.truncate(size_bytes)
            return
        path = self._attached_path(known)
        view = self._tree.stored.view(path)
        if view.size_bytes == size_bytes:
            return
        base = view if size_bytes else None
        writer = FileWriter(self._tree, path, self._budget, self._settings, base=base)
        try:
            writer.truncate(size_bytes)
            writer.publish()
        finally:
            writer.close()
        assert writer.view is not None
        self._published(known, writer.view)

    # ---- changing the tree ----------------------------------------------------------------

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Entry:
        directory, text, path = self._new_name(parent, name)
        status = self._tree.mkdir(path)
        with self._lock:
            return self._entry(self._nodes.add(directory, text, status, self._clock()))

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> None:
        with self._lock:
            directory = self._node(parent)
            text, path = self._child_path(directory, name)
            known = self._nodes.child(directory, text)
            if known is not None and self._nodes.local_children(known):
                raise _refuse(errno.ENOTEMPTY, path)
        self._tree.rmdir(path)
        self._gone(directory, text, path)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> None:
        with self._lock:
            directory = self._node(parent)
            text, path = self._child_path(directory, name)
            known = self._nodes.child(directory, text)
            is_local = known is not None and known.is_local
            writers = [writer for writer in self._nodes.writers() if writer.path == path]
        for writer in writers:
            writer.detach()
        try:
            self._tree.unlink(path)
        except NotFoundError:
            if not is_local:
                raise
        self._gone(directory, text, path)

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        if flags & ~_RENAME_NOREPLACE:
            raise _refuse(errno.EINVAL)
        with self._lock:
            directory, new_directory = self._node(parent), self._node(new_parent)
            text, source = self._child_path(directory, name)
            new_text, target = self._child_path(new_directory, new_name)
            writers = list(self._nodes.writers())
            taken = self._nodes.child(new_directory, new_text)
        if source == target:
            return
        if flags and taken is not None and taken.is_local:
            raise _refuse(errno.EEXIST, target)
        inside = [w for w in writers if w.path.startswith(source + "/")]
        if any(writer.needs_publishing for writer in inside):
            # Their parts lie in a folder that would move away under them.
            raise _refuse(errno.EBUSY, source)
        moving = [writer for writer in writers if writer.path == source]
        for writer in moving:
            writer.publish()
        self._tree.rename(source, target, replace=not flags)
        with self._lock:
            for writer in writers:
                if writer.path == target and writer not in moving:
                    writer.detach()
            for writer in moving:
                writer.path = target
            for writer in inside:
                writer.path = target + writer.path[len(source) :]
            known = self._nodes.child(directory, text)
            if known is not None:
                known.is_local = False
                known.seen_s = 0.0
                self._nodes.move(known, new_directory, new_text)
            elif taken is not None:
                self._nodes.detach(taken)
            self._listings.clear()
        self._refresh_moved(known)

    def _refresh_moved(self, node: Node | None) -> None:
        """An ordinary file's identity names its path: see it anew, or its next open is refused."""
        if node is None or node.status.is_dir:
            return
        status = self._status(node.path)
        with self._lock:
            if status is not None and not node.is_detached:
                node.status, node.seen_s = status, self._clock()

    # ---- files ----------------------------------------------------------------------------

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> tuple[Entry, Opened]:
        directory, text, path = self._new_name(parent, name)
        status = self._status(path)
        with self._lock:
            known = self._nodes.child(directory, text)
            if status is not None or (known is not None and known.is_local):
                if flags & os.O_EXCL:
                    raise _refuse(errno.EEXIST, path)
                if status is not None:
                    known = self._settle(directory, text, status)
            else:
                known = None
        if known is not None:
            opened = self.open(caller, known.id, flags)
            return self._entry(known), opened
        with self._lock:
            status = FileStatus(path, False, 0, time.time_ns(), "")
            node = self._nodes.add(directory, text, status, self._clock())
            node.is_local = True
            handle = self._nodes.open(node, flags)
            handle.writer = FileWriter(self._tree, path, self._budget, self._settings)
            return self._entry(node), opened_of(handle)

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        with self._lock:
            known = self._node(node)
            path = self._attached_path(known)
            writes = flags & os.O_ACCMODE != os.O_RDONLY
            if writes and flags & os.O_TRUNC:
                if known.had_readers and known.handles:
                    # The kernel would cut the pages of those who read the old generation: let it
                    # look the name up again and open a node of its own.
                    self._nodes.detach(known)
                    raise _refuse(errno.ESTALE, path)
                handle = self._nodes.open(known, flags)
                handle.writer = FileWriter(self._tree, path, self._budget, self._settings)
                return opened_of(handle)
            if known.is_local:
                handle = self._nodes.open(known, flags)
                if writes:
                    handle.writer = FileWriter(self._tree, path, self._budget, self._settings)
                return opened_of(handle)
            is_written_here = known.writer() is not None
        view = self._tree.stored.view(path)
        if view.identity != known.status.identity and not is_written_here:
            with self._lock:
                self._nodes.detach(known)
            raise _refuse(errno.ESTALE, path)
        with self._lock:
            handle = self._nodes.open(known, flags)
            if writes:
                handle.base = view
            if flags & os.O_ACCMODE != os.O_WRONLY:
                handle.file = self._reader.open(view)
                known.had_readers = True
            return opened_of(handle)

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        opened = self._handle(handle)
        writer = opened.writer
        if writer is None and opened.file is None:
            # Opened for reading before its writer has published anything.
            with self._lock:
                writer = opened.node.writer()
        if writer is not None:
            return self._read_back(opened, writer, offset, length)
        if opened.file is None:
            return b""
        return self._reader.read(opened.file, offset, length, lambda: is_dying(caller))

    def _read_back(self, handle: Handle, writer: FileWriter, offset: int, length: int) -> bytes:
        """Read a file through the descriptor that writes it: what is published, and the end that
        was not sent yet."""
        ending = writer.read(offset, length)
        if ending is not None:
            return ending
        view, sent = writer.view, writer.sent_bytes
        if view is None or view.size_bytes < min(offset + length, sent):
            raise UnsupportedError(
                f"{writer.path}: what was written can be read back after fsync or close"
            )
        file = self._reader.open(view)
        try:
            head = self._reader.read_bytes(file, offset, min(length, sent - offset))
        finally:
            self._reader.close(file)
        return head + (writer.read(sent, length - len(head)) or b"")

    def write(
        self, caller: Caller, node: int, handle: int, offset: int, data: memoryview, flags: int
    ) -> int:
        opened = self._handle(handle)
        if not opened.is_writable:
            raise _refuse(errno.EBADF)
        writer = self._writer(opened)
        opened.was_killed = False
        if opened.flags & os.O_APPEND:
            return writer.append(data, lambda: is_dying(caller))
        return writer.write(offset, data, lambda: is_dying(caller))

    def flush(self, caller: Caller, node: int, handle: int) -> None:
        opened = self._handle(handle)
        writer = opened.writer
        if writer is None:
            return
        opened.was_killed = was_killed(caller)
        if opened.was_killed:
            # Killed in the middle of a save: half a checkpoint must not appear. Another process
            # that holds the descriptor too may still finish the file and close it.
            _log.warning("process %d was killed while it wrote %s", caller.pid, writer.path)
            return
        # A shell that redirects output closes its copy of the descriptor before anything was
        # written: that must not replace the file by an empty one.
        if writer.was_written or writer.has_failed:
            self._publish(opened, writer)

    def fsync(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        opened = self._handle(handle)
        if opened.writer is not None:
            self._publish(opened, opened.writer)

    def fsyncdir(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        """Every change of names is durable when it returns."""

    def release(self, node: int, handle: int, flags: int) -> None:
        with self._lock:
            opened = self._nodes.handles.get(handle)
        if opened is None:
            return
        writer = opened.writer
        if writer is not None:
            try:
                if writer.needs_publishing and not opened.was_killed:
                    self._publish(opened, writer)
            except (BootseerError, OSError) as error:
                _log.error("%s was not written: %s", writer.path, error)
            writer.close()
        with self._lock:
            self._nodes.close(opened)
            opened.node.seen_s = 0.0
            if opened.node.is_local and opened.node.writer() is None:
                self._nodes.detach(opened.node)
        if opened.file is not None:
            self._reader.close(opened.file)

    def _publish(self, handle: Handle, writer: FileWriter) -> None:
        if not writer.needs_publishing and not writer.has_failed:
            return
        writer.publish()
        if writer.view is not None:
            self._published(handle.node, writer.view)

    def _published(self, node: Node, view: FileView) -> None:
        status = FileStatus(view.path, False, view.size_bytes, view.modified_ns, view.identity)
        with self._lock:
            self._listings.drop(view.path)
            old_identity = node.status.identity
            node.status, node.seen_s, node.is_local = status, self._clock(), False
            if node.had_readers and not node.is_detached and old_identity != view.identity:
                # The kernel may hold pages of the generation before: the name gets a new node.
                assert node.parent is not None
                self._nodes.add(node.parent, node.name, status, self._clock())

    def _writer(self, handle: Handle, *, starts_empty: bool = False) -> FileWriter:
        with self._lock:
            if handle.writer is not None:
                return handle.writer
            base = handle.base
            path = base.path if base is not None else self._attached_path(handle.node)
            if not handle.node.is_detached:
                path = handle.node.path
        writer = FileWriter(
            self._tree, path, self._budget, self._settings, base=None if starts_empty else base
        )
        with self._lock:
            if handle.writer is None:
                handle.writer = writer
            return handle.writer

    # ---- directories ----------------------------------------------------------------------

    def opendir(self, caller: Caller, node: int, flags: int) -> Opened:
        with self._lock:
            directory = self._node(node)
            path = self._attached_path(directory)
        try:
            infos = self._tree.stored.entries(path)
        except NotFoundError:
            if path:
                raise
            infos = []  # The root is made when something is first written.
        with self._lock:
            local = [child.name for child in self._nodes.local_children(directory)]
        return Opened(handle=self._listings.open(infos, local, self._clock()))

    def readdir(
        self, caller: Caller, node: int, handle: int, offset: int, plus: bool
    ) -> Sequence[DirectoryEntry]:
        with self._lock:
            known = self._nodes.children(self._node(node))
        return self._listings.read(handle, offset, known)

    def releasedir(self, node: int, handle: int) -> None:
        self._listings.close(handle)

    def statfs(self, caller: Caller, node: int) -> FileSystemStatistics:
        space = self._tree.backend.space()
        total = space.total_bytes if space else _UNKNOWN_SPACE_BYTES
        free = space.free_bytes if space else _UNKNOWN_SPACE_BYTES
        return FileSystemStatistics(
            total // BLOCK_BYTES,
            free // BLOCK_BYTES,
            free // BLOCK_BYTES,
            block_size_bytes=BLOCK_BYTES,
            name_max=_NAME_MAX_BYTES,
        )

    # ---- inside ---------------------------------------------------------------------------

    def _node(self, node: int) -> Node:
        known = self._nodes.by_id.get(node)
        if known is None:
            raise _refuse(errno.ESTALE)
        return known

    def _handle(self, handle: int) -> Handle:
        with self._lock:
            opened = self._nodes.handles.get(handle)
        if opened is None:
            raise _refuse(errno.EBADF)
        return opened

    def _attached_path(self, node: Node) -> str:
        if node.is_detached:
            raise _refuse(errno.ESTALE)
        return node.path

    def _child_path(self, directory: Node, name: bytes) -> tuple[str, str]:
        if len(name) > _NAME_MAX_BYTES:
            raise _refuse(errno.ENAMETOOLONG)
        text = os.fsdecode(name)
        if is_hidden(text):
            raise _refuse(errno.ENOENT, text)
        parent = self._attached_path(directory)
        return text, f"{parent}/{text}" if parent else text

    def _new_name(self, parent: int, name: bytes) -> tuple[Node, str, str]:
        with self._lock:
            directory = self._node(parent)
            if is_hidden(os.fsdecode(name)):
                raise _refuse(errno.EPERM, os.fsdecode(name))
            return directory, *self._child_path(directory, name)

    def _status(self, path: str) -> FileStatus | None:
        listed = self._listings.take(path, self._clock())
        try:
            return self._tree.stored.status_of(listed) if listed else self._tree.stored.status(path)
        except NotFoundError:
            return None

    def _gone(self, directory: Node, name: str, path: str) -> None:
        with self._lock:
            self._listings.drop(path)
            known = self._nodes.child(directory, name)
            if known is not None:
                known.is_local = False
                self._nodes.detach(known)

    def _entry(self, node: Node) -> Entry:
        return entry_of(node, self._uid, self._gid)

    def _shown(self, node: Node) -> tuple[Attributes, float]:
        return attributes_of(node, self._uid, self._gid), attributes_ttl_s(node)
