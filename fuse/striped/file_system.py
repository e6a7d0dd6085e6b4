"""The striped file system as the kernel sees it: an adapter from FUSE operations to the core.

Its parts are `name_operations` and `file_operations` over the same `tables`; owns the end of a
mount. What a striped file is, and what is durable when, is decided in `tree`, `reader` and
`writer`; docs/SEMANTICS.md says what users may rely on. Thread-safe.
"""

import logging

from bootseer.fuse.kernel.operations import Attributes, Caller, SetAttributes
from bootseer.fuse.striped.file_operations import FileOperations
from bootseer.fuse.striped.name_operations import NameOperations

_log = logging.getLogger(__name__)

# At the end of a mount: how long to wait for the parts of an unfinished file to be removed.
_ABORT_WAIT_S = 2.0


class StripedFileSystem(NameOperations, FileOperations):
    """A tree of striped and ordinary files, mounted."""

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

    def setattr(
        self, caller: Caller, node: int, changes: SetAttributes
    ) -> tuple[Attributes, float]:
        # Modes, owners and times belong to the storage: accepted, so that cp -p and tar work, and
        # not kept.
        if changes.size_bytes is not None:
            self._truncate(caller, node, changes.handle, changes.size_bytes)
        return self.getattr(caller, node, changes.handle)
