"""Answers the requests that name nodes: lookups, changes of names, directories, FORGET.

Alone counts the lookups of which the kernel is told, so that a node is given up once and not too
early. No I/O of its own. Thread-safe: called from every server thread.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeAlias

from msgspec import Struct

from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.lookups import LookupCounts
from bootseer.fuse.kernel.operations import Caller, DirectoryEntry, Entry, Operations

P = ParamSpec("P")

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


EMPTY = Answer()

Handler: TypeAlias = Callable[[Caller, int, memoryview], Answer | None]
"""Takes the caller, the node and the bytes behind the header."""


class NameRequests:
    """Handles requests for names by an `Operations`."""

    def __init__(self, operations: Operations, lookups: LookupCounts) -> None:
        self._operations = operations
        self._lookups = lookups

    def handlers(self) -> dict[int, Handler]:
        """Returns the handler of each opcode; a handler takes the bytes behind the header."""
        return {
            wire.LOOKUP: self._lookup,
            wire.FORGET: self._forget,
            wire.BATCH_FORGET: self._batch_forget,
            wire.SYMLINK: self._symlink,
            wire.MKNOD: self._mknod,
            wire.MKDIR: self._mkdir,
            wire.UNLINK: self._unlink,
            wire.RMDIR: self._rmdir,
            wire.RENAME: self._rename,
            wire.RENAME2: self._rename2,
            wire.LINK: self._link,
            wire.OPENDIR: self._opendir,
            wire.READDIR: self._readdir,
            wire.READDIRPLUS: self._readdirplus,
            wire.RELEASEDIR: self._releasedir,
            wire.FSYNCDIR: self._fsyncdir,
        }

    # ---- names ------------------------------------------------------------------------------

    def counted(self, make: Callable[P, Entry], *args: P.args, **kwargs: P.kwargs) -> Answer:
        """Calls `make`, which names one node, and answers with its entry."""
        nodes: Sequence[int] = ()
        self._lookups.begin()
        try:
            entry = make(*args, **kwargs)
            body = wire.encode_entry(entry)
            if entry.attributes is not None:
                nodes = (entry.attributes.node,)
        finally:
            self._lookups.end(nodes)
        return Answer(body, undelivered=lambda: self._uncount(nodes))

    def _uncount(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self._lookups.forget(node, 1)

    def _lookup(self, caller: Caller, node: int, body: memoryview) -> Answer:
        name = wire.decode_name(body)
        return self.counted(self._operations.lookup, caller, node, name)

    def _mknod(self, caller: Caller, node: int, body: memoryview) -> Answer:
        mode, rdev, _, _ = wire.MKNOD_IN.unpack_from(body)
        name = wire.decode_name(body[wire.MKNOD_IN.size :])
        return self.counted(self._operations.mknod, caller, node, name, mode, rdev)

    def _mkdir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        mode, _ = wire.MKDIR_IN.unpack_from(body)
        name = wire.decode_name(body[wire.MKDIR_IN.size :])
        return self.counted(self._operations.mkdir, caller, node, name, mode)

    def _symlink(self, caller: Caller, node: int, body: memoryview) -> Answer:
        name, target = wire.decode_two_names(body)
        return self.counted(self._operations.symlink, caller, node, name, target)

    def _link(self, caller: Caller, node: int, body: memoryview) -> Answer:
        (existing,) = wire.LINK_IN.unpack_from(body)
        name = wire.decode_name(body[wire.LINK_IN.size :])
        return self.counted(self._operations.link, caller, existing, node, name)

    def _forget(self, caller: Caller, node: int, body: memoryview) -> None:
        self._forget_one(node, wire.FORGET_IN.unpack_from(body)[0])

    def _batch_forget(self, caller: Caller, node: int, body: memoryview) -> None:
        count, _ = wire.BATCH_FORGET_IN.unpack_from(body)
        records = body[wire.BATCH_FORGET_IN.size :][: count * wire.FORGET_ONE.size]
        for forgotten, lookups in wire.FORGET_ONE.iter_unpack(records):
            self._forget_one(forgotten, lookups)

    def _forget_one(self, node: int, count: int) -> None:
        try:
            self._operations.forget(node, count)
        finally:
            self._lookups.forget(node, count)

    def _unlink(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self._operations.unlink(caller, node, wire.decode_name(body))
        return EMPTY

    def _rmdir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self._operations.rmdir(caller, node, wire.decode_name(body))
        return EMPTY

    def _rename(self, caller: Caller, node: int, body: memoryview) -> Answer:
        (new_parent,) = wire.RENAME_IN.unpack_from(body)
        name, new_name = wire.decode_two_names(body[wire.RENAME_IN.size :])
        self._operations.rename(caller, node, name, new_parent, new_name, 0)
        return EMPTY

    def _rename2(self, caller: Caller, node: int, body: memoryview) -> Answer:
        new_parent, flags, _ = wire.RENAME2_IN.unpack_from(body)
        name, new_name = wire.decode_two_names(body[wire.RENAME2_IN.size :])
        self._operations.rename(caller, node, name, new_parent, new_name, flags)
        return EMPTY

    # ---- directories ------------------------------------------------------------------------

    def _opendir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        flags, _ = wire.OPEN_IN.unpack_from(body)
        opened = self._operations.opendir(caller, node, flags)
        reply_flags = wire.FOPEN_CACHE_DIR if opened.cache_directory else 0
        reply_flags |= wire.FOPEN_KEEP_CACHE if opened.keep_cache else 0
        return Answer(
            wire.OPEN_OUT.pack(opened.handle, reply_flags, 0),
            undelivered=lambda: self._operations.releasedir(node, opened.handle),
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
        entries += self._operations.readdir(caller, node, handle, after, plus)
        return entries

    def _readdir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, offset, size, *_ = wire.READ_IN.unpack_from(body)
        entries = self._entries(caller, node, handle, offset, False)
        return Answer(wire.encode_directory(entries, size, False)[0])

    def _readdirplus(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, offset, size, *_ = wire.READ_IN.unpack_from(body)
        counted: Sequence[int] = ()
        self._lookups.begin()
        try:
            entries = self._entries(caller, node, handle, offset, True)
            reply, counted = wire.encode_directory(entries, size, True)
        finally:
            self._lookups.end(counted)
        return Answer(reply, undelivered=lambda: self._uncount(counted))

    def _releasedir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        self._operations.releasedir(node, wire.RELEASE_IN.unpack_from(body)[0])
        return EMPTY

    def _fsyncdir(self, caller: Caller, node: int, body: memoryview) -> Answer:
        handle, flags, _ = wire.FSYNC_IN.unpack_from(body)
        self._operations.fsyncdir(caller, node, handle, bool(flags & wire.FSYNC_DATA_ONLY))
        return EMPTY
