"""Memory into which one server thread reads its requests.

The data of a write lies apart from all else, so that the operation can keep it. Belongs to one
thread, but for memory that was given away with a write: it comes back from any thread, to be used
again. (A new bytearray is faulted in and filled with zeros while nobody else has the GIL: almost
half of the time in which a save held it.)
"""

import mmap
from collections import deque

from bootseer.fuse.kernel import wire

# Resident from the start, also after a fork: if this process is killed while the kernel faults in
# a page to copy a request to, the request fails with EIO instead of going to our successor
# (fuse_dev_do_read).
_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
# A write that fills its buffer, but for what is not aligned, is given away with it, if so large.
_GIVEN_MIN_BYTES = 64 * 1024
# Of one size: what a few stripe units let go of at once.
_SPARE_MAX = 16


class _Given(bytearray):
    """A buffer that is spare again once it and all views of it are released."""

    # Without attributes, or the interpreter would call `__del__` only once.
    __slots__ = ()

    def __del__(self) -> None:
        # Its owner may have cut off, or put behind it, what was not aligned.
        spare = _spare.get(-(-len(self) // wire.PAGE_BYTES) * wire.PAGE_BYTES)
        if spare is not None and len(spare) < _SPARE_MAX:
            spare.append(self)


_spare: dict[int, deque[_Given]] = {}
"""Spare buffers by size: resident, and not filled with zeros again."""


def _take(size: int) -> _Given:
    try:
        given = _spare.setdefault(size, deque()).pop()
    except IndexError:
        return _Given(size)
    given.extend(bytes(size - len(given)))
    return given


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
        # Resident as well: it was filled with zeros, or used before.
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

        A bytearray is the caller's to keep, a memoryview is valid until the next request.
        """
        written = self._written
        if size < max(_GIVEN_MIN_BYTES, len(written) - wire.PAGE_BYTES):
            return memoryview(written)[:size]
        self._put(len(written))
        try:
            del written[size:]
        except BufferError:  # the traceback of an earlier error has a view of it
            return written[:size]
        return written
