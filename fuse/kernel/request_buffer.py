"""Memory into which one server thread reads its requests.

The data of a write lies in a buffer of its own, so that the operation can keep the buffer. Such
buffers are used again once any thread has released them: making a new bytearray faults in its pages
and fills them with zeros under the GIL, which was almost half of the time in which a save held it.
Everything else belongs to one thread.
"""

import mmap
from collections import deque

from bootseer.fuse.kernel import wire

# Resident from the start, also after a fork: if this process is killed while the kernel faults in
# a page of the buffer, the request fails with EIO instead of going to the successor
# (fuse_dev_do_read).
_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
# Least size of a write that is passed with its buffer; it must fill the buffer up to a page.
_GIVEN_MIN_BYTES = 64 * 1024
# Spare buffers of one size: as many as a few stripe units release at once.
_SPARE_MAX = 16


class _WriteBuffer(bytearray):
    """Buffer that becomes spare again once it and all views of it are released."""

    # Without attributes, because the interpreter would else call `__del__` only once.
    __slots__ = ()

    def __del__(self) -> None:
        # The owner may have changed the length by the part that is not aligned to a page.
        spare = _spare.get(-(-len(self) // wire.PAGE_BYTES) * wire.PAGE_BYTES)
        if spare is not None and len(spare) < _SPARE_MAX:
            spare.append(self)


_spare: dict[int, deque[_WriteBuffer]] = {}
"""Spare buffers by size: resident, and not filled with zeros again."""


def _take(size: int) -> _WriteBuffer:
    try:
        buffer = _spare.setdefault(size, deque()).pop()
    except IndexError:
        return _WriteBuffer(size)
    buffer.extend(bytes(size - len(buffer)))
    return buffer


class RequestBuffer:
    """Memory for one request: `readv` from the device to `into`."""

    __slots__ = ("_overflow", "_written", "head", "into")

    def __init__(self, max_write_bytes: int) -> None:
        view = memoryview(mmap.mmap(-1, wire.REQUEST_OVERHEAD_BYTES, flags=_FLAGS))
        self.head = view[: wire.WRITE_DATA_OFFSET]
        """The headers of a read or write, or the beginning of any other request."""
        self._overflow = view[wire.WRITE_DATA_OFFSET :]
        self._put(max_write_bytes)

    def _put(self, size: int) -> None:
        # Resident as well: the buffer was filled with zeros, or used before.
        self._written = _take(size)
        self.into = (self.head, self._written, self._overflow)

    def body(self, length: int) -> memoryview:
        """Return the bytes after the header of a request of `length` bytes."""
        head, beyond_head = self.head[wire.IN_HEADER_BYTES : length], length - len(self.head)
        if beyond_head <= 0:
            return head
        body = bytearray(head)
        with memoryview(self._written) as view:
            body += view[:beyond_head]
        body += self._overflow[: max(0, beyond_head - len(self._written))]
        return memoryview(body)

    def data(self, size: int) -> bytearray | memoryview:
        """Return the `size` bytes of a write. Raises: MemoryError.

        The caller may keep a bytearray; a memoryview is valid until the next request.
        """
        written = self._written
        if size < max(_GIVEN_MIN_BYTES, len(written) - wire.PAGE_BYTES):
            return memoryview(written)[:size]
        self._put(len(written))
        try:
            del written[size:]
        except BufferError:  # The traceback of an earlier error holds a view of the buffer.
            return written[:size]
        return written
