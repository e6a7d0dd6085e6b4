"""Threads that read requests from /dev/fuse and write the replies.

READ and WRITE are handled here with as little Python as possible; other requests go to the
`Dispatcher`. A thread that fails unexpectedly ends the session, so that no reader waits for it. The
kernel refuses a second reply to a request with ENOENT; so the watchdog needs no lock, and costs the
fast path only one store.
"""

import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.connection import ConnectionFeatures
from bootseer.fuse.kernel.dispatch import Dispatcher, Reply
from bootseer.fuse.kernel.operations import Buffer, Caller

# ---- memory of requests -------------------------------------------------------------------------
# The data of a write lies in a buffer of its own, so that the operation can keep the buffer. Write
# buffers are used again once all threads have released them: making a new bytearray faults in its
# pages and fills them with zeros under the GIL, which took almost half of the time for which a save
# held the GIL. All other memory of a request belongs to one thread.

# Resident from the start, also after a fork: if this process is killed while the kernel faults in
# a page of the buffer, the request fails with EIO instead of going to the successor
# (fuse_dev_do_read).
_REQUEST_MAP_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
# A write of at least this size that fills its buffer but for a page at most is passed with the
# buffer, which the operation may keep. Other writes are passed as views.
_PASSED_WHOLE_MIN_BYTES = 64 * 1024
# Most spare buffers of one size: as many as a few stripe units release at once.
_SPARE_MAX = 16


class _WriteBuffer(bytearray):
    """Buffer that becomes spare again once it and all views of it are released."""

    # Without attributes: with them, the interpreter calls `__del__` only once.
    __slots__ = ()

    def __del__(self) -> None:
        # The owner may have changed the length by the part that is not aligned to a page.
        spare = _spare.get(-(-len(self) // wire.PAGE_BYTES) * wire.PAGE_BYTES)
        if spare is not None and len(spare) < _SPARE_MAX:
            spare.append(self)


_spare: dict[int, deque[_WriteBuffer]] = {}
"""Spare buffers by size: resident, and not filled with zeros again."""


def _take_write_buffer(size: int) -> _WriteBuffer:
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
        view = memoryview(mmap.mmap(-1, wire.REQUEST_OVERHEAD_BYTES, flags=_REQUEST_MAP_FLAGS))
        self.head = view[: wire.WRITE_DATA_OFFSET]
        """The headers of a read or write, or the beginning of any other request."""
        self._overflow = view[wire.WRITE_DATA_OFFSET :]
        self._new_write_buffer(max_write_bytes)

    def _new_write_buffer(self, size: int) -> None:
        # The buffer is resident, because it was filled with zeros, or used before.
        self._written = _take_write_buffer(size)
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
        if size < max(_PASSED_WHOLE_MIN_BYTES, len(written) - wire.PAGE_BYTES):
            return memoryview(written)[:size]
        self._new_write_buffer(len(written))
        try:
            del written[size:]
        except BufferError:  # The traceback of an earlier error holds a view of the buffer.
            return written[:size]
        return written


# ---- threads ------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

# ENOENT: the request was interrupted while it was read. The others are the usual spurious errors.
_READ_AGAIN = frozenset({errno.ENOENT, errno.EINTR, errno.EAGAIN})
# ENODEV: unmounted. ECONNABORTED: aborted (FUSE_ABORT_ERROR).
_CONNECTION_ENDED = frozenset({errno.ENODEV, errno.ECONNABORTED})
# No process waits for the reply any more, or the connection is gone.
_UNDELIVERABLE = frozenset({errno.ENOENT, errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN})
_IOV_MAX = 1024
_INTERRUPT_PAUSE_S = 0.001
# Checks per deadline: a request that is too old is noticed within a quarter of the deadline.
_WATCHDOG_TICKS = 4
# The session ends when this many times the configured threads are stuck in operations.
_STUCK_THREADS_MAX_FACTOR = 8


class _Slot:
    """State of one server thread. Written by that thread, read by others without a lock."""

    __slots__ = ("is_replaced", "seen_unique", "thread", "tick_count", "unique")

    def __init__(self) -> None:
        self.unique = 0
        """Number of the request in progress; 0 between requests."""
        self.seen_unique = 0
        """Request that the watchdog has seen at its last check."""
        self.tick_count = 0
        """Number of checks since then that have seen the same request."""
        self.is_replaced = False
        """Whether another thread has taken the place of this one, which ends with its request."""
        self.thread: threading.Thread | None = None


class Session:
    """Service of one connection until the kernel ends it."""

    def __init__(
        self,
        device: int,
        dispatcher: Dispatcher,
        connection: ConnectionFeatures,
        *,
        threads: int,
        request_deadline_s: float | None,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        """Make a session; `start` starts its threads.

        `on_end` is called once, from a server thread: with None when the connection ended, or with
        the exception that ended a thread. In the latter case requests wait until another process
        answers them or the connection is aborted.
        """
        self._device = device
        self._dispatcher = dispatcher
        self._max_write_bytes = connection.max_write_bytes
        self._thread_count = threads
        self._request_deadline_s = request_deadline_s
        self._on_end = on_end
        self._interrupts: set[int] = set()
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._ended = threading.Event()
        self.was_unmounted = False
        """Whether the connection ended with the last open file instead of being aborted."""
        self._watchdog: threading.Thread | None = None

    def start(self) -> None:
        """Start the threads."""
        for _ in range(self._thread_count):
            self._start_thread()
        if self._request_deadline_s is not None:
            self._watchdog = threading.Thread(
                target=self._watch, args=(self._request_deadline_s,), name="fuse-watchdog"
            )
            self._watchdog.daemon = True
            self._watchdog.start()

    def _start_thread(self) -> None:
        slot = _Slot()
        # Daemons, because a thread stuck in an operation must not keep the process from ending.
        thread = threading.Thread(target=self._run, args=(slot,), name="fuse", daemon=True)
        slot.thread = thread
        with self._lock:
            self._slots.append(slot)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end. Return False if some are still in an operation."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = [slot.thread for slot in self._slots] + [self._watchdog]
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread is not None and thread.is_alive() for thread in threads)

    # ---- the loop ---------------------------------------------------------------------------

    def _run(self, slot: _Slot) -> None:
        failure: BaseException | None = None
        try:
            self._serve(slot)
        except BaseException as error:
            log.critical("a FUSE server thread failed: serving ends", exc_info=error)
            failure = error
        slot.unique = 0
        with self._lock:
            if slot in self._slots:
                self._slots.remove(slot)
        if failure is not None or not slot.is_replaced:
            self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._lock:
            first = not self._ended.is_set()
            self._ended.set()
        if first:
            self._on_end(failure)

    def _serve(self, slot: _Slot) -> None:
        device = self._device
        buffer = RequestBuffer(self._max_write_bytes)
        head = buffer.head
        out = bytearray(wire.OUT_HEADER_BYTES)
        readv, writev = os.readv, os.writev
        unpack, pack_into = wire.FAST_IN.unpack_from, wire.OUT_HEADER.pack_into
        interrupts = self._interrupts
        do_read = self._dispatcher.operations.read
        read_opcode, write_opcode = wire.READ, wire.WRITE
        data: Buffer | Sequence[Buffer]
        vector: Sequence[Buffer]
        while True:
            try:
                length = readv(device, buffer.into)
            except OSError as error:
                if error.errno in _READ_AGAIN:
                    continue
                if error.errno in _CONNECTION_ENDED:
                    self.was_unmounted = error.errno == errno.ENODEV
                    return
                raise
            _, opcode, unique, node, uid, gid, pid, handle, offset, size = unpack(head)
            slot.unique = unique
            caller = Caller(uid, gid, pid, unique, interrupts)
            if opcode == read_opcode:
                try:
                    data = do_read(caller, node, handle, offset, size)
                    kind = type(data)
                    if kind is bytes or kind is bytearray:
                        count = len(data)
                        vector = (out, data)  # type: ignore[assignment]
                    else:
                        vector, count = _gather(out, data)
                    if count > size:
                        raise ValueError(f"Operations.read returned {count} bytes for {size}")
                    pack_into(out, 0, 16 + count, 0, unique)
                except BaseException as error:
                    self._send_errno_of(read_opcode, unique, error)
                else:
                    try:
                        writev(device, vector)
                    except OSError as error:
                        self._reply_failed(read_opcode, unique, error)
                # A waiting thread must not keep the operation's buffers alive.
                data, vector = b"", ()
            elif opcode == write_opcode:
                self._write(caller, node, handle, offset, size, buffer)
            else:
                self._dispatch(opcode, caller, node, buffer.body(length))
            slot.unique = 0
            if interrupts:
                interrupts.discard(unique)
            if slot.is_replaced:
                return

    def _write(
        self, caller: Caller, node: int, handle: int, offset: int, size: int, buffer: RequestBuffer
    ) -> None:
        write_flags, lock_owner, flags = wire.WRITE_TAIL_IN.unpack_from(
            buffer.head, wire.IN_HEADER_BYTES
        )
        if write_flags & wire.WRITE_LOCKOWNER:
            caller = caller.with_lock_owner(lock_owner)
        try:
            data = buffer.data(size)
            taken = self._dispatcher.operations.write(caller, node, handle, offset, data, flags)
            body = wire.WRITE_OUT.pack(taken, 0)
        except BaseException as error:
            self._send_errno_of(wire.WRITE, caller.unique, error)
            return
        self._send(wire.WRITE, caller.unique, Reply(body))

    def _dispatch(self, opcode: int, caller: Caller, node: int, body: memoryview) -> None:
        if opcode == wire.INTERRUPT:
            self._interrupt(caller.unique, wire.INTERRUPT_IN.unpack_from(body)[0])
            return
        answer = self._dispatcher.answer(opcode, caller, node, body)
        if answer is not None:
            self._send(opcode, caller.unique, answer)

    # ---- replies ----------------------------------------------------------------------------

    def _send(self, opcode: int, unique: int, answer: Reply) -> None:
        header = wire.OUT_HEADER.pack(
            wire.OUT_HEADER_BYTES + len(answer.body), -answer.error, unique
        )
        try:
            os.writev(self._device, (header, answer.body))
        except OSError as error:
            self._reply_failed(opcode, unique, error)
            if answer.undelivered is not None:
                try:
                    answer.undelivered()
                except BaseException as undo_error:
                    self._dispatcher.report(opcode, undo_error)
        if answer.afterwards is not None:
            answer.afterwards()

    def _send_errno_of(self, opcode: int, unique: int, error: BaseException) -> None:
        self._send(opcode, unique, Reply(error=self._dispatcher.errno_for(opcode, error)))

    def _reply_failed(self, opcode: int, unique: int, error: OSError) -> None:
        if error.errno in _UNDELIVERABLE:
            return
        self._dispatcher.report(opcode, error)
        # The kernel refused the reply as malformed, and the request still waits. (If the reply was
        # too long, the kernel has ended the request, and answers ENOENT to this error.)
        self._send_error(errno.EIO, unique)

    def _send_error(self, code: int, unique: int) -> None:
        """Answer a request with an errno, unless the kernel no longer waits for it."""
        header = wire.OUT_HEADER.pack(wire.OUT_HEADER_BYTES, -code, unique)
        try:
            os.write(self._device, header)
        except OSError as error:
            if error.errno not in _UNDELIVERABLE:
                raise

    # ---- interrupts and deadlines -----------------------------------------------------------

    def _interrupt(self, unique: int, target: int) -> None:
        with self._lock:
            slots = list(self._slots)
        for slot in slots:
            if slot.unique == target:
                self._interrupts.add(target)
                if slot.unique != target:
                    self._interrupts.discard(target)
                return
        # Another thread has read the request but not recorded it yet: EAGAIN makes the kernel
        # repeat the interrupt, unless the request is answered by then. The pause lets the other
        # thread get the GIL; without a pause, the kernel repeated an interrupt thousands of times.
        time.sleep(_INTERRUPT_PAUSE_S)
        self._send_error(errno.EAGAIN, unique)

    def _watch(self, deadline_s: float) -> None:
        try:
            while not self._ended.wait(deadline_s / _WATCHDOG_TICKS):
                with self._lock:
                    slots = list(self._slots)
                for slot in slots:
                    self._check(slot, deadline_s)
        except BaseException as error:
            log.critical("the FUSE watchdog failed: serving ends", exc_info=error)
            self._end(error)

    def _check(self, slot: _Slot, deadline_s: float) -> None:
        unique = slot.unique
        if unique != slot.seen_unique or not unique:
            slot.seen_unique, slot.tick_count = unique, 0
            return
        slot.tick_count += 1
        if slot.tick_count < _WATCHDOG_TICKS or slot.is_replaced:
            return
        slot.is_replaced = True
        self._send_error(errno.ETIMEDOUT, unique)
        self._interrupts.add(unique)
        log.warning("a request took longer than %.1f s: answered ETIMEDOUT", deadline_s)
        with self._lock:
            stuck = sum(1 for other in self._slots if other.is_replaced)
        if stuck >= self._thread_count * _STUCK_THREADS_MAX_FACTOR:
            raise TimeoutError(f"{stuck} operations do not end")
        # The stuck thread ends with its operation; a new thread takes its place.
        self._start_thread()


def _gather(out: bytearray, data: Buffer | Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Return the buffers to send, with the header first, and their size without the header."""
    parts: list[Buffer] = [data] if isinstance(data, bytes | bytearray | memoryview) else list(data)
    count = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
    if len(parts) >= _IOV_MAX:
        parts = [b"".join(parts)]
    return [out, *parts], count
