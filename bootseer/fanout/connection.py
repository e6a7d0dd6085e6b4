"""Connections between nodes: non-blocking sockets whose deadlines restart while bytes move.

Questions and answers are awaited. What is sent and received all the time is not: on a slow line, a
wake-up of the event loop costs more than all else that a chunk needs. `Link.run` hands received
bytes to a generator in the callback in which they came, `Link.send_some` sends at once, and what is
looked at again and again shares one timer (`Clock`).

For the event loop's thread.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from bootseer.errors import CorruptError
from bootseer.fanout import protocol
from bootseer.fanout.protocol import Hello

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Limit of unsent bytes of a connection in the kernel of a source: few bytes are wasted when a child
# leaves, and heartbeats wait behind few bytes.
_UNSENT_BYTES = 64 << 10
_TCP_NOTSENT_LOWAT = 25
# The process wakes up once per this many bytes, and every `_LOOK_S`, or at each tick, for fewer.
_WAKE_BYTES = 256 << 10
_LOOK_S, _SMALL_BYTES = 0.25, 1024
_TICK_S = 0.1
# The event loop may fire a timer this much too early.
_TIMER_S = 0.001


Wanted = tuple[memoryview, int, int, Callable[[int], None] | None]
"""Memory, how many bytes it has, how many it has to have, and who is told of each part: see
`Link.run`."""


class Clock:
    """Timer of everything that an event loop looks at again and again.

    The timer runs only while there is something to look at.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._looks: set[Callable[[], None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, look: Callable[[], None]) -> None:
        """Call `look` about every 0.1 s from now on."""
        self._looks.add(look)
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._tick)

    def remove(self, look: Callable[[], None]) -> None:
        """Call `look` no more. Idempotent."""
        self._looks.discard(look)

    def _tick(self) -> None:
        for look in tuple(self._looks):
            if look not in self._looks:
                continue  # An earlier one has removed it.
            try:
                look()
            except Exception:
                logger.exception("fan-out: a bug; what failed is not looked at any more")
                self._looks.discard(look)
        self._timer = self._loop.call_later(_TICK_S, self._tick) if self._looks else None


class Waiter:
    """Wait with a deadline that is repeated many times.

    A timer of the event loop costs as much as the wait itself, so that it stays set from one wait
    to the next, and is set anew when it fires too early.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether `settle` ends a wait."""
        return self._future is not None and not self._future.done()

    def settle(self, value: bool = True) -> None:
        """End the wait with this result, if there is one."""
        if self._future is not None:
            settle(self._future, value)

    async def wait(self, limit_s: float) -> bool:
        """Return the result, or False after `limit_s`. One wait at a time."""
        self._until_s = self._loop.time() + limit_s
        if self._timer is None or self._timer.when() > self._until_s:
            self.close()
            self._timer = self._loop.call_at(self._until_s, self._look)
        self._future = self._loop.create_future()
        try:
            return await self._future
        finally:
            self._future = None

    def _look(self) -> None:
        self._timer = None
        if self._future is not None:
            if self._until_s - self._loop.time() < _TIMER_S:
                settle(self._future, False)
            else:
                self._timer = self._loop.call_at(self._until_s, self._look)

    def close(self) -> None:
        """Remove the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Link:
    """A connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket; `close` closes it."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._waiter = Waiter(self._loop)
        self._wake_bytes = 1
        self._is_watched = self._is_awaited = False
        """Whether the event loop looks whether there is something to receive; whether something can
        be sent."""
        # What is being received, see `Wanted`:
        self._room, self._have, self._least = memoryview(b""), 0, 0
        self._moved: Callable[[int], None] | None = None
        self._moved_s = 0.0
        self._error: OSError | None = None
        # While `run` receives:
        self._frames: Generator[Wanted, int, Any] | None = None
        self._ended: asyncio.Future[Any] | None = None
        self._clock: Clock | None = None
        self._silence_s = 0.0
        self.sent_s = time.monotonic()
        """Time at which the kernel took bytes to send last."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.stop()
        self._waiter.close()
        self._unwatch()
        self.await_room(None)
        self._sock.close()

    # Receiving

    async def receive(self, data: memoryview, silence_s: float) -> memoryview:
        """Fill `data` and return it.

        Raises: TimeoutError when nothing comes for `silence_s`; ConnectionError.
        """
        self._room, self._have, self._least, self._moved = data, 0, len(data), None
        self._moved_s = self._loop.time()
        self._receive_some()
        while self._have < self._least:
            wait_s = silence_s - (self._loop.time() - self._moved_s)
            if wait_s <= 0:
                raise TimeoutError(f"nothing came for {silence_s:g} s")
            look_s = min(wait_s, _LOOK_S) if len(data) > _SMALL_BYTES else wait_s
            if self._error is None:
                self._watch()
                if not await self._waiter.wait(look_s):
                    self._receive_some()
            if self._error is not None:
                raise self._error
        return data

    async def run(self, frames: Generator[Wanted, int, _T], silence_s: float, clock: Clock) -> _T:
        """Receive what a generator wants until it returns; return its result.

        The generator yields `Wanted`, and is sent how many bytes the memory has then: those that it
        has to have, and more if they were there. It runs in callbacks of the event loop.

        Raises: TimeoutError when nothing comes for `silence_s`; ConnectionError; what `frames`
        raises.
        """
        try:
            return await self.begin(frames, silence_s, clock)
        finally:
            self.stop()

    def begin(
        self, frames: Generator[Wanted, int, _T], silence_s: float, clock: Clock
    ) -> "asyncio.Future[_T]":
        """Begin to `run`; return the future of the result. `stop` or `close` ends it early."""
        ended: asyncio.Future[_T] = self._loop.create_future()
        self._frames, self._ended, self._clock = frames, ended, clock
        self._silence_s, self._moved_s = silence_s, self._loop.time()
        clock.add(self._look)
        try:
            self._room, self._have, self._least, self._moved = next(frames)
            self._watch()
        except StopIteration as end:
            ended.set_result(end.value)
        return ended

    def stop(self) -> None:
        """Let a generator receive nothing more. Idempotent."""
        if self._frames is not None:
            assert self._clock is not None
            self._clock.remove(self._look)
            self._frames.close()
            self._frames = None

    def _advance(self) -> None:
        """Receive what is there, and hand it to the generator if it is enough."""
        assert self._frames is not None
        assert self._ended is not None
        if self._ended.done():
            self._unwatch()
            return
        # Once: another connection's turn is next.
        self._receive_some()
        try:
            while self._have >= self._least:
                wanted = self._frames.send(self._have)
                self._room, self._have, self._least, self._moved = wanted
            if self._error is not None:
                raise self._error
            self._set_wake_bytes(min(len(self._room) - self._have, _WAKE_BYTES))
        except StopIteration as end:
            self._ended.set_result(end.value)
        except Exception as error:
            self._ended.set_exception(error)

    def _look(self) -> None:
        """Take a part of what is wanted; end a silent connection."""
        assert self._ended is not None
        if self._wake_bytes > _SMALL_BYTES:
            self._advance()
        if not self._ended.done() and self._loop.time() - self._moved_s > self._silence_s:
            self._ended.set_exception(TimeoutError(f"nothing came for {self._silence_s:g} s"))

    def _receive_some(self) -> None:
        try:
            count = self._sock.recv_into(self._room[self._have :])
        except BlockingIOError:
            return
        except OSError as error:
            self._error = error
            return
        if count:
            self._have, self._moved_s = self._have + count, self._loop.time()
            if self._moved is not None:
                self._moved(count)
        else:
            self._error = ConnectionResetError("the connection was closed")

    def _arrived(self) -> None:
        # The bytes are received here, because the event loop calls this again until they are. The
        # socket stays watched between two waits: a receiver of a stream waits again by then.
        if self._frames is not None:
            self._advance()
        elif not self._waiter.is_waiting:
            self._unwatch()
        else:
            self._receive_some()
            if self._have >= self._least or self._error is not None:
                self._waiter.settle()

    def _watch(self) -> None:
        self._set_wake_bytes(min(len(self._room) - self._have, _WAKE_BYTES))
        if not self._is_watched:
            self._loop.add_reader(self._open_file(), self._arrived)
            self._is_watched = True

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._sock.fileno())

    def _set_wake_bytes(self, count: int) -> None:
        if count != self._wake_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wake_bytes = count

    # Sending

    async def send(self, data: bytes, silence_s: float) -> None:
        """Send `data`.

        Raises: TimeoutError when nothing can be sent for `silence_s`; ConnectionError.
        """
        left = [memoryview(data)]
        try:
            while not self.send_some(left):
                self._unwatch()
                self.await_room(self._waiter.settle)
                if not await self._waiter.wait(silence_s):
                    raise TimeoutError(f"nothing could be sent for {silence_s:g} s")
        finally:
            self.await_room(None)

    def send_some(self, left: list[memoryview], *, more: bool = False) -> bool:
        """Send what the kernel takes now, and remove it from `left`; return whether that was all.

        With `more`, the last packet waits for bytes that follow at once. Raises: ConnectionError.
        """
        flags = socket.MSG_NOSIGNAL | (socket.MSG_MORE if more else 0)
        while left:
            try:
                count = self._sock.sendmsg(left, (), flags)
            except BlockingIOError:
                return False
            self.sent_s = time.monotonic()
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
        return True

    def send_file_some(self, file: int, offset: int, length: int) -> int:
        """Send what the kernel takes now of a file, without a copy; return how many bytes.

        Raises: ConnectionError; OSError of the file.
        """
        try:
            count = os.sendfile(self._sock.fileno(), file, offset, length)
        except BlockingIOError:
            return 0
        if count == 0:
            raise OSError("the file of an object has become shorter")
        self.sent_s = time.monotonic()
        return count

    def await_room(self, call: Callable[[], None] | None) -> None:
        """Call this as long as something can be sent; None: no more. Idempotent."""
        if call is not None and not self._is_awaited:
            self._loop.add_writer(self._open_file(), call)
            self._is_awaited = True
        elif call is None and self._is_awaited:
            self._is_awaited = False
            self._loop.remove_writer(self._sock.fileno())

    def _open_file(self) -> int:
        if (file := self._sock.fileno()) < 0:
            raise ConnectionAbortedError("the connection was closed here")
        return file


def _room(length: int) -> memoryview:
    return memoryview(bytearray(length))


def settle(future: "asyncio.Future[bool]", value: bool) -> None:
    """Set a future's result unless it is done already."""
    if not future.done():
        future.set_result(value)


def _numeric(address: tuple[str, int]) -> tuple[socket.AddressFamily | None, tuple[Any, ...]]:
    """Return the family of an address that needs no look-up, else None."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, address[0])
            return family, address
    return None, address


async def connect(address: tuple[str, int], hello: Hello, key: bytes, limit_s: float) -> Link:
    """Return a connection whose both ends have proved to have the key.

    Raises: TimeoutError; OSError; CorruptError where the other end has another key.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(limit_s):
        family, place = _numeric(address)
        if family is None:
            # In a thread, which a number is not worth.
            infos = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
            family, place = infos[0][0], infos[0][4]
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
            link = Link(sock)
        except BaseException:
            sock.close()
            raise
        try:
            await link.send(hello.encode(), limit_s)
            answer = await link.receive(_room(protocol.CHALLENGE_BYTES), limit_s)
            nonce, given = bytes(answer[: protocol.NONCE_BYTES]), answer[protocol.NONCE_BYTES :]
            if not protocol.is_proof(given, key, b"source", hello, nonce):
                raise CorruptError(f"node {hello.source} has another key")
            await link.send(protocol.proof(key, b"child", hello, nonce), limit_s)
        except BaseException:
            link.close()
            raise
        return link


async def welcome(link: Link, own: int, key: bytes, limit_s: float) -> int:
    """Return the number of the node that has connected, and has proved to have the key.

    Raises: TimeoutError; OSError; CorruptError, UnknownFormatError of somebody else.
    """
    # One deadline for all of it: no address holds a place by sending a byte now and then.
    async with asyncio.timeout(limit_s):
        hello = protocol.decode_hello(await link.receive(_room(protocol.HELLO_BYTES), limit_s))
        if hello.source != own:
            raise CorruptError("a connection looks for another node")
        nonce = os.urandom(protocol.NONCE_BYTES)
        await link.send(nonce + protocol.proof(key, b"source", hello, nonce), limit_s)
        given = await link.receive(_room(protocol.PROOF_BYTES), limit_s)
        if not protocol.is_proof(given, key, b"child", hello, nonce):
            raise CorruptError("a connection has another key")
    return hello.child
