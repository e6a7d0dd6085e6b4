"""FUSE operations at the end of what is written: flush, fsync and release.

Owns when what was written is published: at fsync and close, never after the writing process was
killed. Thread-safe; see `tables`.
"""

import logging
import os
import time

from bootseer.errors import BootseerError
from bootseer.fuse.kernel.operations import Caller
from bootseer.fuse.striped.mounted.operations.callers import process_of, was_killed
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node
from bootseer.fuse.striped.mounted.operations.tables import MountTables
from bootseer.fuse.striped.names.stored import FileStatus
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.writer import FileWriter

_log = logging.getLogger(__name__)

# How long an open for reading waits to hear that a file was closed which was emptied before.
_LAST_CLOSE_S = 0.2


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
        opened.was_flushed = True
        if writer.was_written or writer.has_failed:
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
        if writer is not None:
            try:
                if writer.needs_publishing and not opened.was_killed and not is_late:
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

    def _drop_failed(self, node: Node) -> None:
        """Drops a failed file that only this mount knows, once its writer was told."""
        with self._lock:
            writers = [handle.writer for handle in node.handles if handle.writer is not None]
            if node.is_local and all(writer.has_failed for writer in writers):
                self._nodes.detach(node)

    def _settle_emptied(self, node: int, flags: int) -> None:
        """What was emptied, and closed, before this open is empty for it.

        The kernel says after close(2) that the last descriptor is gone; `: > log; echo >> log` may
        open the file before we have heard of it.
        """
        with self._lock:
            known = self._node(node)
            emptied = [handle for handle in known.handles if handle.only_empties]
            closed = [handle for handle in emptied if handle.was_flushed]
            if flags & os.O_TRUNC:
                for handle in emptied:
                    handle.is_superseded = True
                # Too late for that: they are at it.
                closed = [handle for handle in emptied if handle.is_releasing]
            releasing = [handle for handle in known.handles if handle.is_releasing]
        if flags & os.O_ACCMODE != os.O_RDONLY:
            for handle in closed:
                assert handle.writer is not None
                self._publish(handle, handle.writer)
            for handle in releasing:
                # Shown now, so that it does not hide what is published after it.
                with handle.publishing:
                    pass
            return
        # A copy of the descriptor may be open still, in a command that has not written yet: then
        # the old content stands.
        deadline = time.monotonic() + _LAST_CLOSE_S
        while any(handle.id in self._nodes.handles for handle in closed):
            if time.monotonic() >= deadline:
                break
            time.sleep(_LAST_CLOSE_S / 40)

    def _publish(self, handle: Handle, writer: FileWriter) -> None:
        with handle.publishing:
            if not writer.needs_publishing and not writer.has_failed:
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
        status = FileStatus(view.path, False, view.size_bytes, view.modified_ns, view.identity)
        with self._lock:
            self._published_s = self._clock()
            self._listings.drop(view.path)
            old_identity = node.status.identity
            node.status, node.seen_s, node.is_local = status, self._clock(), False
            if node.parent is not None:
                node.parent.seen_s = 0.0
            self._nodes.note_node(node)
            self._nodes.note_moved()
            if node.had_readers and not node.is_detached and old_identity != view.identity:
                # The kernel may hold pages of the generation before: the name gets a new node.
                assert node.parent is not None
                self._nodes.add(node.parent, node.name, status, self._clock())

    def _note_unfinished(self, handle: Handle) -> None:
        noted = handle.noted
        if noted is None or noted["unfinished"] != handle.is_unfinished:
            with self._lock:
                self._nodes.note(handle)
