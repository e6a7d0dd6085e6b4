"""Connections between nodes: non-blocking sockets whose deadlines restart while bytes move.

For the event loop's thread.
"""

import asyncio
import os
import socket
from collections.abc import Callable

from bootseer.errors import CorruptError
from bootseer.fanout import protocol
from bootseer.fanout.protocol import Hello

# Limit of unsent bytes of a connection in the kernel of a source: few bytes are wasted when a child
# leaves, and heartbeats wait behind few bytes.
_UNSENT_BYTES = 64 << 10
_TCP_NOTSENT_LOWAT = 25
# The process wakes up once per this many bytes, and every `_LOOK_S` for fewer bytes.
_WAKE_BYTES = 256 << 10
_LOOK_S, _SMALL_BYTES = 0.25, 1024
# The event loop may fire a timer this much too early.
_TIMER_S = 0.001


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
        self._is_watched = False
        """Whether the event loop looks whether there is something to receive."""
        # What is being received, see `fill`:
        self._room, self._have, self._least = memoryview(b""), 0, 0
        self._moved: Callable[[int], None] = lambda count: None
        self._moved_s = 0.0
        self._error: OSError | None = None
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._waiter.close()
        self._unwatch()
        self._sock.close()

    async def receive(
        self,
        data: memoryview,
        silence_s: float,
        moved: Callable[[int], None] = lambda count: None,
    ) -> memoryview:
        """Fill `data` and return it; `moved` is told of each part.

        Raises: TimeoutError when nothing comes for `silence_s`; ConnectionError.
        """
        await self.fill(data, 0, len(data), silence_s, moved)
        return data

    async def fill(
        self,
        data: memoryview,
        have: int,
        least: int,
        silence_s: float,
        moved: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Receive into `data` behind its first `have` bytes; return the count of bytes in it then.

        Wait until `data` has `least` bytes, and take more if they have arrived already. For a large
        `data` this process wakes up when `data` is full, and every `_LOOK_S`.

        Raises: TimeoutError when nothing comes for `silence_s`; ConnectionError.
        """
        self._room, self._have, self._least, self._moved = data, have, least, moved
        self._moved_s = self._loop.time()
        if have < least:
            self._receive_some()
        while self._have < least:
            wait_s = silence_s - (self._loop.time() - self._moved_s)
            if wait_s <= 0:
                raise TimeoutError(f"nothing came for {silence_s:g} s")
            look_s = min(wait_s, _LOOK_S) if len(data) > _SMALL_BYTES else wait_s
            if self._error is None and not await self._readable(look_s):
                self._receive_some()
            if self._error is not None:
                raise self._error
        return self._have

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
            self._moved(count)
        else:
            self._error = ConnectionResetError("the connection was closed")

    async def send(
        self,
        data: bytes | memoryview,
        silence_s: float,
        body: bytes | memoryview = b"",
        *,
        more: bool = False,
    ) -> None:
        """Send `data` and `body`. With `more`, the last packet waits for bytes that follow at once.

        Raises: TimeoutError when nothing can be sent for `silence_s`; ConnectionError.
        """
        flags = socket.MSG_NOSIGNAL | (socket.MSG_MORE if more else 0)
        left = [memoryview(part) for part in (data, body) if part]
        while left:
            try:
                count = self._sock.sendmsg(left, (), flags)
            except BlockingIOError:
                await self._writable(silence_s)
                continue
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    async def send_file(self, file: int, offset: int, length: int, silence_s: float) -> None:
        """Send bytes of a file, without a copy. Raises as `send`; OSError of the file."""
        while length:
            try:
                count = os.sendfile(self._sock.fileno(), file, offset, length)
            except BlockingIOError:
                await self._writable(silence_s)
                continue
            if count == 0:
                raise OSError("the file of an object has become shorter")
            offset, length = offset + count, length - count

    async def _readable(self, wait_s: float) -> bool:
        self._set_wake_bytes(min(len(self._room) - self._have, _WAKE_BYTES))
        if not self._is_watched:
            self._loop.add_reader(self._open_file(), self._arrived)
            self._is_watched = True
        return await self._waiter.wait(wait_s)

    def _arrived(self) -> None:
        # The bytes are received here, because the event loop calls this again until they are. The
        # socket stays watched between two waits: a receiver of a stream waits again by then.
        if not self._waiter.is_waiting:
            self._unwatch()
            return
        self._receive_some()
        if self._have >= self._least or self._error is not None:
            self._waiter.settle()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._sock.fileno())

    async def _writable(self, silence_s: float) -> None:
        file = self._open_file()
        self._unwatch()
        self._loop.add_writer(file, self._waiter.settle)
        try:
            if not await self._waiter.wait(silence_s):
                raise TimeoutError(f"nothing could be sent for {silence_s:g} s")
        finally:
            self._loop.remove_writer(file)

    def _open_file(self) -> int:
        if (file := self._sock.fileno()) < 0:
            raise ConnectionAbortedError("the connection was closed here")
        return file

    def _set_wake_bytes(self, count: int) -> None:
        if count != self._wake_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wake_bytes = count


def _room(length: int) -> memoryview:
    return memoryview(bytearray(length))


def settle(future: "asyncio.Future[bool]", value: bool) -> None:
    """Set a future's result unless it is done already."""
    if not future.done():
        future.set_result(value)


async def connect(address: tuple[str, int], hello: Hello, key: bytes, limit_s: float) -> Link:
    """Return a connection whose both ends have proved to have the key.

    Raises: TimeoutError; OSError; CorruptError where the other end has another key.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(limit_s):
        infos = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        family, kind, number, _, place = infos[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, number)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
        except BaseException:
            sock.close()
            raise
        link = Link(sock)
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
