"""The striped file system as the kernel sees it: an adapter from FUSE operations to the core.

Its parts are `name_operations` and `file_operations` over the same `tables`; owns the end of a
mount. What a striped file is, and what is durable when, is decided in `tree`, `reader` and
`writer`; docs/SEMANTICS.md says what users may rely on. Thread-safe.
"""

import logging
from collections.abc import Callable

from bootseer.errors import BootseerError
from bootseer.fuse.kernel.operations import ROOT_NODE, Attributes, Caller, SetAttributes
from bootseer.fuse.striped.mounted.journal import Inherited
from bootseer.fuse.striped.mounted.life.resumption import resume
from bootseer.fuse.striped.mounted.operations.file_operations import FileOperations
from bootseer.fuse.striped.mounted.operations.name_operations import NameOperations

_log = logging.getLogger(__name__)

# At the end of a mount: how long to wait for the parts of an unfinished file to be removed.
_ABORT_WAIT_S = 2.0


class StripedFileSystem(NameOperations, FileOperations):
    """A tree of striped and ordinary files, mounted."""

    def begin(self, inherited: Inherited | None = None) -> None:
        """Before the first request: go on from a predecessor's journal, and start one's own."""
        try:
            resume(self._nodes, inherited or Inherited(), self._storage, self._clock())
        except (BootseerError, LookupError, TypeError, ValueError) as error:
            _log.error("what was open is not known any more: %s", error)
            self._nodes.continue_from([], [], {})
        self._inherited = set(self._nodes.by_id) - {ROOT_NODE}
        self._nodes.start_journal()

    def stop_if_quiet(self, stop: Callable[[], None]) -> bool:
        """Call `stop`, which ends the process, at a moment when nothing would be lost by that;
        False where a file is being written."""
        with self._lock:
            if any(writer.has_unsaved_bytes for writer in self._nodes.writers()):
                return False
            stop()
            return True

    def forget(self, node: int, count: int) -> None:
        """The nodes that a predecessor looked up are in nobody's count: the kernel forgets an inode
        with all its lookups at once."""
        if node in self._inherited:
            self._inherited.discard(node)
            self.dropped(node)

    def all_closed(self) -> None:
        with self._lock:
            handles = list(self._nodes.handles.values())
        for handle in handles:
            # What was written is published at the close itself, or was given up then.
            if handle.only_empties and handle.was_flushed:
                writer = handle.writer
                self.release(handle.node.id, handle.id, 0)
                if writer is not None and (writer.has_failed or writer.needs_publishing):
                    self.unwritten.append(writer.path)

    def note_unwritten(self) -> None:
        """Called once `unwritten` is complete, at the end of the mount."""

    def destroyed(self) -> None:
        """A file that is still open was not finished by its writer: it does not appear."""
        with self._lock:
            handles = list(self._nodes.handles.values())
        for handle in handles:
            writer = handle.writer
            if writer is not None and writer.needs_publishing:
                self.unwritten.append(writer.path)
                _log.error("%s was still being written: nothing of it is kept", writer.path)
        # Before the parts are removed: that may take longer than this process is given.
        self.note_unwritten()
        for handle in handles:
            if handle.writer is not None:
                handle.writer.close(_ABORT_WAIT_S)
            if handle.file is not None:
                self._reader.close(handle.file)
        self._nodes.close_journal()
        self._tree.close()

    def setattr(
        self, caller: Caller, node: int, changes: SetAttributes
    ) -> tuple[Attributes, float]:
        # Modes, owners and times belong to the storage: accepted, so that cp -p and tar work, and
        # not kept.
        if changes.size_bytes is not None:
            self._truncate(caller, node, changes.handle, changes.size_bytes)
        return self.getattr(caller, node, changes.handle)
