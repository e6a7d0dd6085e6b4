"""Read-write mirror of a directory with all FUSE operations, as a reference for the server's tests.

A node is an O_PATH descriptor of the mirrored inode, so renames and hard links need no paths. Not
part of the product: new files get the server's own credentials.
"""

import ctypes
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

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

_libc = ctypes.CDLL(None, use_errno=True)
_NAMELESS = b""


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class PassthroughFileSystem(Operations):
    """Mirror of the directory `root`.

    `direct_io`, `passthrough` and `ttl_s` choose how files are opened and cached.
    """

    def __init__(
        self,
        root: Path,
        *,
        direct_io: bool = False,
        passthrough: bool = False,
        ttl_s: float = 1.0,
    ) -> None:
        self.direct_io = direct_io
        self.passthrough = passthrough
        self.ttl_s = ttl_s
        self.destroyed_count = 0
        self._lock = threading.Lock()
        self._next = ROOT_NODE + 1
        self._listings: dict[int, list[bytes]] = {}
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
        status = os.fstat(root_fd)
        self._fds = {ROOT_NODE: root_fd}
        self._nodes = {(status.st_dev, status.st_ino): ROOT_NODE}
        self._keys = {ROOT_NODE: (status.st_dev, status.st_ino)}

    @property
    def node_count(self) -> int:
        return len(self._fds)

    def destroyed(self) -> None:
        self.destroyed_count += 1
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self._fds[node]}"

    def _attributes(self, node: int, s: os.stat_result) -> Attributes:
        return Attributes(
            node=node,
            mode=s.st_mode,
            size_bytes=s.st_size,
            link_count=s.st_nlink,
            uid=s.st_uid,
            gid=s.st_gid,
            rdev=s.st_rdev,
            atime_ns=s.st_atime_ns,
            mtime_ns=s.st_mtime_ns,
            ctime_ns=s.st_ctime_ns,
            block_size_bytes=s.st_blksize,
            blocks_512=s.st_blocks,
        )

    def _entry(self, parent: int, name: bytes) -> NodeEntry:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._fds[parent])
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            node = self._nodes.get(key)
            if node is None:
                node, self._next = self._next, self._next + 1
                self._nodes[key], self._keys[node], self._fds[node] = node, key, fd
            else:
                os.close(fd)
        return NodeEntry(self._attributes(node, status), self.ttl_s, self.ttl_s)

    def lookup(self, caller: Caller, parent: int, name: bytes) -> NodeEntry:
        try:
            return self._entry(parent, name)
        except FileNotFoundError:
            return NodeEntry(None, self.ttl_s)

    def dropped(self, node: int) -> None:
        if node == ROOT_NODE:
            return
        with self._lock:
            os.close(self._fds.pop(node))
            del self._nodes[self._keys.pop(node)]

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        return self._attributes(node, os.fstat(self._fds[node])), self.ttl_s

    def setattr(
        self, caller: Caller, node: int, changes: SetAttributes
    ) -> tuple[Attributes, float]:
        path = self._path(node)
        if changes.mode is not None:
            os.chmod(path, stat.S_IMODE(changes.mode))
        if changes.uid is not None or changes.gid is not None:
            uid = -1 if changes.uid is None else changes.uid
            gid = -1 if changes.gid is None else changes.gid
            os.chown(path, uid, gid)
        if changes.size_bytes is not None:
            os.truncate(path if changes.handle is None else changes.handle, changes.size_bytes)
        if changes.atime_ns is not None or changes.mtime_ns is not None:
            now = os.fstat(self._fds[node])
            atime = now.st_atime_ns if changes.atime_ns is None else changes.atime_ns
            mtime = now.st_mtime_ns if changes.mtime_ns is None else changes.mtime_ns
            os.utime(path, ns=(atime, mtime))
        return self.getattr(caller, node, None)

    def readlink(self, caller: Caller, node: int) -> bytes:
        return os.readlink(_NAMELESS, dir_fd=self._fds[node])

    def mkdir(self, caller: Caller, parent: int, name: bytes, mode: int) -> NodeEntry:
        os.mkdir(name, mode, dir_fd=self._fds[parent])
        return self._entry(parent, name)

    def unlink(self, caller: Caller, parent: int, name: bytes) -> None:
        os.unlink(name, dir_fd=self._fds[parent])

    def rmdir(self, caller: Caller, parent: int, name: bytes) -> None:
        os.rmdir(name, dir_fd=self._fds[parent])

    def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        _check(_libc.renameat2(self._fds[parent], name, self._fds[new_parent], new_name, flags))

    def _opened(self, fd: int) -> Opened:
        return Opened(
            handle=fd,
            direct_io=self.direct_io,
            keep_cache=not self.direct_io,
            parallel_direct_writes=self.direct_io,
            passthrough_fd=fd if self.passthrough else None,
        )

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        # The kernel itself appends O_APPEND writes, by offset.
        wanted = flags & ~(os.O_NOFOLLOW | os.O_APPEND | os.O_DIRECT)
        return self._opened(os.open(self._path(node), wanted))

    def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> tuple[NodeEntry, Opened]:
        wanted = (flags & ~(os.O_APPEND | os.O_DIRECT)) | os.O_CREAT | os.O_NOFOLLOW
        fd = os.open(name, wanted, mode, dir_fd=self._fds[parent])
        return self._entry(parent, name), self._opened(fd)

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        return os.pread(handle, length, offset)

    def write(
        self,
        caller: Caller,
        node: int,
        handle: int,
        offset: int,
        data: bytearray | memoryview,
        flags: int,
    ) -> int:
        return os.pwrite(handle, data, offset)

    def flush(self, caller: Caller, node: int, handle: int) -> None:
        os.close(os.dup(handle))

    def fsync(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        os.fsync(handle)

    def release(self, node: int, handle: int, flags: int) -> None:
        os.close(handle)

    def lseek(self, caller: Caller, node: int, handle: int, offset: int, whence: int) -> int:
        return os.lseek(handle, offset, whence)

    def opendir(self, caller: Caller, node: int, flags: int) -> Opened:
        fd = os.open(self._path(node), os.O_RDONLY | os.O_DIRECTORY)
        self._listings[fd] = sorted(os.fsencode(name) for name in os.listdir(fd))
        return Opened(handle=fd)

    def readdir(
        self, caller: Caller, node: int, handle: int, offset: int, plus: bool
    ) -> Sequence[DirectoryEntry]:
        # Cookies 1 and 2 are for "." and "..", so name number i has cookie i + 3.
        start = max(0, offset - 2)
        found = []
        for index, name in enumerate(self._listings[handle][start : start + 128], start):
            try:
                entry = self._entry(node, name)
            except FileNotFoundError:
                continue
            assert entry.attributes is not None
            found.append(
                DirectoryEntry(
                    name,
                    entry.attributes.node,
                    entry.attributes.mode,
                    index + 3,
                    entry if plus else None,
                )
            )
        return found

    def releasedir(self, node: int, handle: int) -> None:
        del self._listings[handle]
        os.close(handle)

    def fsyncdir(self, caller: Caller, node: int, handle: int, data_only: bool) -> None:
        os.fsync(handle)

    def statfs(self, caller: Caller, node: int) -> FileSystemStatistics:
        s = os.fstatvfs(self._fds[node])
        return FileSystemStatistics(
            s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_frsize, s.f_namemax
        )

    def getxattr(self, caller: Caller, node: int, name: bytes) -> bytes:
        return os.getxattr(self._path(node), name)

    def listxattr(self, caller: Caller, node: int) -> Sequence[bytes]:
        return [os.fsencode(name) for name in os.listxattr(self._path(node))]
