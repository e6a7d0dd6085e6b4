"""FUSE operations on names: looking them up, listing, making, moving and removing them.

Owns for how long a name that was seen is believed, and what becomes of a node whose name now means
something else. Thread-safe; see `tables`.
"""

import errno
from collections.abc import Sequence

from bootseer.errors import NotFoundError
from bootseer.fuse.kernel.operations import (
    Attributes,
    Caller,
    DirectoryEntry,
    Entry,
    FileSystemStatistics,
    Opened,
)
from bootseer.fuse.striped.mounted.operations.nodes import Node
from bootseer.fuse.striped.mounted.operations.presentation import BLOCK_BYTES, CACHE_S
from bootseer.fuse.striped.mounted.operations.tables import NAME_MAX_BYTES, MountTables
from bootseer.fuse.striped.names.stored import refuse

# Shown where the storage cannot say how large it is: programs refuse to write to a full disk.
_UNKNOWN_SPACE_BYTES = 2**50
_RENAME_NOREPLACE = 1


class NameOperations(MountTables):
    """Names, attributes and directories of one mount."""

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
                raise refuse(errno.ENOENT, path)
            return self._entry(self._settle(directory, text, status))

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
                    raise refuse(errno.ESTALE, path)
            elif status is not None:
                known.status, known.seen_s = status, self._clock()
            return self._shown(known)

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Entry:
        directory, text, path = self._new_name(parent, name)
        try:
            status = self._tree.mkdir(path)
        except FileExistsError:
            made = self._status(path) if caller.is_resent else None
            if made is None or not made.is_dir:
                raise
            status = made
        with self._lock:
            directory.seen_s = 0.0
            return self._entry(self._nodes.add(directory, text, status, self._clock()))

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> None:
        with self._lock:
            directory = self._node(parent)
            text, path = self._child_path(directory, name)
            known = self._nodes.child(directory, text)
            if known is not None and self._nodes.local_children(known):
                raise refuse(errno.ENOTEMPTY, path)
        try:
            self._tree.rmdir(path)
        except NotFoundError:
            if not caller.is_resent:
                raise
        self._gone(directory, text, path)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> None:
        with self._lock:
            directory = self._node(parent)
            text, path = self._child_path(directory, name)
            known = self._nodes.child(directory, text)
            is_local = known is not None and known.is_local
        gone = self._writers_of(path)
        for writer in gone:
            writer.detach()
        try:
            self._tree.unlink(path)
        except NotFoundError:
            if not is_local and not caller.is_resent:
                raise
        self._gone(directory, text, path)
        if gone:
            with self._lock:
                self._nodes.note_moved()

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        if flags & ~_RENAME_NOREPLACE:
            raise refuse(errno.EINVAL)
        with self._lock:
            directory, new_directory = self._node(parent), self._node(new_parent)
            text, source = self._child_path(directory, name)
            new_text, target = self._child_path(new_directory, new_name)
            # One whose file is gone has nothing to do with what has the name now.
            writers = [writer for writer in self._nodes.writers() if not writer.is_detached]
            taken = self._nodes.child(new_directory, new_text)
        if source == target:
            return
        if flags and taken is not None and taken.is_local:
            raise refuse(errno.EEXIST, target)
        inside = [w for w in writers if w.path.startswith(source + "/")]
        if any(writer.needs_publishing for writer in inside):
            # Their parts lie in a folder that would move away under them.
            raise refuse(errno.EBUSY, source)
        replaced = self._writers_of(target)
        moving = [writer for writer in writers if writer.path == source]
        for writer in moving:
            writer.publish()
        try:
            self._tree.rename(source, target, replace=not flags)
        except NotFoundError:
            if not caller.is_resent or self._status(target) is None:
                raise
        with self._lock:
            for writer in replaced:
                writer.detach()
            for writer in moving:
                writer.path = target
            for writer in inside:
                writer.path = target + writer.path[len(source) :]
            self._nodes.move_bases(source, target)
            directory.seen_s = new_directory.seen_s = 0.0
            known = self._nodes.child(directory, text)
            if known is not None:
                known.is_local = False
                known.seen_s = 0.0
                self._nodes.move(known, new_directory, new_text)
                self._nodes.note_moved()
            elif taken is not None:
                self._nodes.detach(taken)
            if replaced:
                self._nodes.note_moved()
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
                self._nodes.note_node(node)

    def _gone(self, directory: Node, name: str, path: str) -> None:
        with self._lock:
            self._listings.drop(path)
            directory.seen_s = 0.0
            known = self._nodes.child(directory, name)
            if known is not None:
                known.is_local = False
                self._nodes.detach(known)
            self._nodes.note_moved()

    def opendir(self, caller: Caller, node: int, flags: int) -> Opened:
        return Opened(handle=self._list(node))

    def _list(self, node: int, handle: int | None = None) -> int:
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
        return self._listings.open(infos, local, self._clock(), handle)

    def readdir(
        self, caller: Caller, node: int, handle: int, offset: int, plus: bool
    ) -> Sequence[DirectoryEntry]:
        with self._lock:
            known = self._nodes.children(self._node(node))
        entries = self._listings.read(handle, offset, known)
        if entries is None:
            # Opened in a predecessor of this process.
            self._list(node, handle)
            entries = self._listings.read(handle, offset, known)
        return entries or ()

    def releasedir(self, node: int, handle: int) -> None:
        self._listings.close(handle)

    def fsyncdir(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        """Every change of names is durable when it returns."""

    def statfs(self, caller: Caller, node: int) -> FileSystemStatistics:
        space = self._tree.backend.space()
        total = space.total_bytes if space else _UNKNOWN_SPACE_BYTES
        free = space.free_bytes if space else _UNKNOWN_SPACE_BYTES
        return FileSystemStatistics(
            total // BLOCK_BYTES,
            free // BLOCK_BYTES,
            free // BLOCK_BYTES,
            block_size_bytes=BLOCK_BYTES,
            name_max=NAME_MAX_BYTES,
        )
