"""FUSE operations of a mounted tree of striped and ordinary files.

Requests for names and attributes are answered here, requests for open files by `open_files`. The
storage's tree, reader and writers decide about striped files and durability; docs/SEMANTICS.md says
what users may rely on. Thread-safe.
"""

import contextlib
import errno
import functools
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.kernel.operations import (
    ROOT_NODE,
    Attributes,
    Buffer,
    Caller,
    DirectoryEntry,
    FileSystemStatistics,
    NodeEntry,
    Opened,
    Operations,
    SetAttributes,
)
from bootseer.fuse.striped.mounted.journal import Inherited, Journal, NodeKind
from bootseer.fuse.striped.mounted.listing import Listings
from bootseer.fuse.striped.mounted.nodes import Node, NodeTable
from bootseer.fuse.striped.mounted.open_files import OpenFiles, open_reply, process_of
from bootseer.fuse.striped.mounted.status import OpenFigures
from bootseer.fuse.striped.names.stored import FileStatus, is_hidden, os_error
from bootseer.fuse.striped.names.striped_tree import directory_of
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.view import moved_identity
from bootseer.fuse.striped.writing.file_writer import FileWriter
from bootseer.store.paths import PATH_MAX_BYTES

_CACHE_S = 1.0
"""Largest age of a shown name or attribute, including its time in the kernel's cache."""
_BLOCK_BYTES = 4096
_NAME_MAX_BYTES = 255
# The paths of a file's parts are longer than the file's own.
_PATH_MAX_BYTES = PATH_MAX_BYTES - 100
# Shown if the storage does not tell its size: programs refuse to write to a full disk.
_UNKNOWN_SPACE_BYTES = 2**50
_RENAME_NOREPLACE = 1
# Lookups of a name in the storage while this mount changes the name at the same time.
_LOOKS_MAX = 5
# A stream that read nothing for this time is not shown as active.
_ACTIVE_S = 10.0


class Ownership(Struct, frozen=True):
    """Owner and permissions of all files: storages keep none of each file."""

    uid: int
    gid: int
    umask: int = 0o022


class MountedTree(Operations):
    """FUSE operations on the tree of one storage, which the caller closes (`on_destroyed`)."""

    def __init__(
        self,
        storage: StripedStorage,
        *,
        owner: Ownership | None = None,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        inherited: Inherited | None = None,
        allows_passthrough: bool = False,
        maps_direct_io: bool = True,
        uses_page_cache: bool = False,
        on_mounted: Callable[[], None] = lambda: None,
        on_end: Callable[[Sequence[str]], None] = lambda unwritten: None,
        on_destroyed: Callable[[], None] = lambda: None,
    ) -> None:
        """Restore the state in a predecessor's journal (`inherited`), and start a new journal.

        `allows_passthrough`: whether the kernel may read ordinary files of this node itself.
        `maps_direct_io`: whether the kernel maps files shared (MAP_SHARED) that it reads without
        its page cache. If not (before Linux 6.6), files opened for reading use the page cache.
        `uses_page_cache`: whether files opened for reading always use the page cache, so that later
        readers find the pages there. `on_end` is called at the end of the mount, before files are
        closed, with the files whose last bytes are lost; `on_destroyed` when everything is closed.
        """
        self._tree = storage.tree
        self._reader = storage.reader
        self._owner = owner or Ownership(os.geteuid(), os.getegid())
        self._clock = clock
        self._on_mounted = on_mounted
        self._on_end = on_end
        self._on_destroyed = on_destroyed
        self._nodes = NodeTable(FileStatus("", True, 0, time.time_ns(), ""), journal)
        self._lock: threading.RLock = self._nodes.lock
        self._listings = Listings(_CACHE_S)
        self.files = OpenFiles(
            storage,
            self._nodes,
            self._listings,
            clock,
            self._forget_attributes,
            allows_passthrough=allows_passthrough,
            caches_reads=uses_page_cache or not maps_direct_io,
        )
        if inherited is not None:
            self._nodes.resume(inherited, clock())
            self.files.resume(inherited)
        self._inherited = frozenset(self._nodes.by_id) - {ROOT_NODE}
        self._nodes.start_journal()

    # ---- the mount's life -----------------------------------------------------------------

    def mounted(self) -> None:
        self._on_mounted()

    def all_closed(self) -> None:
        self.files.close_emptied()

    def destroyed(self) -> None:
        """Close everything. A file that is still open for writing does not appear."""
        handles = self.files.note_unwritten()
        # Before the parts are removed, which may take longer than this process may live.
        self._on_end(self.files.unwritten)
        self.files.close_all(handles)
        self._nodes.close_journal()
        self._tree.close()
        self._on_destroyed()

    def figures(self) -> OpenFigures:
        """Return counts of open files and requests."""
        now_s = time.monotonic()
        active = sum(
            file.streams.active_count(now_s - _ACTIVE_S) for file in self._reader.open_files()
        )
        with self._lock:
            unfinished = {
                w.path for w in self._nodes.writers() if w.needs_publishing or w.was_written
            }
            count = len(self._nodes.handles)
            requests = self._nodes.request_count
        return OpenFigures(count, active, requests, tuple(sorted(unfinished)))

    def unsaved(self) -> list[str]:
        """Return the files that would lose bytes if this process ended now."""
        with self._lock:
            return sorted({w.path for w in self._nodes.writers() if w.was_written})

    def stop_if_quiet(self, stop: Callable[[], None]) -> bool:
        """Call `stop`, which ends the process, unless a file would lose bytes.

        Return whether `stop` was called.
        """
        with self._lock:
            if self.unsaved():
                return False
            stop()
            return True

    # ---- looking up and showing -----------------------------------------------------------

    def _child_path(self, directory: Node, name: bytes) -> tuple[str, str]:
        """Return the name as text, and its path; the lock is held."""
        if len(name) > _NAME_MAX_BYTES:
            raise os_error(errno.ENAMETOOLONG)
        text = os.fsdecode(name)
        if is_hidden(text):
            raise os_error(errno.ENOENT, text)
        parent = directory.attached_path
        path = f"{parent}/{text}" if parent else text
        if len(os.fsencode(path)) > _PATH_MAX_BYTES:
            raise os_error(errno.ENAMETOOLONG)
        return text, path

    def _new_name(self, parent: int, name: bytes) -> tuple[Node, str, str]:
        """Return directory, text and path of a name to be made. Raises: EPERM for a hidden one."""
        with self._lock:
            directory = self._nodes.node(parent)
            if is_hidden(os.fsdecode(name)):
                raise os_error(errno.EPERM, os.fsdecode(name))
            return directory, *self._child_path(directory, name)

    def _status(self, path: str) -> tuple[FileStatus | None, float]:
        """Return the status of the stored file `path`, and the time at which it was read."""
        now_s = self._clock()
        listed = self._listings.take(path, now_s)
        try:
            if listed is not None:
                return self._tree.stored.shown(listed[1]), listed[0]
            return self._tree.stored.shown(self._tree.backend.stat(path)), now_s
        except NotFoundError:
            return None, now_s

    def _refreshed_node(self, directory: Node, name: str, status: FileStatus) -> Node:
        """Return the node of a name whose status was just read; the lock is held."""
        known = directory.children.get(name)
        if known is not None and known.is_local:
            # Another machine has stored a file of this name, which the local writer did not write.
            self._nodes.make_writer_node(known)
            known = None
        if (
            known is None
            or known.status.is_dir != status.is_dir
            or known.status.identity != status.identity
        ):
            return self._nodes.add(directory, name, status)
        known.status = status
        known.is_forgotten = False
        return known

    def lookup(self, caller: Caller, parent: int, name: bytes) -> NodeEntry:
        with self._lock:
            directory = self._nodes.node(parent)
            text, path = self._child_path(directory, name)
            writing = directory.writer_nodes.get(text, ())
            handles = [handle for node in writing for handle in node.handles]
        self.files.await_release(handles)
        for looks_left in reversed(range(_LOOKS_MAX)):
            before = self._listings.change_count
            status, seen_s = self._status(path)
            with self._lock:
                if looks_left and self._listings.has_changed(path, before):
                    # The status may be from before the change, and the kernel would cache it.
                    continue
                known = directory.children.get(text)
                if status is not None:
                    known = self._refreshed_node(directory, text, status)
                elif known is None or not known.is_unpublished:
                    if known is not None:
                        self._nodes.detach(known)
                    break
                writer_node = self._nodes.look_up_writer_node(
                    directory, text, caller.pid, known.status
                )
                return self._entry(writer_node or known, seen_s)
        with self._lock:
            self._nodes.end_pending_lookups(caller.pid, text)
        raise os_error(errno.ENOENT, path)

    def inherited_nodes(self) -> Collection[int]:
        return self._inherited

    def dropped(self, node: int) -> None:
        with self._lock:
            self._nodes.forget(node)

    def _entry(self, node: Node, seen_s: float | None = None) -> NodeEntry:
        """Return the answer to a lookup. `seen_s`: time of the status; now by default."""
        attributes, ttl_s = self._shown(node, seen_s)
        # A file that only this mount knows may vanish without notice to the kernel.
        return NodeEntry(attributes, 0.0 if node.is_local else ttl_s, ttl_s)

    def _shown(
        self, node: Node, seen_s: float | None = None, writer: FileWriter | None = None
    ) -> tuple[Attributes, float]:
        """Return attributes, and the seconds for which the kernel may cache them.

        `writer`: the writer of the descriptor in the request, if any.
        """
        attributes = self._attributes(node, writer)
        if node.is_writer_node or node.is_open_for_writing:
            # The name gets another node as soon as the file is published.
            return attributes, 0.0
        age_s = self._clock() - seen_s if seen_s is not None else 0.0
        return attributes, max(0.0, _CACHE_S - age_s)

    def _attributes(self, node: Node, writer: FileWriter | None) -> Attributes:
        status, owner = node.status, self._owner
        if status.is_dir:
            mode, size_bytes, links = stat.S_IFDIR | 0o777 & ~owner.umask, _BLOCK_BYTES, 2
        else:
            writer = writer or node.writer()
            is_growing = writer is not None and not writer.has_failed
            size_bytes = writer.size_bytes if writer and is_growing else status.size_bytes
            if writer is None and node.is_truncated:
                size_bytes = 0
            mode, links = stat.S_IFREG | 0o666 & ~owner.umask, 0 if node.is_detached else 1
        return Attributes(
            node.id,
            mode,
            size_bytes,
            link_count=links,
            uid=owner.uid,
            gid=owner.gid,
            atime_ns=status.modified_ns,
            mtime_ns=status.modified_ns,
            ctime_ns=status.modified_ns,
            inode=node.inode,
        )

    def _forget_attributes(self, directory: Node) -> None:
        """Drop the kernel's copy of the attributes of a directory.

        Publishing a file changes the time of its directory without notice to the kernel. `tar` that
        sees the new time later reports that the directory changed while it was read.
        """
        if self.forget_pages is not None:
            with contextlib.suppress(BootseerError):
                self.forget_pages(directory.id, -1, 0)

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        with self._lock:
            known = self._nodes.node(node)
            opened = self._nodes.handles.get(handle) if handle is not None else None
            is_root = known.id == ROOT_NODE
            if is_root or known.is_local or known.is_writer_node or known.is_detached:
                return self._shown(known, writer=opened.writer if opened is not None else None)
            path, before = known.path, known.status
        status, seen_s = self._status(path)
        with self._lock:
            if known.status is not before:
                # This mount has published the file since.
                return self._shown(known)
            if status is None or status.identity != known.status.identity:
                # The name belongs to another file now. Open files keep their content; for other
                # processes, ESTALE makes the kernel look up the name again.
                self._nodes.detach(known)
                if not known.handles:
                    raise os_error(errno.ESTALE, path)
            else:
                known.status = status
            return self._shown(known, seen_s)

    def setattr(
        self, caller: Caller, node: int, changes: SetAttributes
    ) -> tuple[Attributes, float]:
        # Changes of modes, owners and times are accepted and ignored, so that cp -p and tar work.
        if changes.size_bytes is not None:
            self.files.truncate(caller, node, changes.handle, changes.size_bytes)
        return self.getattr(caller, node, changes.handle)

    # ---- directories ----------------------------------------------------------------------

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> NodeEntry:
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
            directory = self._nodes.node(parent)
            text, path = self._child_path(directory, name)
            known = directory.children.get(text)
            if known is not None and known.local_children():
                raise os_error(errno.ENOTEMPTY, path)
            nameless = self._nameless_writers(path)
        with contextlib.ExitStack() as held:
            for writer in sorted(nameless, key=id):
                held.enter_context(writer.held())
            with self._lock:
                self._check_no_parts(path)
            try:
                self._tree.rmdir(path)
            except NotFoundError:
                if not caller.is_resent:
                    raise
            for writer in nameless:
                # With the old path, the writer's next part would create the removed folder again.
                writer.path = f"{directory_of(path)}/{writer.path.rpartition('/')[2]}".lstrip("/")
        self._detach_removed(directory, text, path)

    def _check_no_parts(self, path: str) -> None:
        """Raise ENOTEMPTY, like NFS, if the folder has parts of a nameless file being written.

        The lock is held.
        """
        if any(writer.has_parts for writer in self._nameless_writers(path)):
            raise os_error(errno.ENOTEMPTY, path)

    def _nameless_writers(self, path: str) -> list[FileWriter]:
        """Return the writers of files that lost their names in the folder; the lock is held."""
        return [
            writer
            for writer in self._nodes.writers()
            if writer.is_detached and directory_of(writer.path) == path
        ]

    def opendir(self, caller: Caller, node: int, flags: int) -> Opened:
        return Opened(handle=self._list(node))

    def _list(self, node: int, handle: int | None = None) -> int:
        with self._lock:
            directory = self._nodes.node(node)
            path = directory.attached_path
            local = [child.name for child in directory.local_children()]
        seen_s, before = self._clock(), self._listings.change_count
        try:
            infos = self._tree.stored.entries(path)
        except NotFoundError:
            if path:
                raise
            infos = []  # The root is made with the first file.
        with self._lock:
            # Files that were published since may be missing in `infos`.
            local = [name for name in local if name in directory.children]
            local += [child.name for child in directory.local_children()]
        return self._listings.open(infos, local, seen_s, before, handle)

    def readdir(
        self, caller: Caller, node: int, handle: int, offset: int, plus: bool
    ) -> Sequence[DirectoryEntry]:
        page = self._listings.read(handle, offset)
        if page is None:
            # The directory was opened by a predecessor of this process.
            self._list(node, handle)
            page = self._listings.read(handle, offset) or ()
        with self._lock:
            children = self._nodes.node(node).children
            known = [children.get(listed.name) for listed in page]
        return [
            DirectoryEntry(
                os.fsencode(listed.name),
                # A name that was never looked up may have any number but 0.
                child.shown_inode if child else hash(listed.name) & (2**62 - 1) | 2**62,
                stat.S_IFDIR if listed.is_dir else stat.S_IFREG,
                listed.cookie,
            )
            for listed, child in zip(page, known, strict=True)
        ]

    def releasedir(self, node: int, handle: int) -> None:
        self._listings.close(handle)

    def fsyncdir(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        """Do nothing: a change of names is durable when the call returns."""

    def statfs(self, caller: Caller, node: int) -> FileSystemStatistics:
        space = self._tree.backend.space()
        total = space.total_bytes if space else _UNKNOWN_SPACE_BYTES
        free = space.free_bytes if space else _UNKNOWN_SPACE_BYTES
        return FileSystemStatistics(
            total // _BLOCK_BYTES,
            free // _BLOCK_BYTES,
            free // _BLOCK_BYTES,
            block_size_bytes=_BLOCK_BYTES,
            name_max=_NAME_MAX_BYTES,
        )

    # ---- removing and renaming ------------------------------------------------------------

    def unlink(self, caller: Caller, parent: int, name: bytes) -> None:
        with self._lock:
            directory = self._nodes.node(parent)
            text, path = self._child_path(directory, name)
            known = directory.children.get(text)
            is_local = known is not None and known.is_local
            waiting = self.files.writerless_at(path)
        gone = [writer for writer in self.files.writers_of(path) if not writer.is_detached]
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
            self.files.note_nameless(waiting)
        self._detach_removed(directory, text, path)

    def _detach_removed(self, directory: Node, name: str, path: str) -> None:
        with self._lock:
            self._listings.drop(path)
            known = directory.children.get(name)
            if known is not None:
                known.kind = NodeKind.STORED
                self._nodes.detach(known)
            for writing in list(directory.writer_nodes.get(name, ())):
                self._nodes.detach(writing)
            self._nodes.note_all()

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        if flags & ~_RENAME_NOREPLACE:
            raise os_error(errno.EINVAL)
        with self._lock:
            directory, new_directory = self._nodes.node(parent), self._nodes.node(new_parent)
            text, source = self._child_path(directory, name)
            new_text, target = self._child_path(new_directory, new_name)
            if source == target:
                return
            writers = list(self._nodes.writers())
            # A writer of a removed file does not write the file that has the name now.
            named = [writer for writer in writers if not writer.is_detached]
            inside = [writer for writer in writers if writer.path.startswith(source + "/")]
            moved, taken = directory.children.get(text), new_directory.children.get(new_text)
            if flags and taken is not None and taken.is_unpublished:
                raise os_error(errno.EEXIST, target)
            self._check_writers_inside(source, inside)
            if moved is not None and moved.status.is_dir and taken and taken.status.is_dir:
                if taken.local_children():
                    raise os_error(errno.ENOTEMPTY, target)
                self._check_no_parts(target)
            waiting = self.files.writerless_at(target)
        replaced = self.files.writers_of(target)
        moving = [writer for writer in named if writer.path == source and not writer.has_failed]
        with contextlib.ExitStack() as held:
            # This waits for a publication under the old name that has begun. The lock of the table
            # is not held, so that other requests are served. The order of the writers is fixed, so
            # that two renames do not wait for each other.
            for writer in sorted({*moving, *replaced, *inside}, key=id):
                held.enter_context(writer.held())
            is_moved = directory.id != new_directory.id
            if is_moved and any(writer.has_new_parts for writer in moving):
                # The parts lie beside the file, and the two cannot move in one step.
                raise os_error(errno.EXDEV, target)
            due = {handle.writer for handle in self.files.due()}
            begun = [writer for writer in moving if writer in due and writer.starts_anew]
            try:
                self._rename_stored(source, target, begun, replace=not flags)
            except NotFoundError:
                if not caller.is_resent or self._status(target)[0] is None:
                    raise
            for writer in replaced:
                if writer not in begun:
                    writer.detach()
            for writer in moving:
                writer.path = target
            for writer in inside:
                writer.path = target + writer.path[len(source) :]
            with self._lock:
                self.files.note_nameless(waiting)
                self._nodes.move_bases(source, target)
                known = self._move_nodes(
                    directory, text, new_directory, new_text, is_new=bool(begun)
                )
                handles = [h for h in self._nodes.handles.values() if h.writer in moving]
                self._nodes.note_all()
                self._listings.clear()
        self._refresh_moved(known, source, target)
        for handle in handles:
            self.files.publish_moved(handle)

    def _check_writers_inside(self, source: str, inside: Sequence[FileWriter]) -> None:
        """Raise EBUSY if the directory `source` has parts of files that are being written.

        The rename would move the parts away from their writers. The lock is held.
        """
        if any(
            writer.was_written and writer.has_parts
            if writer.is_detached
            else writer.needs_publishing
            for writer in inside
        ):
            raise os_error(errno.EBUSY, source)

    def _rename_stored(
        self, source: str, target: str, begun: Sequence[FileWriter], *, replace: bool
    ) -> None:
        """Rename in the storage. `begun`: writers that will replace the content of the file.

        They publish under the new name only, so that a refused rename publishes nothing. Writers
        that append publish after the rename.
        """
        if not begun:
            self._tree.rename(source, target, replace=replace)
            return
        self._tree.rename_unpublished(
            source,
            target,
            [functools.partial(writer.publish_as, target) for writer in begun],
            replace=replace,
            has_parts=any(writer.has_parts for writer in begun),
        )

    def _move_nodes(
        self, directory: Node, name: str, new_directory: Node, new_name: str, *, is_new: bool
    ) -> Node | None:
        """Rename the nodes of a name. Return the node that lookups find. The lock is held.

        `is_new`: whether the rename published new content, so that the old file is gone.
        """
        nodes = self._nodes
        for replaced in list(new_directory.writer_nodes.get(new_name, ())):
            nodes.detach(replaced)
        taken = new_directory.children.get(new_name)
        if taken is not None:
            nodes.detach(taken)
        known = directory.children.get(name)
        if known is not None and known.is_local:
            nodes.make_writer_node(known)
            known = None
        for writing in list(directory.writer_nodes.get(name, ())):
            nodes.move(writing, new_directory, new_name)
        if known is not None and is_new:
            nodes.detach(known)
            return None
        if known is not None:
            nodes.move(known, new_directory, new_name)
        return known

    def _refresh_moved(self, node: Node | None, source: str, target: str) -> None:
        """Read the status of a renamed file again.

        The identity of an ordinary file includes its path, so an open with the old identity would
        be refused.
        """
        if node is None or node.status.is_dir:
            return
        path, before = node.path, self._listings.change_count
        status, _ = self._status(path)
        with self._lock:
            if status is None or node.is_detached or self._listings.has_changed(path, before):
                return
            is_same = status.identity == moved_identity(node.status.identity, source, target)
            if node.had_readers and not is_same:
                # Another machine had replaced the renamed file: open descriptors of the old file
                # keep its size, and the next open looks up the name again.
                return
            node.status = status
            self._nodes.note_node(node)

    # ---- open files -----------------------------------------------------------------------

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> tuple[NodeEntry, Opened]:
        directory, text, path = self._new_name(parent, name)
        with self._lock:
            again = self.files.opened_before(caller)
            if again is not None:
                return self._entry(again.node), open_reply(again)
        status, _ = self._status(path)
        opener = process_of(caller)
        with self._lock:
            known = directory.children.get(text)
            if status is not None:
                known = self._refreshed_node(directory, text, status)
            if known is None or not (status is not None or known.is_unpublished):
                handle = self.files.create(caller, directory, text, path, flags, opener)
                return self._entry(handle.node), open_reply(handle)
            if flags & os.O_EXCL:
                raise os_error(errno.EEXIST, path)
            if known.status.is_dir:
                raise os_error(errno.EISDIR, path)
            if flags & os.O_ACCMODE != os.O_RDONLY:
                known = self._nodes.add_writer_node(directory, text, known.status)
        try:
            opened = self.files.open(caller, known.id, flags)
        except BaseException:
            with self._lock:
                if known.is_writer_node and not known.handles:
                    self._nodes.detach(known)
            raise
        return self._entry(known), opened

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        return self.files.open(caller, node, flags)

    def cancel_open(self, node: int, handle: int, flags: int) -> None:
        self.files.cancel(handle)

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        return self.files.read(caller, handle, offset, length)

    def write(
        self,
        caller: Caller,
        node: int,
        handle: int,
        offset: int,
        data: bytearray | memoryview,
        flags: int,
    ) -> int:
        return self.files.write(caller, handle, offset, data)

    def flush(self, caller: Caller, node: int, handle: int) -> None:
        self.files.flush(caller, handle)

    def fsync(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        self.files.fsync(handle)

    def release(self, node: int, handle: int, flags: int) -> None:
        self.files.release(handle)
