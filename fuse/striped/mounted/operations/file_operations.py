"""FUSE operations on open files: creating and opening them, reading, writing, truncation.

Owns which writer or reader serves a handle; what becomes of it is `close_operations`'. Thread-safe;
see `tables`.
"""

import errno
import os
import time
from collections.abc import Sequence

from bootseer.errors import UnsupportedError
from bootseer.fuse.kernel.operations import Buffer, Caller, Entry, Opened
from bootseer.fuse.striped.mounted.operations.callers import is_dying
from bootseer.fuse.striped.mounted.operations.close_operations import CloseOperations
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node
from bootseer.fuse.striped.mounted.operations.presentation import opened_of
from bootseer.fuse.striped.names.stored import FileStatus, refuse
from bootseer.fuse.striped.writing.writer import FileWriter


class FileOperations(CloseOperations):
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
            opened.unpublished_owners.add(caller.lock_owner)
            # Only now: if this process dies before, the kernel asks the next one to write this.
            self._note_unfinished(opened)

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
                handle.unpublished_owners.add(caller.lock_owner)
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
            self.published(known, writer.view)
