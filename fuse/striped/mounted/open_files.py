"""Open files of a mount: opening, reading and writing them, and when they are published.

Decides which reader or writer serves an open file. What was written is published at `fsync` and
`close`, never after the writing process was killed; docs/SEMANTICS.md says what users may rely on.
Thread-safe: the table's lock guards nodes and handles only, never I/O.
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
from bootseer.fuse.striped.names.stored import FileStatus, refuse, status_of
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.file_writer import FileWriter
from bootseer.linux.processes import stat_fields, status_line

_log = logging.getLogger(__name__)

# How long a lookup or an open for reading waits to hear that a file which was emptied and closed is
# closed for good: the kernel says so in a moment, if no other process has the descriptor.
_LAST_CLOSE_S = 2.0
_POLL_S = 0.005
# Of the threads that serve a mount: others must be left to serve the release that is waited for.
_WAITING_MAX = 3
# At the end of a mount: how long to wait for the parts of an unfinished file to be removed.
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
        passes_files: bool,
        caches_reads: bool,
    ) -> None:
        """Make the operations on the open files in `nodes`.

        `on_published` is called, without the lock, with the directory of a published file.
        `passes_files`: see `MountedTree`. `caches_reads`: whether the kernel reads files through
        its page cache.
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
        self._passes_files = passes_files
        self._caches_reads = caches_reads
        self._waiting = threading.BoundedSemaphore(_WAITING_MAX)

    # ---- going on from a predecessor ------------------------------------------------------

    def resume(self, inherited: Inherited) -> None:
        """Reopen the files of a predecessor's journal, after its nodes.

        Readers read on; a writer that had nothing unwritten writes on; one that had fails, since
        what it wrote was in the other process's memory.
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
                # It was read back through its writer.
                view = handle.base
            if view is not None:
                handle.file = self._reader.open(view)
                if record.is_pinned:
                    handle.file.pinned = inherited.pinned[os.fsencode(view.identity)]
            self._nodes.add_handle(handle)
            self._resume_writer(handle, record)
        _log.info(
            "went on with %d names and %d open files", len(inherited.nodes), len(inherited.files)
        )

    def _resume_writer(self, handle: Handle, record: FileRecord) -> None:
        """Give the handle a writer where it had one that cannot begin anew from its base."""
        if record.writer_path is None:
            return
        path = os.fsdecode(record.writer_path)
        if record.is_unfinished:
            writer = handle.writer = self._storage.writer(path)
            writer.fail(
                UnavailableError(
                    f"{path} was being written when the mount's server was restarted: what had "
                    "not reached a commit is lost; write the file again"
                )
            )
            if record.is_nameless:
                writer.detach()
            _log.error("%s was being written: its writer gets an error", path)
        elif record.is_nameless:
            writer = handle.writer = self._storage.writer(path)
            writer.fail(refuse(errno.ESTALE))
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
        # Another node removed the file that these have emptied.
        emptied = [h for other in directory.writing.get(name, ()) for h in other.handles]
        self._supersede(handle for handle in emptied if handle.will_truncate)
        # It may refuse: before anything is in the tables.
        writer = self._storage.writer(path)
        status = FileStatus(path, False, 0, time.time_ns(), "")
        node = self._nodes.add(directory, name, status, NodeKind.LOCAL)
        handle = self._nodes.open(node, flags, caller.request, opener)
        handle.writer = writer
        self._nodes.note(handle)
        return handle

    def open(self, caller: Caller, node_id: int, flags: int) -> Opened:
        """Open the file of a node. ESTALE sends the kernel to look the name up again."""
        with self._lock:
            node = self._nodes.node(node_id)
        self._settle_emptied(node, flags)
        with self._lock:
            again = self.opened_before(caller)
            if again is not None:
                return opened_as(again)
            is_reader = flags & os.O_ACCMODE == os.O_RDONLY
            if not is_reader:
                if node.is_detached or not node.is_wanted:
                    self._own_node(caller, node)
                self._nodes.note_opened(node)
            elif node.is_writing and self._nodes.expect_lookup(
                node, caller.pid, self._clock(), only_reads=True
            ):
                # It has been published since it was looked up.
                raise refuse(errno.ESTALE, node.path)
            elif not node.is_writing:
                # Else the next lookup of a file that it could not write finds a writer's node.
                self._nodes.end_pending_lookups(caller.pid)
            path = node.attached_path
            if is_reader and self._passes_files and node.was_passed and flags & os.O_DIRECT:
                self._renew(node)
                raise refuse(errno.ESTALE, path)
            if node.is_local and not node.is_unpublished:
                # Its writer has just been killed, or has failed.
                raise refuse(errno.ESTALE, path)
            if is_reader and (node.is_local or node.writer() is not None):
                handle = self._nodes.open(node, flags, caller.request)
                self._nodes.note(handle)
                return opened_as(handle)
        if is_reader:
            return self._open_to_read(caller, node, path, flags)
        return self._open_to_write(caller, node, path, flags)

    def _open_to_read(self, caller: Caller, node: Node, path: str, flags: int) -> Opened:
        try:
            file, view = self._tree.open(path)
        except NotFoundError:
            # Removed elsewhere: the kernel shall look the name up again.
            with self._lock:
                self._nodes.detach(node)
                self._listings.drop(path)
            raise refuse(errno.ESTALE, path) from None
        with self._lock:
            if not self._may_read(node, view):
                self._reader.close(file)
                raise refuse(errno.ESTALE, path)
            handle = self._nodes.open(node, flags, caller.request)
            handle.file = file
            node.had_readers = True
            may_be_passed = self._may_pass(node, flags)
        # Outside of the lock: it opens the stored file.
        descriptor = self._reader.descriptor(file) if may_be_passed else None
        with self._lock:
            # Somebody may have begun to write meanwhile.
            if descriptor is not None and self._may_pass(node, flags):
                handle.descriptor = descriptor
                node.was_passed = True
            self._nodes.note(handle)
            # The own node of a writer may grow.
            is_cached = self._caches_reads and not node.is_writing and not flags & os.O_DIRECT
            return opened_as(handle, is_cached=is_cached)

    def _may_read(self, node: Node, view: FileView) -> bool:
        """Return whether an open of a node may read `view`, its current file. The lock is held."""
        if view.identity == node.status.identity:
            return True
        # Of a file that is written here the kernel keeps no attributes.
        is_shown_anew = node.is_written and not node.is_writing
        if node.had_readers or node.is_detached or not is_shown_anew:
            if not node.is_writing:
                self._nodes.detach(node)
            # The kernel looks the name up only once more.
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
                # It is not stored yet, and somebody else writes it, too.
                if node.status.identity:
                    raise
        opener = process_of(caller)
        writer = self._storage.writer(path) if base is None else None
        with self._lock:
            handle = self._nodes.open(node, flags, caller.request, opener)
            if base is None:
                handle.writer = writer
                # Without O_TRUNC it has emptied nothing: who created the file writes it.
                handle.superseded = not flags & os.O_TRUNC
            elif node.writer() is None:
                node.status = status_of(base)
            handle.base, handle.file = base, file
            self._nodes.note(handle)
            return opened_as(handle)

    def _own_node(self, caller: Caller, node: Node) -> None:
        """Make `node` the own node of a writer, or send the kernel to find one. The lock is held.

        The first only if the kernel came back without a lookup.
        Raises: OSError (ESTALE), upon which the kernel looks the name up again.
        """
        if caller.pid:
            must_look_up = self._nodes.expect_lookup(node, caller.pid, self._clock())
            is_read = node.handles and not node.is_local and not node.is_writing
            # The size and pages of a node that is read are those of what is read.
            is_refused = must_look_up or is_read or node.is_detached
        else:
            # Threads in a pid namespace that cannot be seen from here cannot be told apart when
            # they come back: each takes the node that it found, or the next one where somebody
            # else has that open.
            is_refused = not node.is_local and (
                node.is_detached or bool(node.handles) or node.was_passed
            )
            if is_refused and not node.is_writing:
                self._nodes.detach(node)
        if is_refused:
            raise refuse(errno.ESTALE, node.path)
        if not node.is_local and not node.is_writing:
            self._nodes.make_writing(node)

    def _may_pass(self, node: Node, flags: int) -> bool:
        """Return whether the kernel may read the stored file itself; the lock is held.

        False if the file is open for writing, because writes must come to this server, and for
        O_DIRECT, whose alignment the stored file may not allow.
        """
        return (
            self._passes_files
            and node.may_be_passed
            and not node.is_writing
            and not flags & os.O_DIRECT
            and not any(handle.is_writable for handle in node.handles)
        )

    def _renew(self, node: Node) -> None:
        """Make another node for the name, which the kernel never reads past this process.

        The kernel opens a node in one way only, and finds the new node when it looks the name up
        again. Call with the lock held.
        """
        assert node.parent is not None
        renewed = self._nodes.add(node.parent, node.name, node.status)
        renewed.may_be_passed = False

    # ---- reading and writing --------------------------------------------------------------

    def read(
        self, caller: Caller, handle_id: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        """Return up to `length` bytes from `offset`."""
        handle = self._nodes.handle(handle_id)
        writer = handle.writer
        if writer is None and not handle.is_writable:
            # Opened for reading before its writer has published anything.
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
        """Read a file through the descriptor that writes it: published bytes and unsent ones."""
        ending = writer.read(offset, length)
        if ending is not None:
            return ending
        view, sent = writer.view, writer.sent_bytes
        if view is None or writer.unchanged_bytes < min(offset + length, sent):
            raise UnsupportedError(
                f"{writer.path}: what was written can be read back after fsync or close"
            )
        # Open already, since a generation that is open outlives its name; not where a file is read
        # through the descriptor of another process.
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
            raise refuse(errno.EBADF)
        writer = self._writer(handle)
        handle.killed, handle.phase = False, Phase.OPEN
        with self._changing(caller, handle):
            if handle.flags & os.O_APPEND:
                return writer.append(data, lambda: is_dying(caller))
            return writer.write(offset, data, lambda: is_dying(caller))

    @contextlib.contextmanager
    def _changing(self, caller: Caller, handle: Handle) -> Iterator[None]:
        try:
            yield
            # Not who was refused: a child's exit must not publish its parent's half.
            handle.unpublished_owners.add(caller.lock_owner)
        finally:
            # Only now: if this process dies before, the kernel asks the next one to do this.
            self._note_unfinished(handle)

    def truncate(
        self, caller: Caller, node_id: int, handle_id: int | None, size_bytes: int
    ) -> None:
        """Cut or grow a file, through an open file or by its name."""
        with self._lock:
            node = self._nodes.node(node_id)
        if handle_id is None:
            self._settle_emptied(node, os.O_WRONLY)
        with self._lock:
            if node.status.is_dir:
                raise refuse(errno.EISDIR)
            handle = self._nodes.handles.get(handle_id) if handle_id is not None else None
            if handle is None or not handle.is_writable:
                # truncate(2) of a file that is not stored yet acts on what is written of it.
                at_work = (h for h in node.handles if h.writer and h.phase is Phase.OPEN)
                handle = next(at_work, None)
                if handle is None or not (node.is_local or node.is_detached):
                    if not node.is_wanted:
                        # The kernel cuts the pages of the node that it names.
                        self._own_node(caller, node)
                    self._nodes.note_opened(node)
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
            # The close of what emptied it may not have been heard of yet.
            for other in self._nodes.same_file(node):
                self._supersede(other.handles)
        self.published(node, writer.view)

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
            # What it would be added to was replaced, or removed.
            writer.fail(refuse(errno.ESTALE, path))
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
        """Publish at the close of a descriptor, if a process closes it that wrote the file."""
        handle = self._nodes.handle(handle_id)
        writer = handle.writer
        if writer is None or not self._speaks_for(handle, writer, caller):
            return
        handle.killed = was_killed(caller)
        if handle.killed:
            # The kernel may give the number of its table of open files to another process.
            handle.unpublished_owners.discard(caller.lock_owner)
            with self._lock:
                self._nodes.note(handle)
            # Killed in the middle of a save: half a checkpoint must not appear. Another process
            # that holds the descriptor too may still finish the file and close it.
            _log.warning("process %d was killed while it wrote %s", caller.pid, writer.path)
            return
        # A shell that redirects output closes its copy of the descriptor before anything was
        # written: that must not replace the file by an empty one.
        handle.phase = Phase.COPY_CLOSED
        if (writer.was_written and not writer.is_detached) or writer.has_failed:
            try:
                self._publish(handle, writer)
            except BaseException:
                self._drop_failed(handle.node)
                raise

    def _speaks_for(self, handle: Handle, writer: FileWriter, caller: Caller) -> bool:
        """Return whether the process that closes a descriptor is one that the file is written by.

        A child that inherited the descriptor closes it too, at its end or when it executes another
        program. It does so in the middle of its parent's save.
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
        # BaseException: extensions written in Rust panic with one that is no Exception.
        except BaseException as error:
            assert writer is not None
            _log.error("%s was not written: %r", writer.path, error)
        finally:
            self._forget(handle)

    def cancel(self, handle_id: int) -> None:
        """Forget an open file that no process has: its open was not answered.

        With O_TRUNC, `release` would empty a file that nobody has opened.
        """
        with self._lock:
            handle = self._nodes.handles.get(handle_id)
        if handle is not None:
            self._forget(handle)

    def _forget(self, handle: Handle) -> None:
        node = handle.node
        with self._lock:
            self._nodes.close(handle)
            if node.is_local and not node.is_unpublished:
                self._leave_name(node)
            file, handle.file = handle.file, None
        if file is not None:
            self._reader.close(file)
        if handle.writer is not None:
            handle.writer.close()

    def _leave_name(self, node: Node) -> None:
        """Detach the node of a file that was never published and has no writer. The lock is held.

        The node of another writer of that name takes its place.
        """
        parent, name = node.parent, node.name
        self._nodes.detach(node)
        for other in parent.writing.get(name, ()) if parent is not None else ():
            if other.writer() is not None and not other.status.identity:
                self._nodes.make_local(other)
                return

    def _drop_failed(self, node: Node) -> None:
        """Detach the node of a failed file that only this mount knows; its writer was told."""
        with self._lock:
            writers = [handle.writer for handle in node.handles if handle.writer is not None]
            if node.is_local and all(writer.has_failed for writer in writers):
                self._leave_name(node)

    def _settle_emptied(self, node: Node, flags: int) -> None:
        """Complete an O_TRUNC whose file was closed before this open of it.

        The kernel says after close(2) that the last descriptor is gone; `: > log; echo >> log` may
        open the file before we have heard of it.
        """
        with self._lock:
            handles = [h for other in self._nodes.same_file(node) for h in other.handles]
            emptied = [handle for handle in handles if handle.will_truncate]
            closed = [handle for handle in emptied if handle.phase is not Phase.OPEN]
            releasing = [handle for handle in handles if handle.phase is Phase.RELEASING]
            if flags & os.O_TRUNC:
                self._supersede(emptied)
                # Too late for that: they are at it.
                closed = [handle for handle in emptied if handle.phase is Phase.RELEASING]
        if flags & os.O_ACCMODE == os.O_RDONLY:
            self.await_release(handles)
            return
        for handle in closed:
            assert handle.writer is not None
            self._publish(handle, handle.writer)
        for handle in releasing:
            # Shown now, so that it does not hide what is published after it.
            with handle.publishing:
                pass

    def _outrun(self, handle: Handle) -> None:
        """Keep handles that only emptied the file from replacing what `handle` has written.

        The kernel may report the last close of such a handle after that of `handle`.
        """
        with self._lock:
            others = [h for node in self._nodes.same_file(handle.node) for h in node.handles]
            # Who made the file without O_TRUNC, after another node had removed it, empties nothing.
            late = [
                other
                for other in others
                if other.will_truncate
                and (other.phase is not Phase.OPEN or not other.flags & os.O_TRUNC)
            ]
            self._supersede(late)
        for other in late:
            # Wait for a publication that has begun. It cannot wait for this handle.
            with other.publishing:
                pass

    def _supersede(self, handles: Iterable[Handle]) -> None:
        """Note that a later call opened or truncated the file of `handles`; the lock is held."""
        for handle in handles:
            handle.superseded = True
            self._nodes.note(handle)

    def await_release(self, handles: Iterable[Handle]) -> None:
        """Wait for the release of handles that emptied their file and were closed.

        A copy of the descriptor may be open still, in a command that has not written yet: then the
        old content stands, and nobody waits for it again.
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
                self._outrun(handle)
            # First: who writes meanwhile has to be known when it closes the file.
            handle.unpublished_owners.clear()
            try:
                writer.publish()
            finally:
                self._note_unfinished(handle)
            if writer.view is not None:
                self.published(handle.node, writer.view)

    def published(self, node: Node, view: FileView) -> None:
        """Show a generation that a writer has published through its node."""
        with self._lock:
            for handle in node.handles:
                is_its_own = handle.writer is not None and handle.writer.view is view
                if handle.is_readable and (is_its_own or not handle.is_writable):
                    self._hold(handle, view)
            self._listings.drop(view.path)
            is_first = not node.status.identity
            node.status = status_of(view)
            directory = node.parent if not node.is_detached else None
            if directory is not None:
                # Its size is that of what is written, from now on or in a moment: for readers
                # there is another one.
                self._nodes.make_writing(node)
                self._show(node, directory, view, is_first=is_first)
                if not node.handles:
                    self._nodes.detach(node)
            self._nodes.note_published(node, view.path)
        if directory is not None:
            self._on_published(directory)

    def _show(self, node: Node, directory: Node, view: FileView, *, is_first: bool) -> None:
        """Make lookups find a generation that has just been published; the lock is held."""
        found = directory.children.get(node.name)
        if found is not None and found.is_local:
            self._nodes.make_writing(found)
            found = None
        if found is not None and found.status.identity != view.identity:
            if found.had_readers:
                # The kernel may hold pages of the generation before.
                self._nodes.detach(found)
                found, is_first = None, False
            else:
                found.status = node.status
                self._nodes.note_node(found)
        if found is None:
            found = self._nodes.add(directory, node.name, node.status)
            if is_first:
                # A file keeps the number that it was created with: SQLite, and whoever follows a
                # log, takes another number for another file.
                found.inode = node.shown_inode
                self._nodes.note_node(found)
        node.inode = found.shown_inode

    def _hold(self, handle: Handle, view: FileView) -> None:
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

    def waiting_at(self, path: str) -> list[Handle]:
        """Return the handles open to write at `path` without a writer; the lock is held."""
        return [
            handle
            for handle in self._nodes.handles.values()
            if handle.base is not None
            and handle.writer is None
            and path == (handle.base.path if handle.node.is_detached else handle.node.path)
        ]

    def writers_of(self, path: str) -> list[FileWriter]:
        """Return the writers of the file at `path`, begun also for handles that may append to it.

        An appending writer has read the end of the file by then, so that the file may go.
        """
        with self._lock:
            waiting = self.waiting_at(path)
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

    def leave_nameless(self, handles: Iterable[Handle]) -> None:
        """Detach handles without a writer from a name that this mount removed or replaced.

        Call with the lock held.
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

        The rename is done: a failure is reported to the writer.
        """
        writer = handle.writer
        assert writer is not None
        try:
            if handle.is_due:
                self._publish(handle, writer)
            elif not writer.needs_publishing and writer.view is not None:
                self.published(handle.node, writer.view)
        except (BootseerError, OSError) as error:
            _log.error("%s was renamed, and what was written is lost: %s", writer.path, error)

    # ---- the end of the mount -------------------------------------------------------------

    def close_emptied(self) -> None:
        """Publish files that were emptied and closed, and whose release never came."""
        with self._lock:
            handles = list(self._nodes.handles.values())
        for handle in handles:
            # What was written is published at the close itself, or was given up then.
            if handle.has_only_truncated and handle.phase is not Phase.OPEN:
                writer = handle.writer
                self.release(handle.id)
                if writer is not None and writer.has_failed:
                    self.unwritten.append(writer.path)

    def give_up(self) -> list[Handle]:
        """Note which files are lost now that the mount ends; return the handles to close."""
        with self._lock:
            handles = list(self._nodes.handles.values())
        for handle in handles:
            writer = handle.writer
            if writer is not None and writer.needs_publishing:
                self.unwritten.append(writer.path)
                _log.error("%s was still being written: nothing of it is kept", writer.path)
        return handles

    def close_all(self, handles: Iterable[Handle]) -> None:
        """Close handles. Files that their writers did not finish do not appear."""
        for handle in handles:
            if handle.writer is not None:
                handle.writer.close(_ABORT_WAIT_S)
            if handle.file is not None:
                self._reader.close(handle.file)


def opened_as(handle: Handle, *, is_cached: bool = False) -> Opened:
    """Return the answer to open. `is_cached`: whether the kernel reads through its page cache.

    A node is one generation for its readers, so pages that the kernel keeps stay right.
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
