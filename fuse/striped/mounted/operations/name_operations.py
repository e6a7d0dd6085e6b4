"""FUSE operations on names: looking them up, listing, making, moving and removing them.

Owns for how long a name that was seen is believed, and what becomes of a node whose name now means
something else. Thread-safe; see `tables`.
"""

import errno
import functools
import logging
from collections.abc import Sequence

from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.kernel.operations import (
    ROOT_NODE,
    Attributes,
    Caller,
    DirectoryEntry,
    Entry,
    FileSystemStatistics,
    Opened,
)
from bootseer.fuse.striped.mounted.operations.close_operations import CloseOperations
from bootseer.fuse.striped.mounted.operations.nodes import Handle, Node
from bootseer.fuse.striped.mounted.operations.presentation import BLOCK_BYTES
from bootseer.fuse.striped.mounted.operations.tables import NAME_MAX_BYTES
from bootseer.fuse.striped.names.stored import refuse
from bootseer.fuse.striped.names.tree import directory_of
from bootseer.fuse.striped.view import moved_identity

_log = logging.getLogger(__name__)

# Shown where the storage cannot say how large it is: programs refuse to write to a full disk.
_UNKNOWN_SPACE_BYTES = 2**50
_RENAME_NOREPLACE = 1


class NameOperations(CloseOperations):
    """Names, attributes and directories of one mount."""

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Entry:
        with self._lock:
            directory = self._node(parent)
            text, path = self._child_path(directory, name)
            writing = self._nodes.writing(directory, text)
            handles = [handle for node in writing for handle in node.handles]
        self._await_release(handles)
        status, seen_s = self._status(path)
        with self._lock:
            known = self._nodes.child(directory, text)
            if status is not None:
                known = self._settle(directory, text, status)
            elif known is None or not known.is_unpublished:
                if known is not None:
                    self._nodes.detach(known)
                raise refuse(errno.ENOENT, path)
            own = self._nodes.look_up_own(directory, text, caller.pid, known.status)
            return self._entry(own or known, seen_s)

    def dropped(self, node: int) -> None:
        with self._lock:
            self._nodes.forget(node)

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        with self._lock:
            known = self._node(node)
            opened = self._nodes.handles.get(handle) if handle is not None else None
            is_root = known.id == ROOT_NODE
            if is_root or known.is_local or known.is_writing or known.is_detached:
                return self._shown(known, writer=opened.writer if opened is not None else None)
            path, before = known.path, known.status
        status, seen_s = self._status(path)
        with self._lock:
            if known.status is not before:
                # Published here meanwhile.
                return self._shown(known)
            if status is None or status.identity != known.status.identity:
                # The name means something else now. Who has the file open keeps what was opened;
                # everybody else is sent (ESTALE) to look the name up again.
                self._nodes.detach(known)
                if not known.handles:
                    raise refuse(errno.ESTALE, path)
            else:
                known.status = status
            return self._shown(known, seen_s)

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Entry:
        directory, text, path = self._new_name(parent, name)
        try:
            status = self._tree.mkdir(path)
        except FileExistsError:
            made = self._status(path)[0] if caller.is_resent else None
            if made is None or not made.is_dir:
                raise
            status = made
        with self._lock:
            return self._entry(self._nodes.add(directory, text, status))

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> None:
        with self._lock:
            directory = self._node(parent)
            text, path = self._child_path(directory, name)
            known = self._nodes.child(directory, text)
            if known is not None and self._nodes.local_children(known):
                raise refuse(errno.ENOTEMPTY, path)
            self._check_no_parts(path)
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
            waiting = self._waiting_at(path)
        gone = [writer for writer in self._writers_of(path) if not writer.is_detached]
        for writer in gone:
            writer.detach()
        try:
            self._tree.unlink(path)
        except BaseException as error:
            if not isinstance(error, NotFoundError) or not (is_local or caller.is_resent):
                for writer in gone:
                    writer.attach()
                raise
        with self._lock:
            self._leave_nameless(waiting)
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
            # One whose file is gone has nothing to do with what has the name now; its parts are
            # still in the folder.
            writers = [writer for writer in self._nodes.writers() if not writer.is_detached]
            nameless = [writer for writer in self._nodes.writers() if writer.is_detached]
            taken = self._nodes.child(new_directory, new_text)
            waiting = self._waiting_at(target)
        if source == target:
            return
        if flags and taken is not None and taken.is_unpublished:
            raise refuse(errno.EEXIST, target)
        inside = [w for w in writers if w.path.startswith(source + "/")]
        below = [w for w in nameless if w.path.startswith(source + "/")]
        if any(writer.needs_publishing for writer in inside) or any(
            writer.was_written and writer.has_parts for writer in below
        ):
            # Their parts lie in a folder that would move away under them.
            raise refuse(errno.EBUSY, source)
        if taken is not None and taken.status.is_dir and self._is_folder(directory, text):
            with self._lock:
                if self._nodes.local_children(taken):
                    raise refuse(errno.ENOTEMPTY, target)
                self._check_no_parts(target)
        replaced = self._writers_of(target)
        moving = [w for w in writers if w.path == source and not w.has_failed]
        is_moved = directory.id != new_directory.id
        if is_moved and any(writer.has_new_parts for writer in moving):
            # The parts lie beside the file, and the two cannot move in one step.
            raise refuse(errno.EXDEV, target)
        # What is written from the start is published under the new name only, so that a rename that
        # is refused has published nothing. What is added to a file is published after its rename.
        begun = [writer for writer in moving if writer.needs_publishing and writer.starts_anew]
        try:
            if begun:
                self._tree.rename_begun(
                    source,
                    target,
                    [functools.partial(writer.publish_as, target) for writer in begun],
                    replace=not flags,
                    has_parts=any(writer.has_parts for writer in begun),
                )
            else:
                self._tree.rename(source, target, replace=not flags)
        except NotFoundError:
            if not caller.is_resent or self._status(target)[0] is None:
                raise
        with self._lock:
            self._leave_nameless(waiting)
            for writer in replaced:
                if writer not in begun:
                    writer.detach()
            for writer in moving:
                writer.path = target
            for writer in (*inside, *below):
                writer.path = target + writer.path[len(source) :]
            self._nodes.move_bases(source, target)
            known = self._move_nodes(directory, text, new_directory, new_text, is_new=bool(begun))
            handles = [h for h in self._nodes.handles.values() if h.writer in moving]
            self._nodes.note_moved()
            self._listings.clear()
        self._refresh_moved(known, source, target)
        for handle in handles:
            self._publish_moved(handle)

    def _check_no_parts(self, path: str) -> None:
        """Raise ENOTEMPTY if the folder has parts of a file without a name that is being written,
        as NFS does. Under the lock."""
        for writer in self._nodes.writers():
            if writer.is_detached and writer.has_parts and directory_of(writer.path) == path:
                raise refuse(errno.ENOTEMPTY, path)

    def _is_folder(self, directory: Node, name: str) -> bool:
        with self._lock:
            known = self._nodes.child(directory, name)
            return known is not None and known.status.is_dir

    def _move_nodes(
        self, directory: Node, name: str, new_directory: Node, new_name: str, *, is_new: bool
    ) -> Node | None:
        """Give the nodes of a name another one; the lock is held. `is_new`: whether the file was
        published by that, and what had the old name is gone. Return the node that lookups find."""
        nodes = self._nodes
        for replaced in nodes.writing(new_directory, new_name):
            nodes.detach(replaced)
        taken = nodes.child(new_directory, new_name)
        if taken is not None:
            nodes.detach(taken)
        known = nodes.child(directory, name)
        if known is not None and known.is_local:
            nodes.make_writing(known)
            known = None
        for writing in nodes.writing(directory, name):
            nodes.move(writing, new_directory, new_name)
        if known is not None and is_new:
            nodes.detach(known)
            return None
        if known is not None:
            nodes.move(known, new_directory, new_name)
        return known

    def _publish_moved(self, handle: Handle) -> None:
        """Publish what is written through a handle whose file was renamed.

        The rename is done, so a failure is not told by it: the writer hears of it.
        """
        writer = handle.writer
        assert writer is not None
        try:
            if writer.needs_publishing:
                self._publish(handle, writer)
            elif writer.view is not None:
                self.published(handle.node, writer.view)
        except (BootseerError, OSError) as error:
            _log.error("%s was renamed, and what was written is lost: %s", writer.path, error)

    def _refresh_moved(self, node: Node | None, source: str, target: str) -> None:
        """An ordinary file's identity names its path: see it anew, or its next open is refused."""
        if node is None or node.status.is_dir:
            return
        status, _ = self._status(node.path)
        with self._lock:
            if status is None or node.is_detached:
                return
            is_same = status.identity == moved_identity(node.status.identity, source, target)
            if node.had_readers and not is_same:
                # Another node had replaced what was renamed: who has the old file open keeps its
                # size, and the next one who opens it looks the name up again.
                return
            node.status = status
            self._nodes.note_node(node)

    def _gone(self, directory: Node, name: str, path: str) -> None:
        with self._lock:
            self._listings.drop(path)
            known = self._nodes.child(directory, name)
            if known is not None:
                known.is_local = False
                self._nodes.detach(known)
            for writing in self._nodes.writing(directory, name):
                self._nodes.detach(writing)
            self._nodes.note_moved()

    def opendir(self, caller: Caller, node: int, flags: int) -> Opened:
        return Opened(handle=self._list(node))

    def _list(self, node: int, handle: int | None = None) -> int:
        with self._lock:
            directory = self._node(node)
            path = self._attached_path(directory)
        seen_s = self._clock()
        try:
            infos = self._tree.stored.entries(path)
        except NotFoundError:
            if path:
                raise
            infos = []  # The root is made when something is first written.
        with self._lock:
            local = [child.name for child in self._nodes.local_children(directory)]
        return self._listings.open(infos, local, seen_s, handle)

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
