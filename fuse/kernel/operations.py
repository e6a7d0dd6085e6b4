"""The file-system interface that a `FuseServer` drives.

Methods are called from several server threads at once. A method may raise any exception;
`bootseer.errors.errno_of` converts it to the reply's errno. A method that is not overridden answers
ENOSYS, and the kernel stops asking if the protocol says so. Node ids have 64 bits, the root is 1;
names are raw bytes. Every method must end within its own deadline: a process that waits for a reply
cannot be killed. Requests that no file system of Bootseer supports (links, device nodes, fallocate,
setting xattrs) have no method: `dispatch` refuses them.
"""

import errno
import os
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from msgspec import Struct

ROOT_NODE = 1
# Flag in the number of a request that another process may have begun (FUSE_UNIQUE_RESEND, 7.40).
_UNIQUE_RESENT = 1 << 63

Buffer: TypeAlias = bytes | bytearray | memoryview


class Attributes(Struct, frozen=True):
    """Attributes of a node, as stat(2) shows them.

    `mode` holds file type and permissions; times are ns since 1970.
    """

    node: int
    mode: int
    size_bytes: int
    link_count: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    block_size_bytes: int = 4096
    blocks_512: int | None = None
    """512-byte blocks in use; None: derived from `size_bytes`."""
    inode: int = 0
    """Inode number to show; 0: that of the node."""


class NodeEntry(Struct, frozen=True):
    """Answer to a lookup. Each answer that is sent adds 1 to the node's lookup count.

    `attributes=None` is a negative entry: the kernel remembers for `entry_ttl_s` that the name
    does not exist.
    """

    attributes: Attributes | None
    entry_ttl_s: float = 0.0
    attributes_ttl_s: float = 0.0


class Opened(Struct, frozen=True):
    """Answer to open and opendir.

    `direct_io` bypasses the page cache; `keep_cache` keeps pages of earlier opens. With
    `passthrough_fd` the kernel reads the file from that descriptor and does not ask the server
    (if kernel and privileges allow it; else `read` is called). The caller keeps its descriptor.
    Passthrough and cached opens of one node must not be mixed (the kernel answers EIO).
    """

    handle: int = 0
    direct_io: bool = False
    keep_cache: bool = False
    parallel_direct_writes: bool = False
    no_flush: bool = False
    passthrough_fd: int | None = None


class DirectoryEntry(Struct, frozen=True):
    """Name in a directory."""

    name: bytes
    node: int
    mode: int
    """File type bits are enough for readdir."""
    offset: int
    """Cookie (> 0) with which a listing continues after this entry."""
    entry: NodeEntry | None = None
    """For readdirplus; None if only the name is known."""


class FileSystemStatistics(Struct, frozen=True):
    """Space and file counts, as statvfs(2) shows them, in blocks of `block_size_bytes`."""

    blocks: int
    blocks_free: int
    blocks_available: int
    files: int = 0
    files_free: int = 0
    block_size_bytes: int = 4096
    name_max: int = 255


class SetAttributes(Struct, frozen=True):
    """Attributes to change; None means unchanged. Times: ns since 1970."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size_bytes: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    handle: int | None = None
    lock_owner: int | None = None
    """Value for `Caller.lock_owner`."""


class Caller(Struct, frozen=True, eq=False):
    """Credentials of the process behind a request. Read-only.

    A long wait should check `is_interrupted`, which becomes true when the kernel sends INTERRUPT
    for the request, or when the server has answered it instead of the operation.
    """

    uid: int
    gid: int
    pid: int
    unique: int = 0
    interrupts: "frozenset[int] | set[int]" = frozenset()
    lock_owner: int | None = None
    """Identity of the process's table of open files, which its threads share and its children do
    not. Known for a write, a flush and a truncation, else None."""

    @property
    def is_interrupted(self) -> bool:
        """Return whether the process behind this request has been asked to stop waiting."""
        return self.unique in self.interrupts

    @property
    def is_resent(self) -> bool:
        """Return whether a predecessor of this process may have begun the request."""
        return bool(self.unique & _UNIQUE_RESENT)

    def with_lock_owner(self, lock_owner: int) -> "Caller":
        """Return the caller with the identity of its table of open files."""
        return Caller(self.uid, self.gid, self.pid, self.unique, self.interrupts, lock_owner)

    @property
    def request(self) -> int:
        """Return the request's number, which is the same when the kernel repeats the request."""
        return self.unique & ~_UNIQUE_RESENT


def _os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Operations:
    """File system. Subclasses override the methods of the operations that they support."""

    store_pages: Callable[[int, int, Buffer], bool] | None = None
    """`FuseServer.notify_store`, set before `mounted` is called. None if the mount has no
    `MountOptions.kernel_deadline_s`: a server killed while it stores pages would never end."""
    forget_pages: Callable[[int, int, int], bool] | None = None
    """`FuseServer.notify_inval_inode`, set before `mounted` is called."""

    def mounted(self) -> None:
        """Called once, after INIT, before the first request. Start threads here."""

    def all_closed(self) -> None:
        """Called before `destroyed` if the mount ended because no file on it is open any more.

        The kernel drops requests that were not read by then, so the files that were closed last may
        not have been released. Must not raise.
        """

    def destroyed(self) -> None:
        """Called once, after the last request. Release everything. Must not raise."""

    # ---- names and attributes -------------------------------------------------------------

    def lookup(self, caller: Caller, parent: int, name: bytes) -> NodeEntry:
        """Return the entry `name` of `parent`; a negative entry, or ENOENT, if there is none."""
        raise _os_error(errno.ENOENT)

    def inherited_nodes(self) -> Collection[int]:
        """Return the nodes of a crashed predecessor that the kernel may still name.

        Called once, after `mounted`.
        """
        return ()

    def dropped(self, node: int) -> None:
        """Called when the kernel has no reference to `node` any more: its data can be freed.

        Must not raise and must not wait, since lookups wait for it. May be called again if the node
        was looked up again.
        """

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        """Return the attributes, and the seconds for which the kernel may cache them."""
        raise _os_error(errno.ENOSYS)

    def setattr(
        self, caller: Caller, node: int, changes: SetAttributes
    ) -> tuple[Attributes, float]:
        """Change attributes (chmod, chown, truncate, utimens). Return as `getattr`."""
        raise _os_error(errno.ENOSYS)

    def readlink(self, caller: Caller, node: int) -> bytes:
        """Return the target of a symbolic link."""
        raise _os_error(errno.EINVAL)

    # ---- changing the tree ----------------------------------------------------------------

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> NodeEntry:
        raise _os_error(errno.EPERM)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> None:
        raise _os_error(errno.EPERM)

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> None:
        raise _os_error(errno.EPERM)

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """Rename as renameat2(2), with its flags (RENAME_NOREPLACE = 1, RENAME_EXCHANGE = 2)."""
        raise _os_error(errno.EPERM)

    # ---- files ----------------------------------------------------------------------------

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        """Open a file.

        After ENOSYS the kernel never asks again, and every open succeeds with cached pages kept: an
        option for file systems without `direct_io` and passthrough.
        """
        raise _os_error(errno.ENOSYS)

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> tuple[NodeEntry, Opened]:
        """Create and open a file whose name does not exist. `mode` has the umask applied."""
        raise _os_error(errno.EPERM)

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        """Return up to `length` bytes from `offset`, fewer only at the end of the file.

        Several buffers are sent with one writev and need not be joined. They must stay unchanged
        until the reply is written, which is before this thread calls `read` again. Views of a
        mapped file are the fastest, but must not be used under supervision.
        """
        raise _os_error(errno.EIO)

    def write(
        self,
        caller: Caller,
        node: int,
        handle: int,
        offset: int,
        data: bytearray | memoryview,
        flags: int,
    ) -> int:
        """Write `data`, and return the number of bytes written.

        A memoryview is valid during the call only. The callee may keep a bytearray, so that large
        writes need not be copied.
        """
        raise _os_error(errno.EROFS)

    def flush(self, caller: Caller, node: int, handle: int) -> None:
        """Called for each close(2) of a descriptor; close(2) returns its error.

        A child that inherited the descriptor closes its copy, at the latest when it ends:
        `caller.lock_owner` tells parent and child apart. After ENOSYS the kernel never asks again.
        """
        raise _os_error(errno.ENOSYS)

    def fsync(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        raise _os_error(errno.ENOSYS)

    def release(self, node: int, handle: int, flags: int) -> None:
        """Called when the last descriptor of this open is closed. No process sees an error."""

    def cancel_open(self, node: int, handle: int, flags: int) -> None:
        """Undo an open or create whose reply the kernel did not take, so that no process has it."""
        self.release(node, handle, flags)

    def lseek(self, caller: Caller, node: int, handle: int, offset: int, whence: int) -> int:
        """Return the offset for SEEK_DATA or SEEK_HOLE.

        After ENOSYS the kernel treats the whole file as data.
        """
        raise _os_error(errno.ENOSYS)

    # ---- directories ----------------------------------------------------------------------

    def opendir(self, caller: Caller, node: int, flags: int) -> Opened:
        return Opened()

    def readdir(
        self, caller: Caller, node: int, handle: int, offset: int, plus: bool
    ) -> Sequence[DirectoryEntry]:
        """Return entries after the cookie `offset` (0: from the start), without "." and "..".

        May return more than fits into one reply; the server sends the entries that fit, and the
        kernel asks again with the last sent cookie. With `plus`, each sent entry that has a
        `NodeEntry` counts as one lookup of its node. Cookies must be stable while the handle is
        open, and > 2.
        """
        raise _os_error(errno.ENOSYS)

    def releasedir(self, node: int, handle: int) -> None: ...

    def fsyncdir(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        raise _os_error(errno.ENOSYS)

    # ---- the rest -------------------------------------------------------------------------

    def statfs(self, caller: Caller, node: int) -> FileSystemStatistics:
        return FileSystemStatistics(0, 0, 0)

    def getxattr(self, caller: Caller, node: int, name: bytes) -> bytes:
        """Return an xattr's value; ENODATA if it is unset.

        After ENOSYS the kernel never asks again, which saves a round trip for each write.
        """
        raise _os_error(errno.ENOSYS)

    def listxattr(self, caller: Caller, node: int) -> Sequence[bytes]:
        raise _os_error(errno.ENOSYS)
