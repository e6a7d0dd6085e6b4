"""Open files of a mount: opening, reading, writing and publishing them.

Written bytes are published at `fsync` and `close`, but never after the writing process was killed;
docs/SEMANTICS.md says what users may rely on. A file that was opened with O_TRUNC and not written
since is called *emptied* here: its last close publishes an empty file, unless a later open or write
*supersedes* it. Thread-safe: the table's lock guards nodes and handles, and is not held during I/O.
"""

import contextlib
import errno
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from bootseer.errors import BootseerError, NotFoundError, UnavailableError, UnsupportedError
from bootseer.fuse.kernel.operations import Buffer, Caller, Opened
from bootseer.fuse.striped.mounted.journal import FileRecord, Inherited, NodeKind
from bootseer.fuse.striped.mounted.listing import Listings
from bootseer.fuse.striped.mounted.nodes import Handle, Node, NodeTable, Phase
from bootseer.fuse.striped.names.stored import FileStatus, os_error, status_of
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.file_writer import FileWriter
from bootseer.linux.processes import stat_fields, status_line

_log = logging.getLogger(__name__)

# Longest wait of a lookup, or of an open for reading, for the RELEASE of a file that was emptied
# and closed. The kernel sends it within a moment, unless another process has the descriptor, too.
_LAST_CLOSE_S = 2.0
_POLL_S = 0.005
# Server threads that may wait for a RELEASE at once: others must be free to serve it.
_WAITING_MAX = 3
# Wait, at the end of a mount, for the parts of an unfinished file to be removed.
_ABORT_WAIT_S = 2.0
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)
_PF_EXITING = 0x4
# Positions in /proc/<pid>/stat (proc(5)), counted from the field behind the name.
_FLAGS_FIELD = 6
_EXIT_CODE_FIELD = 49
_STAT_S = 1.0
"""Deadline of a read below /proc, which takes microseconds."""


class OpenFiles:
    """Operations on the open files of one mount."""

    def __init__(
        self,
        storage: StripedStorage,
        nodes: NodeTable,
        listings: Listings,
        clock: Callable[[], float],
        on_published: Callable[[Node], None],
        *,
        allows_passthrough: bool,
        caches_reads: bool,
    ) -> None:
        """Make the operations on the open files in `nodes`.

        `on_published` is called, without the lock, with the directory of a published file.
        `allows_passthrough`: see `MountedTree`. `caches_reads`: whether the kernel reads files
        through its page cache.
        """
        self.unwritten: list[str] = []
        """Files whose last bytes were lost because the mount ended while they were open."""
        self._storage = storage
        self._tree = storage.tree
        self._reader = storage.reader
        self._nodes = nodes
        self._lock = nodes.lock
        self._listings = listings
        self._clock = clock
        self._on_published = on_published
        self._allows_passthrough = allows_passthrough
        self._caches_reads = caches_reads
        self._waiting = threading.BoundedSemaphore(_WAITING_MAX)

    # ---- open files of a predecessor ------------------------------------------------------

    def resume(self, inherited: Inherited) -> None:
        """Reopen the files of a predecessor's journal, after its nodes.

        Readers continue. A writer without unpublished bytes continues, too; any other writer fails,
        because its bytes were in the predecessor's memory.
        """
        for record in inherited.files.values():
            node = self._nodes.by_id.get(record.node)
            if node is None:
                continue
            handle = Handle(
                record.file,
                node,
                record.flags,
                base=inherited.view(record.base),
                killed=record.killed,
                superseded=record.superseded,
                is_nameless=record.is_nameless and record.writer_path is None,
                request=record.request,
            )
            view = inherited.view(record.reads)
            if view is None and handle.is_readable:
                # The file was read back through its writer.
                view = handle.base
            if view is not None:
                handle.file = self._reader.open(view)
                if record.is_pinned:
                    handle.file.pinned = inherited.pinned[os.fsencode(view.identity)]
            self._nodes.add_handle(handle)
            self._resume_writer(handle, record)
        _log.info("resumed %d names and %d open files", len(inherited.nodes), len(inherited.files))

    def _resume_writer(self, handle: Handle, record: FileRecord) -> None:
        """Give the handle a writer, unless the first write can begin one from `handle.base`."""
        if record.writer_path is None:
            return
        path = os.fsdecode(record.writer_path)
        if record.is_unfinished:
            writer = handle.writer = self._storage.writer(path)
            writer.fail(
                UnavailableError(
                    f"{path} was being written when the mount's server was restarted: the bytes "
                    "since the last fsync or close are lost; write the file again"
                )
            )
            if record.is_nameless:
                writer.detach()
            _log.error("%s was being written: its writer gets an error", path)
        elif record.is_nameless:
            writer = handle.writer = self._storage.writer(path)
            writer.fail(os_error(errno.ESTALE))
            writer.detach()
        elif handle.base is None:
            handle.writer = self._storage.writer(path)

    # ---- opening --------------------------------------------------------------------------

    def opened_before(self, caller: Caller) -> Handle | None:
        """Return the file that a predecessor opened for this request without answering it."""
        return self._nodes.opened_by(caller.request) if caller.is_resent else None

    def create(
        self, caller: Caller, directory: Node, name: str, path: str, flags: int, opener: int
    ) -> Handle:
        """Open a new file, which is not stored before it is published. The lock is held."""
        # These handles emptied a file that another machine has removed since.
        emptied = [h for other in directory.writer_nodes.get(name, ()) for h in other.handles]
        self._supersede(handle for handle in emptied if handle.will_truncate)
        # Made before the tables change, because this raises on a storage that cannot commit.
        writer = self._storage.writer(path)
        status = FileStatus(path, False, 0, time.time_ns(), "")
        node = self._nodes.add(directory, name, status, NodeKind.LOCAL)
        handle = self._nodes.open(node, flags, caller.request, opener)
        handle.writer = writer
        self._nodes.note(handle)
        return handle

    def open(self, caller: Caller, node_id: int, flags: int) -> Opened:
        """Open the file of a node. On ESTALE the kernel looks up the name again."""
        with self._lock:
            node = self._nodes.node(node_id)
        self._finish_emptied(node, flags)
        with self._lock:
            again = self.opened_before(caller)
            if again is not None:
                return open_reply(again)
            is_reader = flags & os.O_ACCMODE == os.O_RDONLY
            if not is_reader:
                if node.is_detached or not node.is_wanted:
                    self._claim_writer_node(caller, node)
                self._nodes.finish_pending_lookup(node)
            elif node.is_writer_node and self._nodes.expect_lookup(
                node, caller.pid, self._clock(), only_reads=True
            ):
                # The file was published after the lookup.
                raise os_error(errno.ESTALE, node.path)
            elif not node.is_writer_node:
                # A pending lookup, left from an open for writing that failed, would make the next
                # lookup of that file by this thread return a writer's node.
                self._nodes.end_pending_lookups(caller.pid)
            path = node.attached_path
            if (
                is_reader
                and self._allows_passthrough
                and node.used_passthrough
                and flags & os.O_DIRECT
            ):
                self._renew(node)
                raise os_error(errno.ESTALE, path)
            if node.is_local and not node.is_unpublished:
                # The file's writer has just been killed, or has failed.
                raise os_error(errno.ESTALE, path)
            if is_reader and (node.is_local or node.writer() is not None):
                handle = self._nodes.open(node, flags, caller.request)
                self._nodes.note(handle)
                return open_reply(handle)
        if is_reader:
            return self._open_to_read(caller, node, path, flags)
        return self._open_to_write(caller, node, path, flags)

    def _open_to_read(self, caller: Caller, node: Node, path: str, flags: int) -> Opened:
        try:
            file, view = self._tree.open(path)
        except NotFoundError:
            # The file was removed elsewhere.
            with self._lock:
                self._nodes.detach(node)
                self._listings.drop(path)
            raise os_error(errno.ESTALE, path) from None
        with self._lock:
            if not self._may_read(node, view):
                self._reader.close(file)
                raise os_error(errno.ESTALE, path)
            handle = self._nodes.open(node, flags, caller.request)
            handle.file = file
            node.had_readers = True
            may_use_passthrough = self._may_use_passthrough(node, flags)
        # Not under the lock, because this opens the stored file.
        descriptor = self._reader.descriptor(file) if may_use_passthrough else None
        with self._lock:
            # A writer may have opened the file meanwhile.
            if descriptor is not None and self._may_use_passthrough(node, flags):
                handle.descriptor = descriptor
                node.used_passthrough = True
            self._nodes.note(handle)
            # The size of a writer's node may change, so its pages are not cached.
            is_cached = self._caches_reads and not node.is_writer_node and not flags & os.O_DIRECT
            return open_reply(handle, is_cached=is_cached)

    def _may_read(self, node: Node, view: FileView) -> bool:
        """Return whether an open of a node may read `view`, its current file. The lock is held."""
        if view.identity == node.status.identity:
            return True
        # The kernel caches no attributes of a file that this mount writes, so they may change.
        may_change = node.is_open_for_writing and not node.is_writer_node
        if node.had_readers or node.is_detached or not may_change:
            if not node.is_writer_node:
                self._nodes.detach(node)
            # The kernel looks up the name only once more, so that lookup must ask the storage.
            self._listings.drop(view.path)
            return False
        node.status = status_of(view)
        self._nodes.note_node(node)
        return True

    def _open_to_write(self, caller: Caller, node: Node, path: str, flags: int) -> Opened:
        file, base = None, None
        if not flags & os.O_TRUNC:
            try:
                if flags & os.O_ACCMODE == os.O_RDWR:
                    file, base = self._tree.open(path)
                else:
                    base = self._tree.stored.view(path)
            except NotFoundError:
                # A file that is not stored yet has another writer.
                if node.status.identity:
                    raise
        opener = process_of(caller)
        writer = self._storage.writer(path) if base is None else None
        with self._lock:
            handle = self._nodes.open(node, flags, caller.request, opener)
            if base is None:
                handle.writer = writer
                # Without O_TRUNC this handle must not publish an empty file.
                handle.superseded = not flags & os.O_TRUNC
            elif node.writer() is None:
                node.status = status_of(base)
            handle.base, handle.file = base, file
            self._nodes.note(handle)
            return open_reply(handle)

    def _claim_writer_node(self, caller: Caller, node: Node) -> None:
        """Make `node` the node of a writer; else raise ESTALE, so that the next lookup makes one.

        A node becomes a writer's only if the kernel has opened it again without a lookup (see
        `nodes`). The lock is held.
        """
        if caller.pid:
            must_look_up = self._nodes.expect_lookup(node, caller.pid, self._clock())
            is_read = node.handles and not node.is_local and not node.is_writer_node
            # Readers of a node rely on its size and pages.
            is_refused = must_look_up or is_read or node.is_detached
        else:
            # The second open of a thread in an invisible pid namespace cannot be recognized. Such a
            # thread takes the node that it found, or a new node if others have opened that one.
            is_refused = not node.is_local and (
                node.is_detached or bool(node.handles) or node.used_passthrough
            )
            if is_refused and not node.is_writer_node:
                self._nodes.detach(node)
        if is_refused:
            raise os_error(errno.ESTALE, node.path)
        if not node.is_local and not node.is_writer_node:
            self._nodes.make_writer_node(node)

    def _may_use_passthrough(self, node: Node, flags: int) -> bool:
        """Return whether the kernel may read the stored file itself; the lock is held.

        False if the file is open for writing, because writes must come to this server, and for
        O_DIRECT, whose alignment the stored file may not allow.
        """
        return (
            self._allows_passthrough
            and node.allows_passthrough
            and not node.is_writer_node
            and not flags & os.O_DIRECT
            and not any(handle.is_writable for handle in node.handles)
        )

    def _renew(self, node: Node) -> None:
        """Give the name a new node that is never passed through.

        The kernel opens a node in one mode only. It finds the new node when it looks up the name
        again. The lock is held.
        """
        assert node.parent is not None
        renewed = self._nodes.add(node.parent, node.name, node.status)
        renewed.allows_passthrough = False

    # ---- reading and writing --------------------------------------------------------------

    def read(
        self, caller: Caller, handle_id: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        """Return up to `length` bytes from `offset`."""
        handle = self._nodes.handle(handle_id)
        writer = handle.writer
        if writer is None and not handle.is_writable:
            # The file was opened for reading before its writer published anything.
            with self._lock:
                writer = handle.node.writer()
            if writer is not None and writer.has_failed and handle.file is not None:
                writer = None
        if writer is not None:
            return self._read_back(handle, writer, offset, length)
        if handle.file is None:
            return b""
        return self._reader.read(handle.file, offset, length, lambda: is_dying(caller))

    def _read_back(self, handle: Handle, writer: FileWriter, offset: int, length: int) -> bytes:
        """Read a file that is being written: published bytes from the storage, then the tail."""
        ending = writer.read(offset, length)
        if ending is not None:
            return ending
        view, sent = writer.view, writer.sent_bytes
        if view is None or writer.unchanged_bytes < min(offset + length, sent):
            raise UnsupportedError(
                f"{writer.path}: written bytes can be read back after fsync or close"
            )
        # The handle's reader is preferred, because an open generation outlives its name. A handle
        # that reads through the writer of another handle has none.
        file = handle.file or self._reader.open(view)
        try:
            head = self._reader.read_bytes(file, offset, min(length, sent - offset))
        finally:
            if handle.file is None:
                self._reader.close(file)
        return head + (writer.read(sent, length - len(head)) or b"")

    def write(
        self, caller: Caller, handle_id: int, offset: int, data: bytearray | memoryview
    ) -> int:
        """Take `data` at `offset`, or at the end of a file opened with O_APPEND."""
        handle = self._nodes.handle(handle_id)
        if not handle.is_writable:
            raise os_error(errno.EBADF)
        writer = self._writer(handle)
        handle.killed, handle.phase = False, Phase.OPEN
        with self._changing(caller, handle):
            if handle.flags & os.O_APPEND:
                return writer.append(data, lambda: is_dying(caller))
            return writer.write(offset, data, lambda: is_dying(caller))

    @contextlib.contextmanager
    def _changing(self, caller: Caller, handle: Handle) -> Iterator[None]:
        """Note, after the block has changed the file of `handle`, that `caller` changed it."""
        try:
            yield
            # Not after an error: a child whose write was refused must not publish, at its exit, the
            # file that its parent is still writing.
            handle.unpublished_owners.add(caller.lock_owner)
        finally:
            # After the change: if this process dies before, the kernel repeats the request.
            self._note_unfinished(handle)

    def truncate(
        self, caller: Caller, node_id: int, handle_id: int | None, size_bytes: int
    ) -> None:
        """Cut or grow a file, through an open file or by its name."""
        with self._lock:
            node = self._nodes.node(node_id)
        if handle_id is None:
            self._finish_emptied(node, os.O_WRONLY)
        with self._lock:
            if node.status.is_dir:
                raise os_error(errno.EISDIR)
            handle = self._nodes.handles.get(handle_id) if handle_id is not None else None
            if handle is None or not handle.is_writable:
                # truncate(2) of a file that is not stored yet cuts the bytes of its open writer.
                writing = (h for h in node.handles if h.writer and h.phase is Phase.OPEN)
                handle = next(writing, None)
                if handle is None or not (node.is_local or node.is_detached):
                    if not node.is_wanted:
                        # The kernel cuts the pages of the node in the request, so that node must
                        # not have readers.
                        self._claim_writer_node(caller, node)
                    self._nodes.finish_pending_lookup(node)
            path = node.path
        if handle is None:
            self._truncate_stored(node, path, size_bytes)
            return
        writer = self._writer(handle, starts_empty=size_bytes == 0)
        with self._changing(caller, handle):
            writer.truncate(size_bytes)

    def _truncate_stored(self, node: Node, path: str, size_bytes: int) -> None:
        view = self._tree.stored.view(path)
        with self._lock:
            node.status = status_of(view)
        if view.size_bytes == size_bytes:
            return
        writer = self._storage.writer(path, view if size_bytes else None)
        try:
            writer.truncate(size_bytes)
            writer.publish()
        finally:
            writer.close()
        assert writer.view is not None
        with self._lock:
            # The RELEASE of a handle that emptied the file before may still come.
            for other in self._nodes.same_file(node):
                self._supersede(other.handles)
        self.show_published(node, writer.view)

    def _writer(self, handle: Handle, *, starts_empty: bool = False) -> FileWriter:
        """Return the writer of an open file; begin it if there is none yet."""
        with self._lock:
            if handle.writer is not None:
                return handle.writer
            base = handle.base
            if not handle.node.is_detached:
                path = handle.node.path
            else:
                path = base.path if base is not None else handle.node.attached_path
        if starts_empty:
            base = None
        stale = base is not None and not self._is_current(base.renamed(path))
        writer = self._storage.writer(path, None if stale else base)
        if stale:
            # The generation to append to was replaced or removed.
            writer.fail(os_error(errno.ESTALE, path))
        if handle.is_nameless:
            writer.detach()
        with self._lock:
            if handle.writer is None:
                handle.writer = writer
            return handle.writer

    def _is_current(self, view: FileView) -> bool:
        """Return whether the path of `view` still has that generation."""
        try:
            return self._tree.stored.status(view.path).identity == view.identity
        except NotFoundError:
            return False

    # ---- closing --------------------------------------------------------------------------

    def flush(self, caller: Caller, handle_id: int) -> None:
        """Publish the file when a process that wrote it closes a descriptor."""
        handle = self._nodes.handle(handle_id)
        writer = handle.writer
        if writer is None or not self._is_closed_by_writer(handle, writer, caller):
            return
        handle.killed = was_killed(caller)
        if handle.killed:
            # The kernel may reuse the lock owner of the killed process.
            handle.unpublished_owners.discard(caller.lock_owner)
            with self._lock:
                self._nodes.note(handle)
            # Killed in the middle of a save: half a checkpoint must not appear. Another process
            # that holds the descriptor too may still finish the file and close it.
            _log.warning("process %d was killed while it wrote %s", caller.pid, writer.path)
            return
        # A shell that redirects output closes its copy of the descriptor before the command writes:
        # this close must not publish an empty file.
        handle.phase = Phase.COPY_CLOSED
        if (writer.was_written and not writer.is_detached) or writer.has_failed:
            try:
                self._publish(handle, writer)
            except BaseException:
                self._drop_failed(handle.node)
                raise

    def _is_closed_by_writer(self, handle: Handle, writer: FileWriter, caller: Caller) -> bool:
        """Return whether `caller`, which closes a descriptor, is a process that writes the file.

        A child that inherited the descriptor closes its copy when it ends or executes another
        program, possibly in the middle of its parent's save.
        """
        if writer.has_failed:
            return True
        if writer.was_written:
            return caller.lock_owner in handle.unpublished_owners
        return not handle.opener or process_of(caller) in (0, handle.opener)

    def fsync(self, handle_id: int) -> None:
        """Publish the file as it is written so far."""
        handle = self._nodes.handle(handle_id)
        if handle.writer is not None and not handle.is_obsolete:
            self._publish(handle, handle.writer)

    def release(self, handle_id: int) -> None:
        """Close an open file after its last descriptor; publish the rest of its writes."""
        with self._lock:
            handle = self._nodes.handles.get(handle_id)
            if handle is None:
                return
            is_due = handle.is_due
            handle.phase = Phase.RELEASING
        writer = handle.writer
        try:
            if writer is not None and is_due:
                self._publish(handle, writer)
        # BaseException: a panic of an extension written in Rust is not an Exception.
        except BaseException as error:
            assert writer is not None
            _log.error("%s was not written: %r", writer.path, error)
        finally:
            self._drop(handle)

    def cancel(self, handle_id: int) -> None:
        """Drop an open file that no process has, because the kernel did not take the reply.

        `release` would publish the empty file of an open with O_TRUNC.
        """
        with self._lock:
            handle = self._nodes.handles.get(handle_id)
        if handle is not None:
            self._drop(handle)

    def _drop(self, handle: Handle) -> None:
        node = handle.node
        with self._lock:
            self._nodes.close(handle)
            if node.is_local and not node.is_unpublished:
                self._detach_unpublished(node)
            file, handle.file = handle.file, None
        if file is not None:
            self._reader.close(file)
        if handle.writer is not None:
            handle.writer.close()

    def _detach_unpublished(self, node: Node) -> None:
        """Detach the node of a file that was never published and has no writer. The lock is held.

        If the name has another writer, lookups find the node of that writer from now on.
        """
        parent, name = node.parent, node.name
        self._nodes.detach(node)
        for other in parent.writer_nodes.get(name, ()) if parent is not None else ():
            if other.writer() is not None and not other.status.identity:
                self._nodes.make_local(other)
                return

    def _drop_failed(self, node: Node) -> None:
        """Detach the node of a failed file that only this mount knows; its writer was told."""
        with self._lock:
            writers = [handle.writer for handle in node.handles if handle.writer is not None]
            if node.is_local and all(writer.has_failed for writer in writers):
                self._detach_unpublished(node)

    def _finish_emptied(self, node: Node, flags: int) -> None:
        """Publish the empty file of closed, emptied handles, or supersede them, before a new open.

        The kernel sends RELEASE after close(2) has returned, so `: > log; echo >> log` may open the
        file before the RELEASE of its first handle arrives. Readers only wait for that RELEASE.
        """
        with self._lock:
            handles = [h for other in self._nodes.same_file(node) for h in other.handles]
            emptied = [handle for handle in handles if handle.will_truncate]
            closed = [handle for handle in emptied if handle.phase is not Phase.OPEN]
            releasing = [handle for handle in handles if handle.phase is Phase.RELEASING]
            if flags & os.O_TRUNC:
                self._supersede(emptied)
                # These are being published already.
                closed = [handle for handle in emptied if handle.phase is Phase.RELEASING]
        if flags & os.O_ACCMODE == os.O_RDONLY:
            self.await_release(handles)
            return
        for handle in closed:
            assert handle.writer is not None
            self._publish(handle, handle.writer)
        for handle in releasing:
            # Wait for its publication, which must not come after a later one.
            with handle.publishing:
                pass

    def _supersede_emptied(self, handle: Handle) -> None:
        """Keep handles that only emptied the file from replacing the bytes written by `handle`.

        The kernel may report the last close of such a handle after that of `handle`.
        """
        with self._lock:
            others = [h for node in self._nodes.same_file(handle.node) for h in node.handles]
            # A handle without O_TRUNC created the file; it does not ask for an empty one.
            late = [
                other
                for other in others
                if other.will_truncate
                and (other.phase is not Phase.OPEN or not other.flags & os.O_TRUNC)
            ]
            self._supersede(late)
        for other in late:
            # Wait for a publication that has begun, which does not wait for `handle`.
            with other.publishing:
                pass

    def _supersede(self, handles: Iterable[Handle]) -> None:
        """Note that a later call opened or truncated the file of `handles`; the lock is held."""
        for handle in handles:
            handle.superseded = True
            self._nodes.note(handle)

    def await_release(self, handles: Iterable[Handle]) -> None:
        """Wait for the release of handles that emptied their file and were closed.

        If RELEASE does not come in time, a command that has not written yet probably has a copy of
        the descriptor. Then the old content is shown, and no call waits for the handle again.
        """
        closed = [
            handle
            for handle in handles
            if handle.phase in (Phase.COPY_CLOSED, Phase.RELEASING) and handle.will_truncate
        ]
        if not closed or not self._waiting.acquire(blocking=False):
            return
        try:
            deadline_s = time.monotonic() + _LAST_CLOSE_S
            while any(handle.id in self._nodes.handles for handle in closed):
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(_POLL_S)
            for handle in closed:
                if handle.phase is Phase.COPY_CLOSED:
                    handle.phase = Phase.KEPT_OPEN
        finally:
            self._waiting.release()

    # ---- publishing -----------------------------------------------------------------------

    def _publish(self, handle: Handle, writer: FileWriter) -> None:
        with handle.publishing:
            is_due = writer.needs_publishing or writer.was_written or writer.has_failed
            if not is_due or handle.is_obsolete:
                return
            if writer.was_written and writer.starts_anew:
                self._supersede_emptied(handle)
            # Before the publication, so that a process that writes during it is in the set.
            handle.unpublished_owners.clear()
            try:
                writer.publish()
            finally:
                self._note_unfinished(handle)
            if writer.view is not None:
                self.show_published(handle.node, writer.view)

    def show_published(self, node: Node, view: FileView) -> None:
        """Make lookups and readers find a generation that the writer of `node` has published."""
        with self._lock:
            for handle in node.handles:
                is_its_own = handle.writer is not None and handle.writer.view is view
                if handle.is_readable and (is_its_own or not handle.is_writable):
                    self._reopen(handle, view)
            self._listings.drop(view.path)
            is_first = not node.status.identity
            node.status = status_of(view)
            directory = node.parent if not node.is_detached else None
            if directory is not None:
                # The size of this node follows the writer, so readers get another node.
                self._nodes.make_writer_node(node)
                self._show_to_lookups(node, directory, view, is_first=is_first)
                if not node.handles:
                    self._nodes.detach(node)
            self._nodes.note_published(node, view.path)
        if directory is not None:
            self._on_published(directory)

    def _show_to_lookups(
        self, node: Node, directory: Node, view: FileView, *, is_first: bool
    ) -> None:
        """Make lookups find a generation that has just been published; the lock is held."""
        found = directory.children.get(node.name)
        if found is not None and found.is_local:
            self._nodes.make_writer_node(found)
            found = None
        if found is not None and found.status.identity != view.identity:
            if found.had_readers:
                # The kernel may have pages of the previous generation.
                self._nodes.detach(found)
                found, is_first = None, False
            else:
                found.status = node.status
                self._nodes.note_node(found)
        if found is None:
            found = self._nodes.add(directory, node.name, node.status)
            if is_first:
                # A file keeps the inode number with which it was created, because SQLite and
                # `tail -F` take another number for another file.
                found.inode = node.shown_inode
                self._nodes.note_node(found)
        node.inode = found.shown_inode

    def _reopen(self, handle: Handle, view: FileView) -> None:
        """Reopen a handle's reader on `view`; the lock is held."""
        old, handle.file = handle.file, self._reader.open(view)
        if old is not None:
            self._reader.close(old)

    def _note_unfinished(self, handle: Handle) -> None:
        noted = handle.noted
        if noted is None or noted.is_unfinished != handle.is_unfinished:
            with self._lock:
                self._nodes.note(handle)

    # ---- names that go away under open files ----------------------------------------------

    def writerless_at(self, path: str) -> list[Handle]:
        """Return the handles that may append to the file at `path` and have no writer yet.

        The lock is held.
        """
        return [
            handle
            for handle in self._nodes.handles.values()
            if handle.base is not None
            and handle.writer is None
            and path == (handle.base.path if handle.node.is_detached else handle.node.path)
        ]

    def writers_of(self, path: str) -> list[FileWriter]:
        """Return all writers of the file at `path`, which is about to be removed or replaced.

        Handles that may append to the file get a writer first: it reads the end of the file now.
        """
        with self._lock:
            waiting = self.writerless_at(path)
        for handle in waiting:
            assert handle.base is not None
            if not self._is_current(handle.base.renamed(path)):
                # The file of the handle is gone already, which its first write reports.
                continue
            # If the file cannot be appended to, the handle's first write reports that.
            with contextlib.suppress(BootseerError, OSError):
                self._writer(handle)
            with self._lock:
                self._nodes.note(handle)
        with self._lock:
            return [writer for writer in self._nodes.writers() if writer.path == path]

    def note_nameless(self, handles: Iterable[Handle]) -> None:
        """Note that this mount removed or replaced the file of handles that have no writer yet.

        The lock is held.
        """
        for handle in handles:
            if handle.writer is None:
                handle.is_nameless = True
                self._nodes.note(handle)

    def due(self) -> list[Handle]:
        """Return the handles whose writers are to be published."""
        with self._lock:
            return [handle for handle in self._nodes.handles.values() if handle.is_due]

    def publish_moved(self, handle: Handle) -> None:
        """Publish a file that was renamed while it was written.

        An error does not undo the rename; it is raised from later calls of the writer.
        """
        writer = handle.writer
        assert writer is not None
        try:
            if handle.is_due:
                self._publish(handle, writer)
            elif not writer.needs_publishing and writer.view is not None:
                self.show_published(handle.node, writer.view)
        except (BootseerError, OSError) as error:
            _log.error("%s was renamed, but its written bytes are lost: %s", writer.path, error)

    # ---- the end of the mount -------------------------------------------------------------

    def close_emptied(self) -> None:
        """Publish files that were emptied and closed, and whose release never came."""
        with self._lock:
            handles = list(self._nodes.handles.values())
        for handle in handles:
            # Written bytes were published, or given up, at the close itself.
            if handle.has_only_truncated and handle.phase is not Phase.OPEN:
                writer = handle.writer
                self.release(handle.id)
                if writer is not None and writer.has_failed:
                    self.unwritten.append(writer.path)

    def note_unwritten(self) -> list[Handle]:
        """Note the files whose written bytes the end of the mount loses; return all handles."""
        with self._lock:
            handles = list(self._nodes.handles.values())
        for handle in handles:
            # The release of a file whose process was killed may be missing, because the kernel
            # drops what the server has not read at the unmount; but the kill has ended the file.
            if handle.is_due:
                assert handle.writer is not None
                self.unwritten.append(handle.writer.path)
                _log.error("%s was still being written: nothing of it is kept", handle.writer.path)
        return handles

    def close_all(self, handles: Iterable[Handle]) -> None:
        """Close handles. Files that their writers did not finish do not appear."""
        for handle in handles:
            if handle.writer is not None:
                handle.writer.close(_ABORT_WAIT_S)
            if handle.file is not None:
                self._reader.close(handle.file)


def open_reply(handle: Handle, *, is_cached: bool = False) -> Opened:
    """Return the answer to open. `is_cached`: whether the kernel reads through its page cache.

    All readers of a node read one generation, so pages of earlier opens stay valid.
    """
    descriptor = handle.descriptor
    return Opened(
        handle=handle.id,
        direct_io=not is_cached,
        keep_cache=handle.file is not None,
        passthrough_fd=descriptor.fileno() if descriptor is not None else None,
    )


# ---- the process behind a request, from /proc -------------------------------------------------
# A process in an invisible pid namespace (pid 0) counts as alive.


def is_dying(caller: Caller) -> bool:
    """Return whether the process behind an interrupted request has been killed.

    The kernel sends INTERRUPT for any signal. Only a fatal signal (SIGKILL, to which the kernel
    converts other fatal ones) may end a read or write early, because programs do not expect EINTR
    from a file.
    """
    if not caller.is_interrupted or not caller.pid:
        return False
    pending = (status_line(caller.pid, name) or "0" for name in ("SigPnd", "ShdPnd"))
    return any(int(signals, 16) & _SIGKILL_BIT for signals in pending)


def process_of(caller: Caller) -> int:
    """Return the id of the process behind a request, which names a thread; 0 if it is unknown."""
    return int(status_line(caller.pid, "Tgid") or "0") if caller.pid else 0


def was_killed(caller: Caller) -> bool:
    """Return whether a signal has ended the process whose descriptor is being closed.

    The kernel closes the files of a dying process like the process itself would; but by then the
    task is marked as exiting, and its exit code holds the signal.

    A process that executes another program closes descriptors during execve(2), and its `stat`
    cannot be read before the close is answered. So a process whose `stat` cannot be read in time
    was not killed.
    """
    if not caller.pid:
        return False
    answers: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(
        target=lambda: answers.put(stat_fields(caller.pid)), name="stat", daemon=True
    ).start()
    try:
        fields = answers.get(timeout=_STAT_S)
    except queue.Empty:
        return False
    if len(fields) <= _EXIT_CODE_FIELD:
        return False
    return bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING and int(fields[_EXIT_CODE_FIELD]) & 0x7F)
