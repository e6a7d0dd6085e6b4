"""From a request's bytes to one call of `Operations`, and from its result to the reply's bytes.

Alone translates between protocol and interface, and turns exceptions into errnos; requests for
names are in `name_requests`, and READ, WRITE and INTERRUPT the session's (it has the buffers). No
I/O of its own but the passthrough ioctls. Thread-safe: called from every server thread.
"""

import errno
import logging
import time
import traceback

from bootseer.errors import BootseerError, errno_of
from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.backing import ORDINARY, BackingFiles
from bootseer.fuse.kernel.lookups import LookupCounts
from bootseer.fuse.kernel.name_requests import EMPTY, Answer, Handler, NameRequests
from bootseer.fuse.kernel.operations import Caller, Entry, Opened, Operations

log = logging.getLogger(__name__)

# The kernel refuses a reply whose error is not in this range (fuse_dev_do_write).
_ERRNO_MAX = 511


class Dispatcher:
    """Answers requests with an `Operations`."""

    def __init__(self, operations: Operations, backing: BackingFiles | None) -> None:
        self.operations = operations
        self.backing = backing
        self.lookups = LookupCounts(operations.dropped)
        self._names = NameRequests(operations, self.lookups)
        self._reported: set[tuple[int, type[BaseException], int]] = set()
        self._handlers: dict[int, Handler] = {
            **self._names.handlers(),
            wire.GETATTR: self._getattr,
            wire.SETATTR: self._setattr,
            wire.READLINK: self._readlink,
            wire.OPEN: self._open,
            wire.CREATE: self._create,
            wire.STATFS: self._statfs,
            wire.RELEASE: self._release,
            wire.FLUSH: self._flush,
            wire.FSYNC: self._fsync,
            wire.ACCESS: self._access,
            wire.FALLOCATE: self._fallocate,
            wire.LSEEK: self._lseek,
            wire.SETXATTR: self._setxattr,
            wire.GETXATTR: self._getxattr,
            wire.LISTXATTR: self._listxattr,
            wire.REMOVEXATTR: self._removexattr,
            wire.DESTROY: lambda caller, node, body: EMPTY,
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
        """Returns the errno to answer with; logs an unforeseen exception once per place."""
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

    # ---- attributes -------------------------------------------------------------------------

    def _getattr(self, caller: Caller, node: int, body: memoryview) -> Answer:
        flags, _, handle = wire.GETATTR_IN.unpack_from(body)
        wanted = handle if flags & wire.GETATTR_FH else None
        return Answer(wire.encode_attr_out(*self.operations.getattr(caller, node, wanted)))

    def _setattr(self, caller: Caller, node: int, body: memoryview) -> Answer:
        changes = wire.decode_setattr(body, time.time_ns())
        if changes.lock_owner is not None:
            caller = caller.owning(changes.lock_owner)
        return Answer(wire.encode_attr_out(*self.operations.setattr(caller, node, changes)))

    def _readlink(self, caller: Caller, node: int, body: memoryview) -> Answer:
        return Answer(self.operations.readlink(caller, node))

    def _access(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self.operations.access(caller, node, wire.ACCESS_IN.unpack_from(body)[0])
        return EMPTY

    def _statfs(self, caller: Caller, node: int, body: memoryview) -> Answer:
        return Answer(wire.encode_statfs(self.operations.statfs(caller, node)))

    def _setxattr(self, caller: Caller, node: int, body: memoryview) -> Answer:
        size, flags = wire.SETXATTR_IN.unpack_from(body)
        name, _, value = bytes(body[wire.SETXATTR_IN.size :]).partition(b"\0")
        self.operations.setxattr(caller, node, name, value[:size], flags)
        return EMPTY

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
        return EMPTY

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
            undelivered=lambda: self._cancel_open(node, opened.handle, flags),
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

        answer = self._names.counted(make)
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
        handle, _, _, lock_owner = wire.FLUSH_IN.unpack_from(body)
        self.operations.flush(caller.owning(lock_owner), node, handle)
        return EMPTY

    def _fsync(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, flags, _ = wire.FSYNC_IN.unpack_from(body)
        self.operations.fsync(caller, node, handle, bool(flags & wire.FSYNC_DATA_ONLY))
        return EMPTY

    def _fallocate(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, offset, length, mode, _ = wire.FALLOCATE_IN.unpack_from(body)
        self.operations.fallocate(caller, node, handle, offset, length, mode)
        return EMPTY

    def _lseek(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, offset, whence, _ = wire.LSEEK_IN.unpack_from(body)
        found = self.operations.lseek(caller, node, handle, offset, whence)
        return Answer(wire.LSEEK_OUT.pack(found))


def _sized(value: bytes, size_bytes: int) -> Answer:
    """An xattr reply: with size 0 the caller asks how long the value is."""
    if size_bytes == 0:
        return Answer(wire.GETXATTR_OUT.pack(len(value), 0))
    if len(value) > size_bytes:
        return Answer(error=errno.ERANGE)
    return Answer(value)
