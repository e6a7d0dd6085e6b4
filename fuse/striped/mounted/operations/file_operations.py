"""FUSE operations on open files: creating and opening them, reading, writing, truncation.

Owns which writer or reader serves a handle; what becomes of it is `close_operations`'. Thread-safe;
see `tables`.
"""

import errno
import os
import time
from collections.abc import Sequence

from bootseer.errors import NotFoundError, UnsupportedError
from bootseer.fuse.kernel.operations import Buffer, Caller, Entry, Opened
from bootseer.fuse.striped.mounted.operations.callers import is_dying, process_of
from bootseer.fuse.striped.mounted.operations.close_operations import CloseOperations
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node
from bootseer.fuse.striped.mounted.operations.presentation import opened_of
from bootseer.fuse.striped.names.stored import FileStatus, refuse, status_of
from bootseer.fuse.striped.reading.chunks import OpenFile
from bootseer.fuse.striped.view import FileView
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
        status, _ = self._status(path)
        with self._lock:
            known = self._nodes.child(directory, text)
            if status is not None:
                known = self._settle(directory, text, status)
            if known is not None and not (known.is_unpublished or status is not None):
                known = None
            if known is not None:
                if flags & os.O_EXCL:
                    raise refuse(errno.EEXIST, path)
                if known.status.is_dir:
                    raise refuse(errno.EISDIR, path)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    known = self._nodes.add_writing(directory, text, known.status)
                    known.is_wanted = True
                    self._nodes.note_node(known)
        if known is not None:
            try:
                opened = self.open(caller, known.id, flags)
            except BaseException:
                with self._lock:
                    if known.is_writing and not known.handles:
                        self._nodes.detach(known)
                raise
            return self._entry(known), opened
        with self._lock:
            status = FileStatus(path, False, 0, time.time_ns(), "")
            node = self._nodes.add(directory, text, status)
            node.is_local = True
            self._nodes.note_node(node)
            handle = self._nodes.open(node, flags, caller.request)
            handle.opener = process_of(caller)
            handle.writer = self._storage.writer(path)
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
            is_reader = flags & os.O_ACCMODE == os.O_RDONLY
            if not is_reader:
                if known.is_detached or not known.is_wanted:
                    self._own_node(caller, known)
                self._nodes.give(known)
            elif known.is_writing and self._nodes.want(
                known, caller.pid, self._clock(), only_reads=True
            ):
                # It has been published since it was looked up.
                raise refuse(errno.ESTALE, known.path)
            path = self._attached_path(known)
            if is_reader and self._passes_files and known.was_passed and flags & os.O_DIRECT:
                self._renew(known)
                raise refuse(errno.ESTALE, path)
            if known.is_local and not known.is_unpublished:
                # Its writer has just been killed, or has failed.
                raise refuse(errno.ESTALE, path)
        if not is_reader:
            return self._open_to_write(caller, known, path, flags)
        if known.is_local or known.writer() is not None:
            with self._lock:
                handle = self._nodes.open(known, flags, caller.request)
                self._nodes.note(handle)
                return opened_of(handle)
        try:
            file, view = self._tree.open(path)
        except NotFoundError:
            # Removed elsewhere: the kernel shall look the name up again.
            with self._lock:
                self._nodes.detach(known)
            raise refuse(errno.ESTALE, path) from None
        with self._lock:
            if not self._may_read(known, view):
                self._reader.close(file)
                raise refuse(errno.ESTALE, path)
            handle = self._nodes.open(known, flags, caller.request)
            handle.file = file
            known.had_readers = True
            # The own node of a writer may grow.
            is_cached = not self._maps_direct_io and not known.is_writing
            if not self._may_pass(known, flags):
                self._nodes.note(handle)
                return opened_of(handle, is_cached=is_cached)
        # Outside of the lock: it opens the stored file.
        descriptor = self._reader.descriptor(file)
        with self._lock:
            # Somebody may have begun to write meanwhile.
            if descriptor is not None and self._may_pass(known, flags):
                handle.descriptor = descriptor
                known.was_passed = True
            self._nodes.note(handle)
            return opened_of(handle, is_cached=is_cached)

    def _may_read(self, node: Node, view: FileView) -> bool:
        """Whether who opens a node may read `view`, which has its name now; the lock is held."""
        if view.identity == node.status.identity:
            return True
        # Of a file that is written here the kernel keeps no attributes.
        is_shown_anew = self._nodes.is_written(node) and not node.is_writing
        if node.had_readers or node.is_detached or not is_shown_anew:
            if not node.is_writing:
                self._nodes.detach(node)
            return False
        node.status = status_of(view)
        self._nodes.note_node(node)
        return True

    def _open_to_write(self, caller: Caller, node: Node, path: str, flags: int) -> Opened:
        """Open the own node of a writer."""
        file: OpenFile | None = None
        base: FileView | None = None
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
        with self._lock:
            handle = self._nodes.open(node, flags, caller.request)
            handle.opener = process_of(caller)
            if base is None:
                handle.writer = self._storage.writer(path)
            elif node.writer() is None:
                node.status = status_of(base)
            handle.base, handle.file = base, file
            self._nodes.note(handle)
            return opened_of(handle)

    def _may_pass(self, node: Node, flags: int) -> bool:
        """Whether the kernel may read the node's file past us; the lock is held. What is written
        through it must come to us, and O_DIRECT of any alignment works only here."""
        return (
            self._passes_files
            and node.may_be_passed
            and not node.is_writing
            and not flags & os.O_DIRECT
            and not any(handle.is_writable for handle in node.handles)
        )

    def _renew(self, node: Node) -> None:
        """Make another node for the name, which the kernel never reads past us: it opens a node in
        one way only, and finds the new one when it looks the name up again. The lock is held."""
        assert node.parent is not None
        renewed = self._nodes.add(node.parent, node.name, node.status)
        renewed.may_be_passed = False

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        opened = self._handle(handle)
        writer = opened.writer
        if writer is None and not opened.is_writable:
            # Opened for reading before its writer has published anything.
            with self._lock:
                writer = opened.node.writer()
            if writer is not None and writer.has_failed and opened.file is not None:
                writer = None
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
                # truncate(2) of a file that is not stored yet acts on what is written of it.
                handle = next((h for h in known.handles if h.is_at_work), None)
                if handle is None or not (known.is_local or known.is_detached):
                    if not known.is_wanted:
                        # The kernel cuts the pages of the node that it names.
                        self._own_node(caller, known)
                    self._nodes.give(known)
            path = known.path
        if handle is not None:
            writer = self._writer(handle, starts_empty=size_bytes == 0)
            try:
                writer.truncate(size_bytes)
            finally:
                handle.unpublished_owners.add(caller.lock_owner)
                self._note_unfinished(handle)
            return
        view = self._tree.stored.view(path)
        with self._lock:
            known.status = status_of(view)
        if view.size_bytes == size_bytes:
            return
        base = view if size_bytes else None
        writer = self._storage.writer(path, base)
        try:
            writer.truncate(size_bytes)
            writer.publish()
        finally:
            writer.close()
        assert writer.view is not None
        with self._lock:
            # The close of what emptied it may not have been heard of yet.
            for other in self._nodes.same_file(known):
                for handle in other.handles:
                    handle.is_superseded = True
            self.published(known, writer.view)
