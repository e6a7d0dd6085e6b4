"""Read-only file system over a tree, as the kernel sees it.

A node id is an inode number plus one. The tree never changes, so that the kernel may cache every
answer for ever: names, missing names, attributes and pages. Handles have no state, so that a new
worker can take over from a killed one. Thread-safe; `read` waits no longer than the deadline of the
streams.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Sequence
from typing import TypeAlias

from bootseer.blob.tree import Extent, Tree
from bootseer.errors import BootseerError, DeadlineError
from bootseer.fuse.kernel.operations import (
    Attributes,
    Buffer,
    Caller,
    DirectoryEntry,
    FileSystemStatistics,
    NodeEntry,
    Opened,
    Operations,
)
from bootseer.prefetch.reading.image_bytes import ImageBytes

_log = logging.getLogger(__name__)

_TTL_S = 365 * 86_400.0
"""Life of an answer in the kernel: practically for ever."""

_FIRST_COOKIE = 3
"""First directory cookie of a name; cookies up to 2 belong to "." and ".."."""
_REPLY_NAMES_MAX = 1024
"""Names in one answer: more than fit into the kernel's buffer."""

_ZEROS = bytes(1024 * 1024)
_NEGATIVE = NodeEntry(None, entry_ttl_s=_TTL_S)
_DIRECTORY_BYTES = 4096
"""Size of a directory in stat; not 0, since some tools divide by it."""


_Content: TypeAlias = tuple[int, int, int, tuple[Extent, ...]]
"""(size, blob, offset in its stream, extents) of a file. Nearly all files are one extent; for
others the blob is -1 and the offset 0."""


class TreeFileSystem(Operations):
    """Operations of the file system over `tree`, with file contents from `streams`."""

    def __init__(
        self,
        tree: Tree,
        streams: ImageBytes,
        *,
        on_access: Callable[[int, int, int], None] | None = None,
        owner: tuple[int, int] | None = None,
        on_mounted: Callable[[], None] | None = None,
        on_destroyed: Callable[[], None] | None = None,
    ) -> None:
        """Make the file system.

        `on_access` is called with (inode, offset, length) of every read of the kernel, and
        `on_destroyed` once the tree is unmounted everywhere. `owner` are user and group ids to be
        shown for all files: inside a user namespace, the image's owners do not exist.
        """
        self._tree = tree
        self._streams = streams
        self._on_access = on_access
        self._owner = owner
        self._on_mounted = on_mounted
        self._on_destroyed = on_destroyed
        # Contents of files that were read, by node.
        self._contents: dict[int, _Content] = {}
        self._has_xattrs = bool(tree.columns.xattr_sets)

    def mounted(self) -> None:
        if self._on_mounted is not None:
            self._on_mounted()

    def destroyed(self) -> None:
        if self._on_destroyed is not None:
            self._on_destroyed()

    # ---- names and attributes -------------------------------------------------------------

    def _attributes(self, number: int) -> Attributes:
        # Thousands of files are looked up in a start, so that no `Inode` is made for each.
        tree, columns = self._tree, self._tree.columns
        mode = columns.mode[number]
        blocks: int | None = None
        # The columns of files are not loaded for a directory: mounting an overlay over the tree,
        # for which a job waits, only takes the attributes of the root.
        if stat.S_ISDIR(mode):
            size = _DIRECTORY_BYTES
        elif stat.S_ISLNK(mode):
            size = len(tree.link_target(number))
        else:
            size = columns.size_bytes[number]
            blocks = sum([-(-extent[3] // 512) for extent in tree.extents(number)])
        uid, gid = self._owner or (columns.uid[number], columns.gid[number])
        time_ns = columns.mtime_ns[number]
        return Attributes(
            node=number + 1,
            mode=mode,
            size_bytes=size,
            link_count=tree.link_count(number),
            uid=uid,
            gid=gid,
            rdev=columns.rdev[number],
            atime_ns=time_ns,
            mtime_ns=time_ns,
            ctime_ns=time_ns,
            blocks_512=blocks,
        )

    def _entry(self, number: int) -> NodeEntry:
        return NodeEntry(self._attributes(number), entry_ttl_s=_TTL_S, attributes_ttl_s=_TTL_S)

    def lookup(self, caller: Caller, parent: int, name: bytes) -> NodeEntry:
        number = self._tree.lookup(parent - 1, name)
        return _NEGATIVE if number is None else self._entry(number)

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        return self._attributes(self._number(node)), _TTL_S

    def _number(self, node: int) -> int:
        if not 0 < node <= self._tree.inode_count:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return node - 1

    def readlink(self, caller: Caller, node: int) -> bytes:
        return self._tree.link_target(self._number(node))

    def statfs(self, caller: Caller, node: int) -> FileSystemStatistics:
        sizes = sum(blob.stream_length for blob in self._tree.blobs)
        return FileSystemStatistics(
            blocks=-(-sizes // 4096),
            blocks_free=0,
            blocks_available=0,
            files=self._tree.inode_count,
        )

    # ---- files ----------------------------------------------------------------------------

    # `open` is not implemented (ENOSYS): the kernel opens files without a request and keeps pages.

    def _content(self, node: int) -> _Content:
        known = self._contents.get(node)
        if known is None:
            number = self._number(node)
            size = self._tree.columns.size_bytes[number]
            extents = tuple([Extent(*extent) for extent in self._tree.extents(number)])
            whole = extents[0] if len(extents) == 1 else None
            if whole is None or whole.file_offset or whole.length != size:
                known = (size, -1, 0, extents)
            else:
                known = (size, whole.blob, whole.blob_offset, extents)
            self._contents[node] = known
        return known

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        # Few calls, also in the methods called: a reader waits for each, and the interpreter's code
        # has mostly left the processor's caches before the next request.
        size, blob, start, extents = self._contents.get(node) or self._content(node)
        end = min(offset + length, size)
        if offset >= end:
            return b""
        if self._on_access is not None:
            self._on_access(node - 1, offset, end - offset)
        try:
            if blob >= 0:
                count = end - offset
                return self._streams.read(
                    blob, start + offset, count, reader=node, end=start + size
                )
            return self._gather(node, extents, offset, end)
        except BootseerError as error:
            path = os.fsdecode(self._tree.path(node - 1))
            _log.error("cannot read bytes %d to %d of /%s: %s", offset, end, path, error)
            # ENOENT of a missing blob would say that the file does not exist.
            code = errno.ETIMEDOUT if isinstance(error, DeadlineError) else errno.EIO
            raise OSError(code, os.strerror(code)) from error

    def _gather(
        self, node: int, extents: Sequence[Extent], offset: int, end: int
    ) -> Sequence[Buffer]:
        pieces: list[Buffer] = []
        position = offset
        budget = self._streams.new_budget()
        for extent in extents:
            start = max(position, extent.file_offset)
            stop = min(end, extent.file_offset + extent.length)
            if start >= stop:
                continue
            self._add_zeros(pieces, start - position)
            shift = extent.blob_offset - extent.file_offset
            pieces.append(
                self._streams.read(
                    extent.blob,
                    start + shift,
                    stop - start,
                    reader=node,
                    end=extent.blob_offset + extent.length,
                    budget=budget,
                )
            )
            position = stop
        self._add_zeros(pieces, end - position)
        return pieces

    @staticmethod
    def _add_zeros(pieces: list[Buffer], count: int) -> None:
        while count > 0:
            part = min(count, len(_ZEROS))
            pieces.append(memoryview(_ZEROS)[:part])
            count -= part

    def lseek(self, caller: Caller, node: int, handle: int, offset: int, whence: int) -> int:
        size, _, _, extents = self._content(node)
        if not 0 <= offset < size:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        wants_data = whence == os.SEEK_DATA
        position = offset
        for extent in extents:
            end = extent.file_offset + extent.length
            if end <= position:
                continue
            if wants_data:
                return max(position, extent.file_offset)
            if position < extent.file_offset:
                return position
            position = end
        if wants_data:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return min(position, size)

    # ---- directories ----------------------------------------------------------------------

    def opendir(self, caller: Caller, node: int, flags: int) -> Opened:
        # The kernel sends no further requests to open directories, and keeps their names.
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def readdir(
        self, caller: Caller, node: int, handle: int, offset: int, plus: bool
    ) -> Sequence[DirectoryEntry]:
        first = max(offset - _FIRST_COOKIE + 1, 0)
        # The kernel asks again for names that do not fit.
        names = self._tree.children(self._number(node), first, _REPLY_NAMES_MAX)
        entries = []
        for i, name in enumerate(names, first):
            number = name.inode
            entries.append(
                DirectoryEntry(
                    name.name,
                    number + 1,
                    self._tree.mode(number),
                    i + _FIRST_COOKIE,
                    self._entry(number) if plus else None,
                )
            )
        return entries

    # ---- extended attributes --------------------------------------------------------------

    def getxattr(self, caller: Caller, node: int, name: bytes) -> bytes:
        if not self._has_xattrs:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        for key, value in self._tree.inode(self._number(node)).xattrs:
            if key == name:
                return value
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    def listxattr(self, caller: Caller, node: int) -> Sequence[bytes]:
        # Other file systems answer with an empty list instead of ENOSYS.
        if not self._has_xattrs:
            return ()
        return [key for key, _ in self._tree.inode(self._number(node)).xattrs]
