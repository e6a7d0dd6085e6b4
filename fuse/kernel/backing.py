"""Backing files of passthrough opens, and the rule that all opens of a node share one mode.

The kernel refuses (EIO) to open a node in passthrough mode while it is open in another mode, or
with another backing id. The table of open nodes lies in memory that a supervisor can share with the
server's successor, so that the rule holds after a crash. A crash can leak a reference, but never
drops a reference that is in use. Thread-safe within one process.
"""

import base64
import errno
import fcntl
import logging
import mmap
import struct
import threading

from bootseer.fuse.kernel import wire

log = logging.getLogger(__name__)

_ID_AND_COUNT = struct.Struct("=II")
_NODE = struct.Struct("=Q")
_SLOT_BYTES = _NODE.size + _ID_AND_COUNT.size
TABLE_BYTES = 65536 * _SLOT_BYTES
ORDINARY = 0
"""Backing id of a node that is open in an ordinary mode. The kernel's own ids start at 1."""


def new_table() -> mmap.mmap:
    """Return an empty table, which processes forked from this one share."""
    return mmap.mmap(-1, TABLE_BYTES)


def table_to_text(table: mmap.mmap) -> str:
    """Return a table as text, for a process that is not a fork of this one.

    No thread may use the table at the same time.
    """
    return base64.b64encode(table[:].rstrip(b"\0")).decode("ascii")


def table_from_text(text: str) -> mmap.mmap:
    """Return the table that `table_to_text` turned into text."""
    data = base64.b64decode(text)
    table = new_table()
    table[: len(data)] = data
    return table


class BackingFiles:
    """Table of the open nodes: how often each is open, and with which backing id."""

    def __init__(self, device: int, table: mmap.mmap) -> None:
        self._device = device
        self._table = table
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0
        self._warned = False
        self._permitted = True
        self._load()

    def _load(self) -> None:
        """Read the slots that a predecessor filled: from the start to the first untouched one."""
        for slot in range(TABLE_BYTES // _SLOT_BYTES):
            node, backing_id, count = self._read(slot)
            if node:
                self._slots[node] = slot
            elif backing_id or count:
                self._free.append(slot)
            else:
                break
            self._end = slot + 1

    def _read(self, slot: int) -> tuple[int, int, int]:
        start = slot * _SLOT_BYTES
        backing_id, count = _ID_AND_COUNT.unpack_from(self._table, start + _NODE.size)
        return _NODE.unpack_from(self._table, start)[0], backing_id, count

    def _set(self, slot: int, backing_id: int, count: int) -> None:
        start = slot * _SLOT_BYTES
        _ID_AND_COUNT.pack_into(self._table, start + _NODE.size, backing_id, count)

    def _claim(self, node: int, backing_id: int) -> bool:
        if self._free:
            slot = self._free.pop()
        elif self._end < TABLE_BYTES // _SLOT_BYTES:
            slot = self._end
            self._end += 1
        else:
            return False
        # The node is written last, because it makes the slot valid for a successor.
        self._set(slot, backing_id, 1)
        _NODE.pack_into(self._table, slot * _SLOT_BYTES, node)
        self._slots[node] = slot
        return True

    def open(self, node: int, backing_fd: int | None) -> int:
        """Count one open of `node`. Return the backing id to answer with, or ORDINARY.

        A node that is open already keeps its mode, whatever `backing_fd` says.
        """
        with self._lock:
            slot = self._slots.get(node)
            if slot is not None:
                _, backing_id, count = self._read(slot)
                self._set(slot, backing_id, count + 1)
                return backing_id
            backing_id = ORDINARY if backing_fd is None else self._register(backing_fd)
            if not self._claim(node, backing_id) and backing_id != ORDINARY:
                # The table is full, and a node that is not counted must not be passed through.
                self._unregister(backing_id)
                return ORDINARY
            return backing_id

    def release(self, node: int) -> None:
        """Count one open of `node` less.

        Call this after the reply to RELEASE, so that a crash in between leaks a reference instead
        of dropping a reference that is in use.
        """
        with self._lock:
            slot = self._slots.get(node)
            if slot is None:
                return
            _, backing_id, count = self._read(slot)
            if count > 1:
                self._set(slot, backing_id, count - 1)
                return
            _NODE.pack_into(self._table, slot * _SLOT_BYTES, 0)
            # A slot of zeros would end the scan of a successor.
            self._set(slot, 0, 1)
            del self._slots[node]
            self._free.append(slot)
            if backing_id != ORDINARY:
                self._unregister(backing_id)

    def _register(self, backing_fd: int) -> int:
        if not self._permitted:
            return ORDINARY
        request = bytearray(wire.BACKING_MAP.pack(backing_fd, 0, 0))
        try:
            # The ioctl returns the id, which the kernel counts up from 1.
            return int(fcntl.ioctl(self._device, wire.IOC_BACKING_OPEN, request, True))
        except OSError as error:
            # EPERM is permanent; ELOOP and others depend on the file.
            self._permitted = error.errno != errno.EPERM
            if not self._warned:
                self._warned = True
                log.info("files are read through the server, not passed through: %s", error)
            return ORDINARY

    def _unregister(self, backing_id: int) -> None:
        try:
            fcntl.ioctl(self._device, wire.IOC_BACKING_CLOSE, wire.BACKING_ID.pack(backing_id))
        except OSError as error:
            log.debug("cannot close backing id %d: %s", backing_id, error)
