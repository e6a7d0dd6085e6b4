"""FUSE operations at the end of what is written: flush, fsync and release.

Owns when what was written is published: at fsync and close, never after the writing process was
killed. Thread-safe; see `tables`.
"""

import logging
import os
import time
from collections.abc import Sequence

from bootseer.fuse.kernel.operations import Caller
from bootseer.fuse.striped.mounted.operations.callers import process_of, was_killed
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node
from bootseer.fuse.striped.mounted.operations.tables import MountTables
from bootseer.fuse.striped.names.stored import status_of
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.writer import FileWriter

_log = logging.getLogger(__name__)

# How long a lookup or an open for reading waits to hear that a file which was emptied and closed is
# closed for good: the kernel says so in a moment, if no other process has the descriptor.
_LAST_CLOSE_S = 2.0
_POLL_S = 0.005


class CloseOperations(MountTables):
    """The ends of what is written through one mount."""

    def flush(self, caller: Caller, node: int, handle: int) -> None:
        opened = self._handle(handle)
        writer = opened.writer
        if writer is None:
            return
        if not self._speaks_for(opened, writer, caller):
            return
        opened.was_killed = was_killed(caller)
        if opened.was_killed:
            with self._lock:
                self._nodes.note(opened)
            # Killed in the middle of a save: half a checkpoint must not appear. Another process
            # that holds the descriptor too may still finish the file and close it.
            _log.warning("process %d was killed while it wrote %s", caller.pid, writer.path)
            return
        # A shell that redirects output closes its copy of the descriptor before anything was
        # written: that must not replace the file by an empty one.
        opened.was_flushed, opened.is_kept_open = True, False
        if (writer.was_written and not writer.is_detached) or writer.has_failed:
            try:
                self._publish(opened, writer)
            except BaseException:
                self._drop_failed(opened.node)
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

    def fsync(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        opened = self._handle(handle)
        if opened.writer is not None:
            self._publish(opened, opened.writer)

    def release(self, node: int, handle: int, flags: int) -> None:
        with self._lock:
            opened = self._nodes.handles.get(handle)
            if opened is None:
                return
            is_late = opened.is_superseded and opened.only_empties
            opened.is_releasing = True
        writer = opened.writer
        try:
            is_lost = opened.was_killed or is_late
            if writer is not None and writer.needs_publishing and not is_lost:
                self._publish(opened, writer)
        # BaseException: extensions written in Rust panic with one that is no Exception.
        except BaseException as error:
            assert writer is not None
            _log.error("%s was not written: %r", writer.path, error)
        finally:
            self._forget_open(opened)

    def cancel_open(self, node: int, handle: int, flags: int) -> None:
        with self._lock:
            opened = self._nodes.handles.get(handle)
        if opened is not None:
            # With O_TRUNC, release would empty a file that no process has opened.
            self._forget_open(opened)

    def _forget_open(self, handle: Handle) -> None:
        """Forget an open file."""
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
        """The file of a node was never published, and will not be through it; another one who
        writes it may do so. The lock is held."""
        parent, name = node.parent, node.name
        self._nodes.detach(node)
        if parent is None:
            return
        for other in self._nodes.writing(parent, name):
            if other.writer() is not None and not other.status.identity:
                self._nodes.make_found(other)
                return

    def _drop_failed(self, node: Node) -> None:
        """Drops a failed file that only this mount knows, once its writer was told."""
        with self._lock:
            writers = [handle.writer for handle in node.handles if handle.writer is not None]
            if node.is_local and all(writer.has_failed for writer in writers):
                self._leave_name(node)

    def _settle_emptied(self, node: int, flags: int) -> None:
        """What was emptied, and closed, before this open is empty for it.

        The kernel says after close(2) that the last descriptor is gone; `: > log; echo >> log` may
        open the file before we have heard of it.
        """
        with self._lock:
            known = self._node(node)
            handles = [h for other in self._nodes.same_file(known) for h in other.handles]
            emptied = [handle for handle in handles if handle.only_empties]
            closed = [handle for handle in emptied if handle.was_flushed]
            if flags & os.O_TRUNC:
                for handle in emptied:
                    handle.is_superseded = True
                # Too late for that: they are at it.
                closed = [handle for handle in emptied if handle.is_releasing]
            releasing = [handle for handle in handles if handle.is_releasing]
        if flags & os.O_ACCMODE != os.O_RDONLY:
            for handle in closed:
                assert handle.writer is not None
                self._publish(handle, handle.writer)
            for handle in releasing:
                # Shown now, so that it does not hide what is published after it.
                with handle.publishing:
                    pass
            return
        self._await_release(handles)

    def _await_release(self, handles: Sequence[Handle]) -> None:
        """Wait for the end of those of `handles` that emptied their file and were closed.

        A copy of the descriptor may be open still, in a command that has not written yet: then the
        old content stands, and nobody waits for it again.
        """
        closed = [h for h in handles if h.only_empties and h.was_flushed and not h.is_kept_open]
        if not closed or not self._waiting.acquire(blocking=False):
            return
        try:
            deadline_s = time.monotonic() + _LAST_CLOSE_S
            while any(handle.id in self._nodes.handles for handle in closed):
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(_POLL_S)
            for handle in closed:
                handle.is_kept_open = True
        finally:
            self._waiting.release()

    def _publish(self, handle: Handle, writer: FileWriter) -> None:
        with handle.publishing:
            is_due = writer.needs_publishing or writer.was_written or writer.has_failed
            if not is_due:
                return
            # First: who writes meanwhile has to be known when it closes the file.
            handle.unpublished_owners.clear()
            try:
                writer.publish()
            finally:
                self._note_unfinished(handle)
            if writer.view is not None:
                self.published(handle.node, writer.view)

    def published(self, node: Node, view: FileView) -> None:
        """A writer has published `view` through its node: lookups find that from now on."""
        with self._lock:
            for handle in node.handles:
                if handle.is_writable:
                    reads = handle.writer is not None and handle.writer.view is view
                else:
                    reads = True
                if reads and handle.is_readable:
                    self._hold(handle, view)
            self._listings.drop(view.path)
            is_first = not node.status.identity
            node.status = status_of(view)
            if node.is_detached or node.parent is None:
                self._nodes.note_moved()
                return
            # Its size is that of what is written, from now on or in a moment: for readers there is
            # another one.
            self._nodes.make_writing(node)
            directory = node.parent
            found = self._nodes.child(node.parent, node.name)
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
                found = self._nodes.add(node.parent, node.name, node.status)
                if is_first:
                    # A file keeps the number that it was created with: SQLite, and whoever follows
                    # a log, takes another number for another file.
                    found.inode = node.inode or node.id
                    self._nodes.note_node(found)
            node.inode = found.inode or found.id
            if not node.handles:
                self._nodes.detach(node)
            self._nodes.note_moved()
        self._forget_attributes(directory)

    def _hold(self, handle: Handle, view: FileView) -> None:
        """Let a handle read `view`: what is open outlives its name. The lock is held."""
        old, handle.file = handle.file, self._reader.open(view)
        if old is not None:
            self._reader.close(old)

    def _note_unfinished(self, handle: Handle) -> None:
        noted = handle.noted
        if noted is None or noted.is_unfinished != handle.is_unfinished:
            with self._lock:
                self._nodes.note(handle)
