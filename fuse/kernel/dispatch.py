"""From a request's bytes to one call of `Operations`, and from its result to the reply's bytes.

Alone translates between protocol and interface, counts lookups and turns exceptions into errnos.
READ, WRITE and INTERRUPT are the session's (it has the buffers). No I/O of its own but the
passthrough ioctls. Thread-safe: called from every server thread.
"""

import errno
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import ParamSpec

from msgspec import Struct

from bootseer.errors import BootseerError, errno_of
from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.backing import ORDINARY, BackingFiles
from bootseer.fuse.kernel.lookups import LookupCounts
from bootseer.fuse.kernel.operations import Caller, DirectoryEntry, Entry, Opened, Operations

log = logging.getLogger(__name__)
P = ParamSpec("P")

# The kernel refuses a reply whose error is not in this range (fuse_dev_do_write).
_ERRNO_MAX = 511
_TYPE_DIRECTORY = 0o040000
_COOKIE_DOT, _COOKIE_DOT_DOT = 1, 2


class Answer(Struct):
    """A reply that is ready to be sent."""

    body: bytes = b""
    error: int = 0
    undelivered: Callable[[], None] | None = None
    """What to undo when the kernel no longer wants the reply."""
    afterwards: Callable[[], None] | None = None
    """What to do once it is sent."""


_EMPTY = Answer()


class Dispatcher:
    """Answers requests with an `Operations`."""

    def __init__(self, operations: Operations, backing: BackingFiles | None) -> None:
        self.operations = operations
        self.backing = backing
        self.lookups = LookupCounts(operations.dropped)
        self._reported: set[tuple[int, type[BaseException], int]] = set()
        self._handlers: dict[int, Callable[[Caller, int, memoryview], Answer | None]] = {
            wire.LOOKUP: self._lookup,
            wire.FORGET: self._forget,
            wire.BATCH_FORGET: self._batch_forget,
            wire.GETATTR: self._getattr,
            wire.SETATTR: self._setattr,
            wire.READLINK: self._readlink,
            wire.SYMLINK: self._symlink,
            wire.MKNOD: self._mknod,
            wire.MKDIR: self._mkdir,
            wire.UNLINK: self._unlink,
            wire.RMDIR: self._rmdir,
            wire.RENAME: self._rename,
            wire.RENAME2: self._rename2,
            wire.LINK: self._link,
            wire.OPEN: self._open,
            wire.CREATE: self._create,
            wire.STATFS: self._statfs,
            wire.RELEASE: self._release,
            wire.FLUSH: self._flush,
            wire.FSYNC: self._fsync,
            wire.OPENDIR: self._opendir,
            wire.READDIR: self._readdir,
            wire.READDIRPLUS: self._readdirplus,
            wire.RELEASEDIR: self._releasedir,
            wire.FSYNCDIR: self._fsyncdir,
            wire.ACCESS: self._access,
            wire.FALLOCATE: self._fallocate,
            wire.LSEEK: self._lseek,
            wire.SETXATTR: self._setxattr,
            wire.GETXATTR: self._getxattr,
            wire.LISTXATTR: self._listxattr,
            wire.REMOVEXATTR: self._removexattr,
            wire.DESTROY: lambda caller, node, body: _EMPTY,
        }

    def answer(self, opcode: int, caller: Caller, node: int, body: memoryview) -> Answer | None:
        """The reply to a request, None where the protocol wants none. Never raises.

        `body` is what follows the header; it is not used after the call.
        """
        handler = self._handlers.get(opcode)
        if handler is None:
            return Answer(error=errno.ENOSYS)
        try:
            return handler(caller, node, body)
        # BaseException: extensions written in Rust panic with one that is no Exception.
        except BaseException as error:
            if opcode in (wire.FORGET, wire.BATCH_FORGET):
                self.report(opcode, error)
                return None
            return Answer(error=self.errno_for(opcode, error))

    def errno_for(self, opcode: int, error: BaseException) -> int:
        """The errno to answer with; logs, once per place, what nobody foresaw."""
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

    def _counted(self, make: Callable[P, Entry], *args: P.args, **kwargs: P.kwargs) -> Answer:
        """Call `make`, which names one node, and answer with its entry."""
        nodes: Sequence[int] = ()
        self.lookups.begin()
        try:
            entry = make(*args, **kwargs)
            body = wire.encode_entry(entry)
            if entry.attributes is not None:
                nodes = (entry.attributes.node,)
        finally:
            self.lookups.end(nodes)
        return Answer(body, undelivered=lambda: self._uncount(nodes))

    def _uncount(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self.lookups.forget(node, 1)

    def _lookup(self, caller: Caller, node: int, body: memoryview) -> Answer:
        name = wire.decode_name(body)
        return self._counted(self.operations.lookup, caller, node, name)

    def _mknod(self, caller: Caller, node: int, body: memoryview) -> Answer:
        mode, rdev, _, _ = wire.MKNOD_IN.unpack_from(body)
        name = wire.decode_name(body[wire.MKNOD_IN.size :])
        return self._counted(self.operations.mknod, caller, node, name, mode, rdev)

    def _mkdir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        mode, _ = wire.MKDIR_IN.unpack_from(body)
        name = wire.decode_name(body[wire.MKDIR_IN.size :])
        return self._counted(self.operations.mkdir, caller, node, name, mode)

    def _symlink(self, caller: Caller, node: int, body: memoryview) -> Answer:
        name, target = wire.decode_two_names(body)
        return self._counted(self.operations.symlink, caller, node, name, target)

    def _link(self, caller: Caller, node: int, body: memoryview) -> Answer:
        (existing,) = wire.LINK_IN.unpack_from(body)
        name = wire.decode_name(body[wire.LINK_IN.size :])
        return self._counted(self.operations.link, caller, existing, node, name)

    def _forget(self, caller: Caller, node: int, body: memoryview) -> None:
        self._forget_one(node, wire.FORGET_IN.unpack_from(body)[0])

    def _batch_forget(self, caller: Caller, node: int, body: memoryview) -> None:
        count, _ = wire.BATCH_FORGET_IN.unpack_from(body)
        records = body[wire.BATCH_FORGET_IN.size :][: count * wire.FORGET_ONE.size]
        for forgotten, lookups in wire.FORGET_ONE.iter_unpack(records):
            self._forget_one(forgotten, lookups)

    def _forget_one(self, node: int, count: int) -> None:
        try:
            self.operations.forget(node, count)
        finally:
            self.lookups.forget(node, count)

    def _unlink(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self.operations.unlink(caller, node, wire.decode_name(body))
        return _EMPTY

    def _rmdir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self.operations.rmdir(caller, node, wire.decode_name(body))
        return _EMPTY

    def _rename(self, caller: Caller, node: int, body: memoryview) -> Answer:
        (new_parent,) = wire.RENAME_IN.unpack_from(body)
        name, new_name = wire.decode_two_names(body[wire.RENAME_IN.size :])
        self.operations.rename(caller, node, name, new_parent, new_name, 0)
        return _EMPTY

    def _rename2(self, caller: Caller, node: int, body: memoryview) -> Answer:
        new_parent, flags, _ = wire.RENAME2_IN.unpack_from(body)
        name, new_name = wire.decode_two_names(body[wire.RENAME2_IN.size :])
        self.operations.rename(caller, node, name, new_parent, new_name, flags)
        return _EMPTY

    # ---- attributes -------------------------------------------------------------------------

    def _getattr(self, caller: Caller, node: int, body: memoryview) -> Answer:
        flags, _, handle = wire.GETATTR_IN.unpack_from(body)
        wanted = handle if flags & wire.GETATTR_FH else None
        return Answer(wire.encode_attr_out(*self.operations.getattr(caller, node, wanted)))

    def _setattr(self, caller: Caller, node: int, body: memoryview) -> Answer:
        changes = wire.decode_setattr(body, time.time_ns())
        return Answer(wire.encode_attr_out(*self.operations.setattr(caller, node, changes)))

    def _readlink(self, caller: Caller, node: int, body: memoryview) -> Answer:
        return Answer(self.operations.readlink(caller, node))

    def _access(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self.operations.access(caller, node, wire.ACCESS_IN.unpack_from(body)[0])
        return _EMPTY

    def _statfs(self, caller: Caller, node: int, body: memoryview) -> Answer:
        return Answer(wire.encode_statfs(self.operations.statfs(caller, node)))

    def _setxattr(self, caller: Caller, node: int, body: memoryview) -> Answer:
        size, flags = wire.SETXATTR_IN.unpack_from(body)
        name, _, value = bytes(body[wire.SETXATTR_IN.size :]).partition(b"\0")
        self.operations.setxattr(caller, node, name, value[:size], flags)
        return _EMPTY

    def _getxattr(self, caller: Caller, node: int, body: memoryview) -> Answer:
        size, _ = wire.GETXATTR_IN.unpack_from(body)
        name = wire.decode_name(body[wire.GETXATTR_IN.size :])
        return _sized(self.operations.getxattr(caller, node, name), size)

    def _listxattr(self, caller: Caller, node: int, body: memoryview) -> Answer:
        size, _ = wire.GETXATTR_IN.unpack_from(body)
        names = self.operations.listxattr(caller, node)
        return _sized(b"".join(name + b"\0" for name in names), size)

    def _removexattr(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self.operations.removexattr(caller, node, wire.decode_name(body))
        return _EMPTY

    # ---- files ------------------------------------------------------------------------------

    def _opened(self, node: int, opened: Opened) -> bytes:
        backing_id = ORDINARY
        if self.backing is not None:
            backing_id = self.backing.open(node, opened.passthrough_fd)
        flags = wire.FOPEN_NOFLUSH if opened.no_flush else 0
        if backing_id != ORDINARY:
            # The kernel accepts no cache flags beside this one (FOPEN_PASSTHROUGH_MASK).
            flags |= wire.FOPEN_PASSTHROUGH
            return wire.OPEN_OUT.pack(opened.handle, flags, backing_id)
        flags |= wire.FOPEN_DIRECT_IO if opened.direct_io else 0
        flags |= wire.FOPEN_KEEP_CACHE if opened.keep_cache else 0
        flags |= wire.FOPEN_PARALLEL_DIRECT_WRITES if opened.parallel_direct_writes else 0
        return wire.OPEN_OUT.pack(opened.handle, flags, 0)

    def _open(self, caller: Caller, node: int, body: memoryview) -> Answer:
        flags, _ = wire.OPEN_IN.unpack_from(body)
        opened = self.operations.open(caller, node, flags)
        return Answer(
            self._opened(node, opened),
            undelivered=lambda: self._close(node, opened.handle, flags),
        )

    def _create(self, caller: Caller, node: int, body: memoryview) -> Answer:
        flags, mode, _, _ = wire.CREATE_IN.unpack_from(body)
        name = wire.decode_name(body[wire.CREATE_IN.size :])
        made: list[tuple[int, Opened]] = []

        def make() -> Entry:
            entry, opened = self.operations.create(caller, node, name, mode, flags)
            if entry.attributes is None:
                raise TypeError("Operations.create returned a negative entry")
            made.append((entry.attributes.node, opened))
            return entry

        answer = self._counted(make)
        created, opened = made[0]
        uncount = answer.undelivered
        answer.body += self._opened(created, opened)

        def undo() -> None:
            self._close(created, opened.handle, flags)
            if uncount is not None:
                uncount()

        answer.undelivered = undo
        return answer

    def _close(self, node: int, handle: int, flags: int) -> None:
        self.operations.release(node, handle, flags)
        if self.backing is not None:
            self.backing.release(node)

    def _release(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, flags, _, _ = wire.RELEASE_IN.unpack_from(body)
        backing = self.backing
        afterwards = None if backing is None else lambda: backing.release(node)
        try:
            self.operations.release(node, handle, flags)
        except BaseException as error:
            return Answer(error=self.errno_for(wire.RELEASE, error), afterwards=afterwards)
        return Answer(afterwards=afterwards)

    def _flush(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self.operations.flush(caller, node, wire.FLUSH_IN.unpack_from(body)[0])
        return _EMPTY

    def _fsync(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, flags, _ = wire.FSYNC_IN.unpack_from(body)
        self.operations.fsync(caller, node, handle, bool(flags & wire.FSYNC_DATA_ONLY))
        return _EMPTY

    def _fallocate(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, offset, length, mode, _ = wire.FALLOCATE_IN.unpack_from(body)
        self.operations.fallocate(caller, node, handle, offset, length, mode)
        return _EMPTY

    def _lseek(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, offset, whence, _ = wire.LSEEK_IN.unpack_from(body)
        found = self.operations.lseek(caller, node, handle, offset, whence)
        return Answer(wire.LSEEK_OUT.pack(found))

    # ---- directories ------------------------------------------------------------------------

    def _opendir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        flags, _ = wire.OPEN_IN.unpack_from(body)
        opened = self.operations.opendir(caller, node, flags)
        reply_flags = wire.FOPEN_CACHE_DIR if opened.cache_directory else 0
        reply_flags |= wire.FOPEN_KEEP_CACHE if opened.keep_cache else 0
        return Answer(
            wire.OPEN_OUT.pack(opened.handle, reply_flags, 0),
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

    def _readdir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, offset, size, *_ = wire.READ_IN.unpack_from(body)
        entries = self._entries(caller, node, handle, offset, False)
        return Answer(wire.encode_directory(entries, size, False)[0])

    def _readdirplus(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, offset, size, *_ = wire.READ_IN.unpack_from(body)
        counted: Sequence[int] = ()
        self.lookups.begin()
        try:
            entries = self._entries(caller, node, handle, offset, True)
            reply, counted = wire.encode_directory(entries, size, True)
        finally:
            self.lookups.end(counted)
        return Answer(reply, undelivered=lambda: self._uncount(counted))

    def _releasedir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self.operations.releasedir(node, wire.RELEASE_IN.unpack_from(body)[0])
        return _EMPTY

    def _fsyncdir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, flags, _ = wire.FSYNC_IN.unpack_from(body)
        self.operations.fsyncdir(caller, node, handle, bool(flags & wire.FSYNC_DATA_ONLY))
        return _EMPTY


def _sized(value: bytes, size_bytes: int) -> Answer:
    """An xattr reply: with size 0 the caller asks how long the value is."""
    if size_bytes == 0:
        return Answer(wire.GETXATTR_OUT.pack(len(value), 0))
    if len(value) > size_bytes:
        return Answer(error=errno.ERANGE)
    return Answer(value)
