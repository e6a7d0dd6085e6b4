"""FUSE operations on open files: from open to release, and truncation.

Owns which writer or reader serves a handle, and when what was written is published: at fsync and
close, never after the writing process was killed. Thread-safe; see `tables`.
"""

import errno
import logging
import os
import time
from collections.abc import Sequence

from bootseer.errors import BootseerError, UnsupportedError
from bootseer.fuse.kernel.operations import Buffer, Caller, Entry, Opened
from bootseer.fuse.striped.mounted.callers import is_dying, was_killed
from bootseer.fuse.striped.mounted.nodes import Handle, Node
from bootseer.fuse.striped.mounted.presentation import opened_of
from bootseer.fuse.striped.mounted.tables import MountTables
from bootseer.fuse.striped.names.stored import FileStatus, refuse
from bootseer.fuse.striped.writing.writer import FileWriter

_log = logging.getLogger(__name__)

# How long an open for reading waits to hear that a file was closed which was emptied before.
_LAST_CLOSE_S = 0.2


class FileOperations(MountTables):
    """Open files of one mount."""

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> tuple[Entry, Opened]:
        directory, text, path = self._new_name(parent, name)
        with self._lock:
            again = self._opened_before(caller)
            if again is not None:
                return self._entry(again.node), opened_of(again)
        status = self._status(path)
        with self._lock:
            known = self._nodes.child(directory, text)
            if status is not None or (known is not None and known.is_local):
                if flags & os.O_EXCL:
                    raise refuse(errno.EEXIST, path)
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
            self._nodes.note_node(node)
            handle = self._nodes.open(node, flags, caller.request)
            handle.writer = FileWriter(self._tree, path, self._budget, self._settings)
            self._nodes.note(handle)
            return self._entry(node), opened_of(handle)

    def _opened_before(self, caller: Caller) -> Handle | None:
        """What a predecessor opened for this very request, whose answer it could not give."""
        if not caller.is_resent:
            return None
        handles = self._nodes.handles.values()
        return next((handle for handle in handles if handle.request == caller.request), None)

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        self._settle_emptied(node, flags)
        with self._lock:
            known = self._node(node)
            again = self._opened_before(caller)
            if again is not None:
                return opened_of(again)
            path = self._attached_path(known)
            writes = flags & os.O_ACCMODE != os.O_RDONLY
            if self._passes_files and known.was_passed and (writes or flags & os.O_DIRECT):
                self._renew(known)
                raise refuse(errno.ESTALE, path)
            if writes and flags & os.O_TRUNC:
                if known.had_readers and known.handles:
                    # The kernel would cut the pages of those who read the old generation: let it
                    # look the name up again and open a node of its own.
                    self._nodes.detach(known)
                    raise refuse(errno.ESTALE, path)
                handle = self._nodes.open(known, flags, caller.request)
                handle.writer = FileWriter(self._tree, path, self._budget, self._settings)
                self._nodes.note(handle)
                return opened_of(handle)
            if known.is_local:
                handle = self._nodes.open(known, flags, caller.request)
                if writes:
                    handle.writer = FileWriter(self._tree, path, self._budget, self._settings)
                self._nodes.note(handle)
                return opened_of(handle)
            is_written_here = known.writer() is not None
        view = self._tree.stored.view(path)
        if view.identity != known.status.identity and not is_written_here:
            with self._lock:
                self._nodes.detach(known)
            raise refuse(errno.ESTALE, path)
        with self._lock:
            handle = self._nodes.open(known, flags, caller.request)
            if writes:
                handle.base = view
            if flags & os.O_ACCMODE != os.O_WRONLY:
                handle.file = self._reader.open(view)
                known.had_readers = True
            if writes or not self._may_pass(known, flags):
                self._nodes.note(handle)
                return opened_of(handle)
            file = handle.file
        # Outside of the lock: it opens the stored file.
        descriptor = self._reader.descriptor(file) if file is not None else None
        with self._lock:
            # Somebody may have begun to write meanwhile.
            if descriptor is not None and self._may_pass(known, flags):
                handle.descriptor = descriptor
                known.was_passed = True
            self._nodes.note(handle)
            return opened_of(handle)

    def _may_pass(self, node: Node, flags: int) -> bool:
        """Whether the kernel may read the node's file past us; the lock is held. What is written
        through it must come to us, and O_DIRECT of any alignment works only here."""
        return (
            self._passes_files
            and node.may_be_passed
            and not flags & os.O_DIRECT
            and not any(handle.is_writable for handle in node.handles)
        )

    def _renew(self, node: Node) -> None:
        """Make another node for the name, which the kernel never reads past us: it opens a node in
        one way only, and finds the new one when it looks the name up again. The lock is held."""
        assert node.parent is not None
        renewed = self._nodes.add(node.parent, node.name, node.status, self._clock())
        renewed.may_be_passed = False

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
        self,
        caller: Caller,
        node: int,
        handle: int,
        offset: int,
        data: bytearray | memoryview,
        flags: int,
    ) -> int:
        opened = self._handle(handle)
        if not opened.is_writable:
            raise refuse(errno.EBADF)
        writer = self._writer(opened)
        opened.was_killed = opened.was_flushed = False
        try:
            if opened.flags & os.O_APPEND:
                return writer.append(data, lambda: is_dying(caller))
            return writer.write(offset, data, lambda: is_dying(caller))
        finally:
            # Only now: if this process dies before, the kernel asks the next one to write this.
            self._note_unfinished(opened)

    def _note_unfinished(self, handle: Handle) -> None:
        noted = handle.noted
        if noted is None or noted["unfinished"] != handle.is_unfinished:
            with self._lock:
                self._nodes.note(handle)

    def flush(self, caller: Caller, node: int, handle: int) -> None:
        opened = self._handle(handle)
        writer = opened.writer
        if writer is None:
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

    def _drop_failed(self, node: Node) -> None:
        """A file that nobody but us knows, and that failed, is gone when its writer is told."""
        with self._lock:
            writers = [handle.writer for handle in node.handles if handle.writer is not None]
            if node.is_local and all(writer.has_failed for writer in writers):
                self._nodes.detach(node)

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

    def _truncate(self, caller: Caller, node: int, handle_id: int | None, size_bytes: int) -> None:
        if handle_id is None:
            self._settle_emptied(node, os.O_WRONLY)
        with self._lock:
            known = self._node(node)
            if known.status.is_dir:
                raise refuse(errno.EISDIR)
            handle = self._nodes.handles.get(handle_id) if handle_id is not None else None
            if handle is None or not handle.is_writable:
                # truncate(2) of a file that is being written here acts on that writing.
                handle = next((h for h in known.handles if h.is_at_work), None)
        if handle is not None:
            writer = self._writer(handle, starts_empty=size_bytes == 0)
            try:
                writer.truncate(size_bytes)
            finally:
                self._note_unfinished(handle)
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
        with self._lock:
            # The close of what emptied it may not have been heard of yet.
            for handle in known.handles:
                handle.is_superseded = True
            self._published(known, writer.view)

    def _publish(self, handle: Handle, writer: FileWriter) -> None:
        with handle.publishing:
            if not writer.needs_publishing and not writer.has_failed:
                return
            try:
                writer.publish()
            finally:
                self._note_unfinished(handle)
            if writer.view is not None:
                self._published(handle.node, writer.view)
