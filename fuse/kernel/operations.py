"""The file-system interface that a `Server` drives: what the image tree and the striped file
system both implement.

Methods are called from several server threads at once. A method answers by returning, or fails by
raising any exception; `bootseer.errors.errno_of` turns it into the reply's errno. A method that is
not overridden answers ENOSYS, and the kernel stops asking where the protocol says so.
Node ids are 64-bit, the root is 1; names are raw bytes. Every method must end within its own
deadline: a process that waits for a reply cannot be killed.
"""

import errno
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec import Struct

ROOT_NODE = 1
# Set in the number of a request that another process may have begun (FUSE_UNIQUE_RESEND, 7.40).
_UNIQUE_RESENT = 1 << 63

Buffer: TypeAlias = bytes | bytearray | memoryview


class Attributes(Struct, frozen=True):
    """What stat(2) shows. `mode` holds file type and permissions; times are ns since 1970."""

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


class Entry(Struct, frozen=True):
    """The answer to a lookup. Each one sent adds 1 to the node's lookup count.

    `attributes=None` is a negative entry: the kernel remembers for `entry_ttl_s` that the name
    does not exist.
    """

    attributes: Attributes | None
    entry_ttl_s: float = 0.0
    attributes_ttl_s: float = 0.0
    generation: int = 0


class Opened(Struct, frozen=True):
    """The answer to open and opendir.

    `direct_io` bypasses the page cache; `keep_cache` keeps pages of earlier opens;
    `passthrough_fd` lets the kernel serve the file from that descriptor without asking us again
    (falls back to ordinary reads where the kernel or the privileges do not allow it, so `read`
    must work all the same). The server dups `passthrough_fd` as needed; the caller keeps its own.
    Never mix passthrough and cached opens of one node (the kernel answers EIO).
    """

    handle: int = 0
    direct_io: bool = False
    keep_cache: bool = False
    cache_directory: bool = False
    parallel_direct_writes: bool = False
    no_flush: bool = False
    passthrough_fd: int | None = None


class DirectoryEntry(Struct, frozen=True):
    """One name of a directory. `offset` is the cookie that continues *after* this entry (> 0)."""

    name: bytes
    node: int
    mode: int
    """File type bits are enough for readdir."""
    offset: int
    entry: Entry | None = None
    """For readdirplus; None where only the name is known."""


class FileSystemStatistics(Struct, frozen=True):
    """What statvfs(2) shows, in blocks of `block_size_bytes`."""

    blocks: int
    blocks_free: int
    blocks_available: int
    files: int = 0
    files_free: int = 0
    block_size_bytes: int = 4096
    name_max: int = 255


class SetAttributes(Struct, frozen=True):
    """What setattr wants changed; None means unchanged. Times: ns since 1970."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size_bytes: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    handle: int | None = None
    lock_owner: int | None = None
    """As `Caller.lock_owner`."""


class Caller(Struct, frozen=True, eq=False):
    """The caller: the credentials of the process behind a request. Read-only.

    A long wait should look at `is_interrupted`, which becomes true when the kernel sends
    INTERRUPT for the request, or when the server has answered in the operation's stead.
    """

    uid: int
    gid: int
    pid: int
    unique: int = 0
    interrupts: "frozenset[int] | set[int]" = frozenset()
    lock_owner: int | None = None
    """Table of open files that the process uses: the same for all its threads, another one in each
    child. Known for a write, a flush and a truncation, else None."""

    @property
    def is_interrupted(self) -> bool:
        """Whether the process behind this request has been asked to stop waiting."""
        return self.unique in self.interrupts

    @property
    def is_resent(self) -> bool:
        """Whether a predecessor of this process may have done, in part or whole, what is asked."""
        return bool(self.unique & _UNIQUE_RESENT)

    def owning(self, lock_owner: int) -> "Caller":
        """Return the same caller with its table of open files."""
        return Caller(self.uid, self.gid, self.pid, self.unique, self.interrupts, lock_owner)

    @property
    def request(self) -> int:
        """The request's number, the same when it is asked again."""
        return self.unique & ~_UNIQUE_RESENT


def _refuse(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Operations:
    """A file system. Override what it can do."""

    store_pages: Callable[[int, int, Buffer], bool] | None = None
    """`notify_store` of the server, which puts it here before it calls `mounted`; None where pages
    must not be stored: a server killed meanwhile would not end, nor who waits for it, were there no
    `MountOptions.kernel_deadline_s`."""
    forget_pages: Callable[[int, int, int], bool] | None = None
    """`notify_inval_inode` of the server, which puts it here likewise."""

    def mounted(self) -> None:
        """Called once, after INIT, before the first request. Start threads here."""

    def all_closed(self) -> None:
        """Called before `destroyed` where the mount ended because nothing on it is open any more.
        The kernel drops requests that nobody has read by then: some files that were closed last
        were not released. Must not raise."""

    def destroyed(self) -> None:
        """Called once, after the last request. Release everything. Must not raise."""

    # ---- names and attributes -------------------------------------------------------------

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Entry:
        """The entry `name` in directory `parent`; a negative Entry or ENOENT if there is none."""
        raise _refuse(errno.ENOENT)

    def forget(self, node: int, count: int) -> None:
        """The kernel dropped `count` lookups of `node`. Must not raise."""

    def dropped(self, node: int) -> None:
        """The lookup count of `node`, which the server keeps, fell to zero and no request that
        could raise it is under way: what belongs to the node can be freed. Must not raise, and
        must not wait: lookups wait for it.

        May be called again if the node was looked up again. Not called for what a crashed
        predecessor looked up (see `supervise`).
        """

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        """The attributes and for how many seconds they may be cached."""
        raise _refuse(errno.ENOSYS)

    def setattr(
        self, caller: Caller, node: int, changes: SetAttributes
    ) -> tuple[Attributes, float]:
        """Change attributes (chmod, chown, truncate, utimens); returns as `getattr`."""
        raise _refuse(errno.ENOSYS)

    def readlink(self, caller: Caller, node: int) -> bytes:
        """The target of a symbolic link."""
        raise _refuse(errno.EINVAL)

    def access(self, caller: Caller, node: int, mask: int) -> None:
        """access(2); only asked where the mount lacks `default_permissions`."""
        raise _refuse(errno.ENOSYS)

    # ---- changing the tree ----------------------------------------------------------------

    def mknod(self, caller: Caller, parent: int, name: bytes, mode: int, rdev: int) -> Entry:
        raise _refuse(errno.EPERM)

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> Entry:
        raise _refuse(errno.EPERM)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> None:
        raise _refuse(errno.EPERM)

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> None:
        raise _refuse(errno.EPERM)

    def symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Entry:
        raise _refuse(errno.EPERM)

    def link(self, caller: Caller, node: int, parent: int, name: bytes) -> Entry:
        raise _refuse(errno.EPERM)

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """rename(2) with renameat2's flags (RENAME_NOREPLACE = 1, RENAME_EXCHANGE = 2)."""
        raise _refuse(errno.EPERM)

    # ---- files ----------------------------------------------------------------------------

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        """open(2). ENOSYS means: the kernel never asks again and every open succeeds with cached
        pages kept (only where no file wants `direct_io` or passthrough)."""
        raise _refuse(errno.ENOSYS)

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> tuple[Entry, Opened]:
        """open(2) with O_CREAT of a name that does not exist. `mode` has the umask applied."""
        raise _refuse(errno.EPERM)

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        """Up to `length` bytes from `offset`; shorter only at the end of the file.

        Several buffers are sent with one writev: no need to join them. They must stay unchanged
        until the reply is written, which is before this thread calls `read` again. Views of a
        mapped file are the fastest of all, but not under `supervise`: see there.
        """
        raise _refuse(errno.EIO)

    def write(
        self,
        caller: Caller,
        node: int,
        handle: int,
        offset: int,
        data: bytearray | memoryview,
        flags: int,
    ) -> int:
        """Returns how many bytes were taken. `data` is only valid during the call if it is a
        memoryview; a bytearray is given away, so that much data need not be copied."""
        raise _refuse(errno.EROFS)

    def flush(self, caller: Caller, node: int, handle: int) -> None:
        """Each close(2) of a descriptor; its error becomes close's error. ENOSYS: never ask.

        A child that inherited the descriptor closes it as well, when it ends at the latest:
        `caller.lock_owner` tells the two apart."""
        raise _refuse(errno.ENOSYS)

    def fsync(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        raise _refuse(errno.ENOSYS)

    def release(self, node: int, handle: int, flags: int) -> None:
        """The last descriptor of this open is gone. No process sees an error."""

    def cancel_open(self, node: int, handle: int, flags: int) -> None:
        """Undo an open or create whose reply the kernel did not take: no process has the file."""
        self.release(node, handle, flags)

    def fallocate(
        self, caller: Caller, node: int, handle: int, offset: int, length: int, mode: int
    ) -> None:
        raise _refuse(errno.EOPNOTSUPP)

    def lseek(self, caller: Caller, node: int, handle: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE only. ENOSYS: the kernel treats the file as all data."""
        raise _refuse(errno.ENOSYS)

    # ---- directories ----------------------------------------------------------------------

    def opendir(self, caller: Caller, node: int, flags: int) -> Opened:
        return Opened()

    def readdir(
        self, caller: Caller, node: int, handle: int, offset: int, plus: bool
    ) -> Sequence[DirectoryEntry]:
        """Entries after the cookie `offset` (0: from the start), "." and ".." included by the
        server itself, never by the implementation. May return more than fits in one reply; the
        server sends what fits and asks again with the last sent cookie. With `plus`, each entry
        that was sent with an `Entry` counts as one lookup of its node; entries that did not fit
        are not counted. Cookies must be stable while the handle is open, and > 2.
        """
        raise _refuse(errno.ENOSYS)

    def releasedir(self, node: int, handle: int) -> None: ...

    def fsyncdir(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        raise _refuse(errno.ENOSYS)

    # ---- the rest -------------------------------------------------------------------------

    def statfs(self, caller: Caller, node: int) -> FileSystemStatistics:
        return FileSystemStatistics(0, 0, 0)

    def getxattr(self, caller: Caller, node: int, name: bytes) -> bytes:
        """ENODATA if unset. ENOSYS: the kernel never asks again (saves a round trip a write)."""
        raise _refuse(errno.ENOSYS)

    def listxattr(self, caller: Caller, node: int) -> Sequence[bytes]:
        raise _refuse(errno.ENOSYS)

    def setxattr(self, caller: Caller, node: int, name: bytes, value: bytes, flags: int) -> None:
        raise _refuse(errno.ENOSYS)

    def removexattr(self, caller: Caller, node: int, name: bytes) -> None:
        raise _refuse(errno.ENOSYS)
