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

# A source has no more than this in the kernel that is not sent: what a child no longer wants when
# it leaves is little, and heartbeats are not behind much.
_UNSENT_BYTES = 64 << 10
_TCP_NOTSENT_LOWAT = 25
# One wake-up for as many bytes; a part of them is looked at every `look_s`.
_WAKE_BYTES = 256 << 10


class Link:
    """A connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket; `close` closes it."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._wake_bytes = 1
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._sock.close()

    async def receive(
        self,
        data: memoryview,
        silence_s: float,
        moved: Callable[[int], None] = lambda count: None,
        look_s: float = 0.25,
    ) -> memoryview:
        """Fill `data` and return it; `moved` is told of each part.

        Raises: TimeoutError when nothing comes for `silence_s`; ConnectionError.
        """
        left, last_s = data, self._loop.time()
        while left:
            try:
                count = self._sock.recv_into(left)
            except BlockingIOError:
                count = -1
            if count == 0:
                raise ConnectionResetError("the connection was closed")
            if count > 0:
                left, last_s = left[count:], self._loop.time()
                moved(count)
                continue
            wait_s = silence_s - (self._loop.time() - last_s)
            if wait_s <= 0:
                raise TimeoutError(f"nothing came for {silence_s:g} s")
            self._set_wake_bytes(min(len(left), _WAKE_BYTES))
            await self._ready(False, min(wait_s, look_s))
        return data

    async def send(self, data: bytes | memoryview, silence_s: float, *, more: bool = False) -> None:
        """Send `data`. With `more` the last packet waits for what follows at once.

        Raises: TimeoutError when nothing can be sent for `silence_s`; ConnectionError.
        """
        flags = socket.MSG_NOSIGNAL | (socket.MSG_MORE if more else 0)
        left = memoryview(data)
        while left:
            try:
                left = left[self._sock.send(left, flags) :]
            except BlockingIOError:
                await self._writable(silence_s)

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

    async def _writable(self, silence_s: float) -> None:
        if not await self._ready(True, silence_s):
            raise TimeoutError(f"nothing could be sent for {silence_s:g} s")

    async def _ready(self, is_write: bool, wait_s: float) -> bool:
        loop, file = self._loop, self._sock.fileno()
        if file < 0:
            raise ConnectionAbortedError("the connection was closed here")
        ready = loop.create_future()
        timer = loop.call_later(wait_s, settle, ready, False)
        add, remove = (
            (loop.add_writer, loop.remove_writer)
            if is_write
            else (loop.add_reader, loop.remove_reader)
        )
        add(file, settle, ready, True)
        try:
            return bool(await ready)
        finally:
            timer.cancel()
            remove(file)

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
            link = Link(sock)
            await link.send(hello.encode(), limit_s)
            answer = await link.receive(_room(protocol.CHALLENGE_BYTES), limit_s)
            nonce, given = bytes(answer[: protocol.NONCE_BYTES]), answer[protocol.NONCE_BYTES :]
            if not protocol.is_proof(given, key, b"source", hello, nonce):
                raise CorruptError(f"node {hello.source} has another key")
            await link.send(protocol.proof(key, b"child", hello, nonce), limit_s)
        except BaseException:
            sock.close()
            raise
        return link


async def welcome(sock: socket.socket, own: int, key: bytes, limit_s: float) -> tuple[Link, int]:
    """Return the accepted connection and the number of the node that has proved to have the key.

    Raises: TimeoutError; OSError; CorruptError, UnknownFormatError of somebody else.
    """
    link = Link(sock)
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
    return link, hello.child
