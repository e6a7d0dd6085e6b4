"""Dispatch of requests: from a request's bytes to a call of `Operations`, and to the reply's bytes.

Converts exceptions to errnos, and counts the kernel's references to nodes. `session` handles
READ, WRITE and INTERRUPT itself, because it has the buffers. No I/O except the passthrough ioctls.
Thread-safe: called from every server thread.
"""

import errno
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeAlias

from msgspec import Struct

from bootseer.errors import BootseerError, errno_of
from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.backing import ORDINARY, BackingFiles
from bootseer.fuse.kernel.operations import Caller, DirectoryEntry, NodeEntry, Opened, Operations

log = logging.getLogger(__name__)

P = ParamSpec("P")

# The kernel refuses a reply whose error is not in this range (fuse_dev_do_write).
_ERRNO_MAX = 511
_TYPE_DIRECTORY = 0o040000
_COOKIE_DOT, _COOKIE_DOT_DOT = 1, 2
# Requests that no file system of Bootseer supports. After ENOSYS the kernel does not ask again: it
# answers EOPNOTSUPP to xattrs, and access(2) succeeds. Opcodes that are not listed get ENOSYS.
_REFUSED = {
    wire.SYMLINK: errno.EPERM,
    wire.MKNOD: errno.EPERM,
    wire.LINK: errno.EPERM,
    wire.FALLOCATE: errno.EOPNOTSUPP,
    wire.SETXATTR: errno.ENOSYS,
    wire.REMOVEXATTR: errno.ENOSYS,
    wire.ACCESS: errno.ENOSYS,
}


class Reply(Struct):
    """Reply that is ready to be sent."""

    body: bytes = b""
    error: int = 0
    undelivered: Callable[[], None] | None = None
    """Called if the kernel no longer wants the reply: undoes the request."""
    afterwards: Callable[[], None] | None = None
    """Called once the reply is sent."""


EMPTY = Reply()

Handler: TypeAlias = Callable[[Caller, int, memoryview], Reply | None]
"""Function of the caller, the node and the bytes behind the header that returns the reply."""


class LookupCounts:
    """Number of references to each node that the kernel holds. Thread-safe.

    `dropped(node)` is called once the kernel cannot name the node any more. The answer of a lookup
    that is under way may be a node whose count has fallen to zero; so `dropped` is called only when
    no lookup is under way.

    The kernel holds an unknown number of references to `inherited` nodes from an earlier process.
    When it drops the inode, it drops all references at once, more than were counted here. It drops
    a single counted reference if a lookup returns another node than the name had before; so a count
    of exactly zero does not mean that an inherited node is unused.
    """

    def __init__(self, dropped: Callable[[int], None], inherited: Iterable[int] = ()) -> None:
        self._dropped = dropped
        self._inherited = set(inherited)
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._lookups_under_way = 0
        self._unreferenced: set[int] = set()
        """Nodes whose count has fallen to zero, before `dropped` is called for them."""

    def begin(self) -> None:
        """Note that a request that may name nodes starts."""
        with self._lock:
            self._lookups_under_way += 1

    def end(self, nodes: Iterable[int] = ()) -> None:
        """Note that the request ended, and that its reply names `nodes`.

        Call this before the reply is sent: the kernel may forget a node as soon as it has the
        reply.
        """
        with self._lock:
            self._lookups_under_way -= 1
            counts = self._counts
            for node in nodes:
                counts[node] = counts.get(node, 0) + 1
            if self._unreferenced:
                self._drop_unused()

    def forget(self, node: int, count: int) -> None:
        """Note that the kernel dropped `count` references, or did not get a reply with them."""
        with self._lock:
            remaining = self._counts.pop(node, 0) - count
            if remaining > 0:
                self._counts[node] = remaining
            elif remaining < 0 or node not in self._inherited:
                self._inherited.discard(node)
                self._unreferenced.add(node)
            self._drop_unused()

    def _drop_unused(self) -> None:
        # The lock is held: a lookup that began now could be answered with such a node.
        if self._lookups_under_way or not self._unreferenced:
            return
        for node in self._unreferenced:
            if node not in self._counts:
                self._dropped(node)
        self._unreferenced.clear()


class Dispatcher:
    """Answers requests with an `Operations`."""

    def __init__(self, operations: Operations, backing: BackingFiles | None) -> None:
        self.operations = operations
        self._backing = backing
        self._lookups = LookupCounts(operations.dropped, operations.inherited_nodes())
        self._reported: set[tuple[int, type[BaseException], int]] = set()
        self._handlers: dict[int, Handler] = {
            wire.LOOKUP: self._lookup,
            wire.FORGET: self._forget,
            wire.BATCH_FORGET: self._batch_forget,
            wire.GETATTR: self._getattr,
            wire.SETATTR: self._setattr,
            wire.READLINK: self._readlink,
            wire.MKDIR: self._mkdir,
            wire.UNLINK: self._unlink,
            wire.RMDIR: self._rmdir,
            wire.RENAME: self._rename,
            wire.RENAME2: self._rename2,
            wire.OPEN: self._open,
            wire.CREATE: self._create,
            wire.RELEASE: self._release,
            wire.FLUSH: self._flush,
            wire.FSYNC: self._fsync,
            wire.LSEEK: self._lseek,
            wire.OPENDIR: self._opendir,
            wire.READDIR: self._readdir,
            wire.READDIRPLUS: self._readdirplus,
            wire.RELEASEDIR: self._releasedir,
            wire.FSYNCDIR: self._fsyncdir,
            wire.STATFS: self._statfs,
            wire.GETXATTR: self._getxattr,
            wire.LISTXATTR: self._listxattr,
            wire.DESTROY: lambda caller, node, body: EMPTY,
        }

    def answer(self, opcode: int, caller: Caller, node: int, body: memoryview) -> Reply | None:
        """Return the reply to a request, or None if the request has no reply. Never raises.

        `body` is the part of the request after the header; it is not used after the call.
        """
        handler = self._handlers.get(opcode)
        if handler is None:
            return Reply(error=_REFUSED.get(opcode, errno.ENOSYS))
        try:
            return handler(caller, node, body)
        # BaseException: panics of extensions written in Rust are not an Exception.
        except BaseException as error:
            if opcode in (wire.FORGET, wire.BATCH_FORGET):
                self.report(opcode, error)
                return None
            return Reply(error=self.errno_for(opcode, error))

    def errno_for(self, opcode: int, error: BaseException) -> int:
        """Return the errno for an exception. Log an unexpected one once per place."""
        if not isinstance(error, OSError | BootseerError):
            self.report(opcode, error)
        code = errno_of(error)
        return code if 0 < code <= _ERRNO_MAX else errno.EIO

    def report(self, opcode: int, error: BaseException) -> None:
        """Log an unexpected exception with its traceback, the first time it comes from a place."""
        frames = traceback.extract_tb(error.__traceback__)
        line = (frames[-1].lineno or 0) if frames else 0
        place = (opcode, type(error), line)
        if place not in self._reported:
            self._reported.add(place)
            log.error("request with opcode %d failed unexpectedly", opcode, exc_info=error)

    # ---- names ------------------------------------------------------------------------------

    def _lookup(self, caller: Caller, node: int, body: memoryview) -> Reply:
        name = wire.decode_name(body)
        return self._counted_entry(self.operations.lookup, caller, node, name)

    def _counted_entry(
        self, make: Callable[P, NodeEntry], *args: P.args, **kwargs: P.kwargs
    ) -> Reply:
        """Return a reply with the entry that `make` returns, and count the lookup."""
        nodes: Sequence[int] = ()
        self._lookups.begin()
        try:
            entry = make(*args, **kwargs)
            body = wire.encode_entry(entry)
            if entry.attributes is not None:
                nodes = (entry.attributes.node,)
        finally:
            self._lookups.end(nodes)
        return Reply(body, undelivered=lambda: self._uncount(nodes))

    def _uncount(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self._lookups.forget(node, 1)

    def _forget(self, caller: Caller, node: int, body: memoryview) -> None:
        self._lookups.forget(node, wire.FORGET_IN.unpack_from(body)[0])

    def _batch_forget(self, caller: Caller, node: int, body: memoryview) -> None:
        count, _ = wire.BATCH_FORGET_IN.unpack_from(body)
        records = body[wire.BATCH_FORGET_IN.size :][: count * wire.FORGET_ONE.size]
        for forgotten, lookups in wire.FORGET_ONE.iter_unpack(records):
            self._lookups.forget(forgotten, lookups)

    def _mkdir(self, caller: Caller, node: int, body: memoryview) -> Reply:
        mode, _ = wire.MKDIR_IN.unpack_from(body)
        name = wire.decode_name(body[wire.MKDIR_IN.size :])
        return self._counted_entry(self.operations.mkdir, caller, node, name, mode)

    def _unlink(self, caller: Caller, node: int, body: memoryview) -> Reply:
        self.operations.unlink(caller, node, wire.decode_name(body))
        return EMPTY

    def _rmdir(self, caller: Caller, node: int, body: memoryview) -> Reply:
        self.operations.rmdir(caller, node, wire.decode_name(body))
        return EMPTY

    def _rename(self, caller: Caller, node: int, body: memoryview) -> Reply:
        (new_parent,) = wire.RENAME_IN.unpack_from(body)
        name, new_name = wire.decode_two_names(body[wire.RENAME_IN.size :])
        self.operations.rename(caller, node, name, new_parent, new_name, 0)
        return EMPTY

    def _rename2(self, caller: Caller, node: int, body: memoryview) -> Reply:
        new_parent, flags, _ = wire.RENAME2_IN.unpack_from(body)
        name, new_name = wire.decode_two_names(body[wire.RENAME2_IN.size :])
        self.operations.rename(caller, node, name, new_parent, new_name, flags)
        return EMPTY

    # ---- attributes -------------------------------------------------------------------------

    def _getattr(self, caller: Caller, node: int, body: memoryview) -> Reply:
        flags, _, handle = wire.GETATTR_IN.unpack_from(body)
        wanted = handle if flags & wire.GETATTR_FH else None
        return Reply(wire.encode_attr_out(*self.operations.getattr(caller, node, wanted)))

    def _setattr(self, caller: Caller, node: int, body: memoryview) -> Reply:
        changes = wire.decode_setattr(body, time.time_ns())
        if changes.lock_owner is not None:
            caller = caller.with_lock_owner(changes.lock_owner)
        return Reply(wire.encode_attr_out(*self.operations.setattr(caller, node, changes)))

    def _readlink(self, caller: Caller, node: int, body: memoryview) -> Reply:
        return Reply(self.operations.readlink(caller, node))

    def _statfs(self, caller: Caller, node: int, body: memoryview) -> Reply:
        return Reply(wire.encode_statfs(self.operations.statfs(caller, node)))

    def _getxattr(self, caller: Caller, node: int, body: memoryview) -> Reply:
        size, _ = wire.GETXATTR_IN.unpack_from(body)
        name = wire.decode_name(body[wire.GETXATTR_IN.size :])
        return _xattr_reply(self.operations.getxattr(caller, node, name), size)

    def _listxattr(self, caller: Caller, node: int, body: memoryview) -> Reply:
        size, _ = wire.GETXATTR_IN.unpack_from(body)
        names = self.operations.listxattr(caller, node)
        return _xattr_reply(b"".join(name + b"\0" for name in names), size)

    # ---- files ------------------------------------------------------------------------------

    def _opened(self, node: int, opened: Opened) -> bytes:
        backing_id = ORDINARY
        if self._backing is not None:
            backing_id = self._backing.open(node, opened.passthrough_fd)
        flags = wire.FOPEN_NOFLUSH if opened.no_flush else 0
        if backing_id != ORDINARY:
            # The kernel accepts no cache flags beside this one (FOPEN_PASSTHROUGH_MASK).
            flags |= wire.FOPEN_PASSTHROUGH
            return wire.OPEN_OUT.pack(opened.handle, flags, backing_id)
        flags |= wire.FOPEN_DIRECT_IO if opened.direct_io else 0
        flags |= wire.FOPEN_KEEP_CACHE if opened.keep_cache else 0
        flags |= wire.FOPEN_PARALLEL_DIRECT_WRITES if opened.parallel_direct_writes else 0
        return wire.OPEN_OUT.pack(opened.handle, flags, 0)

    def _open(self, caller: Caller, node: int, body: memoryview) -> Reply:
        flags, _ = wire.OPEN_IN.unpack_from(body)
        opened = self.operations.open(caller, node, flags)
        return Reply(
            self._opened(node, opened),
            undelivered=lambda: self._cancel_open(node, opened.handle, flags),
        )

    def _create(self, caller: Caller, node: int, body: memoryview) -> Reply:
        flags, mode, _, _ = wire.CREATE_IN.unpack_from(body)
        name = wire.decode_name(body[wire.CREATE_IN.size :])
        made: list[tuple[int, Opened]] = []

        def make() -> NodeEntry:
            entry, opened = self.operations.create(caller, node, name, mode, flags)
            if entry.attributes is None:
                raise TypeError("Operations.create returned a negative entry")
            made.append((entry.attributes.node, opened))
            return entry

        answer = self._counted_entry(make)
        created, opened = made[0]
        uncount = answer.undelivered
        answer.body += self._opened(created, opened)

        def undo() -> None:
            self._cancel_open(created, opened.handle, flags)
            if uncount is not None:
                uncount()

        answer.undelivered = undo
        return answer

    def _cancel_open(self, node: int, handle: int, flags: int) -> None:
        self.operations.cancel_open(node, handle, flags)
        if self._backing is not None:
            self._backing.release(node)

    def _release(self, caller: Caller, node: int, body: memoryview) -> Reply:
        handle, flags, _, _ = wire.RELEASE_IN.unpack_from(body)
        backing = self._backing
        afterwards = None if backing is None else lambda: backing.release(node)
        try:
            self.operations.release(node, handle, flags)
        except BaseException as error:
            return Reply(error=self.errno_for(wire.RELEASE, error), afterwards=afterwards)
        return Reply(afterwards=afterwards)

    def _flush(self, caller: Caller, node: int, body: memoryview) -> Reply:
        handle, _, _, lock_owner = wire.FLUSH_IN.unpack_from(body)
        self.operations.flush(caller.with_lock_owner(lock_owner), node, handle)
        return EMPTY

    def _fsync(self, caller: Caller, node: int, body: memoryview) -> Reply:
        handle, flags, _ = wire.FSYNC_IN.unpack_from(body)
        self.operations.fsync(caller, node, handle, bool(flags & wire.FSYNC_DATA_ONLY))
        return EMPTY

    def _lseek(self, caller: Caller, node: int, body: memoryview) -> Reply:
        handle, offset, whence, _ = wire.LSEEK_IN.unpack_from(body)
        found = self.operations.lseek(caller, node, handle, offset, whence)
        return Reply(wire.LSEEK_OUT.pack(found))

    # ---- directories ------------------------------------------------------------------------

    def _opendir(self, caller: Caller, node: int, body: memoryview) -> Reply:
        flags, _ = wire.OPEN_IN.unpack_from(body)
        opened = self.operations.opendir(caller, node, flags)
        return Reply(
            wire.OPEN_OUT.pack(opened.handle, 0, 0),
            undelivered=lambda: self.operations.releasedir(node, opened.handle),
        )

    def _entries(
        self, caller: Caller, node: int, handle: int, offset: int, plus: bool
    ) -> list[DirectoryEntry]:
        entries = []
        if offset < _COOKIE_DOT:
            entries.append(DirectoryEntry(b".", node, _TYPE_DIRECTORY, _COOKIE_DOT))
        if offset < _COOKIE_DOT_DOT:
            entries.append(DirectoryEntry(b"..", node, _TYPE_DIRECTORY, _COOKIE_DOT_DOT))
        after = 0 if offset <= _COOKIE_DOT_DOT else offset
        entries += self.operations.readdir(caller, node, handle, after, plus)
        return entries

    def _readdir(self, caller: Caller, node: int, body: memoryview) -> Reply:
        handle, offset, size, *_ = wire.READ_IN.unpack_from(body)
        entries = self._entries(caller, node, handle, offset, False)
        return Reply(wire.encode_directory(entries, size, False)[0])

    def _readdirplus(self, caller: Caller, node: int, body: memoryview) -> Reply:
        handle, offset, size, *_ = wire.READ_IN.unpack_from(body)
        counted: Sequence[int] = ()
        self._lookups.begin()
        try:
            entries = self._entries(caller, node, handle, offset, True)
            reply, counted = wire.encode_directory(entries, size, True)
        finally:
            self._lookups.end(counted)
        return Reply(reply, undelivered=lambda: self._uncount(counted))

    def _releasedir(self, caller: Caller, node: int, body: memoryview) -> Reply:
        self.operations.releasedir(node, wire.RELEASE_IN.unpack_from(body)[0])
        return EMPTY

    def _fsyncdir(self, caller: Caller, node: int, body: memoryview) -> Reply:
        handle, flags, _ = wire.FSYNC_IN.unpack_from(body)
        self.operations.fsyncdir(caller, node, handle, bool(flags & wire.FSYNC_DATA_ONLY))
        return EMPTY


def _xattr_reply(value: bytes, size_bytes: int) -> Reply:
    """Return an xattr reply. With size 0 the caller asks for the length of the value."""
    if size_bytes == 0:
        return Reply(wire.GETXATTR_OUT.pack(len(value), 0))
    if len(value) > size_bytes:
        return Reply(error=errno.ERANGE)
    return Reply(value)
