"""Nodes of a job on this machine, an object for them, and scripted members."""

import contextlib
import math
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bootseer.base.content_digest import content_digest
from bootseer.errors import UnavailableError
from bootseer.fanout import protocol
from bootseer.fanout.exchange import Exchange
from bootseer.fanout.objects import ChunkList, chunk_list
from bootseer.fanout.plan import Offer
from bootseer.fanout.trees import STORE

KEY = bytes(range(32))
CHUNK_BYTES = 10_000


class Content:
    """Object of a store; counts the bytes that are read of it."""

    def __init__(self, chunk_count: int, seed: int = 1, chunk_bytes: int = CHUNK_BYTES) -> None:
        dice = random.Random(seed)
        self.parts = [dice.randbytes(chunk_bytes - n % 7) for n in range(chunk_count)]
        self.list: ChunkList = chunk_list(
            [len(part) for part in self.parts], [content_digest(part) for part in self.parts]
        )
        self.name = self.list.name
        self.reads = 0
        self.before: Callable[[int], None] = lambda index: None
        """Function that is called before each chunk is read."""

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)

    def chunk_list(self) -> bytes:
        return self.list.encode()

    def chunk(self, index: int, offset: int, length: int) -> bytes:
        self.before(index)
        self.reads += 1
        assert (self.list.offsets[index], len(self.parts[index])) == (offset, length)
        return self.parts[index]


class Gate:
    """Gate that lets reads of the store pass up to a chunk."""

    def __init__(self, upto: float) -> None:
        self._upto, self._moved = upto, threading.Condition()

    def __call__(self, index: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: index < self._upto, 30)

    def let_pass(self, upto: float) -> None:
        """Let all reads below this chunk pass."""
        with self._moved:
            self._upto = upto
            self._moved.notify_all()

    def open(self) -> None:
        self.let_pass(math.inf)


def free_addresses(count: int) -> list[tuple[str, int]]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [("127.0.0.1", sock.getsockname()[1]) for sock in socks]


class FanoutJob:
    """Exchanges of a job's nodes; some of the nodes may be missing."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, count: int) -> None:
        self._stack, self.folder = stack, folder
        self.stored: dict[str, bytes] = {}
        """Documents of the store, as they are sent."""
        self.document_reads: list[int] = []
        """Node of each read of a document in the store."""
        self.addresses = free_addresses(count)
        self.nodes: dict[int, Exchange] = {}

    def start(self, *numbers: int, key: bytes = KEY) -> None:
        for number in numbers:
            exchange = Exchange(
                self.addresses, number, key, read_document=partial(self._read_document, number)
            )
            self.nodes[number] = self._stack.enter_context(exchange)

    def join(self, content: Content, *numbers: int) -> None:
        for number in numbers or self.nodes:
            self.nodes[number].join(content.name, self.file(number), content)

    def _read_document(self, number: int, key: str) -> bytes:
        self.document_reads.append(number)
        if key not in self.stored:
            raise UnavailableError("the store is down")
        return self.stored[key]

    def documents(self, key: str, *numbers: int) -> dict[int, tuple[bytes, bool]]:
        """Return the document at `key` as each node gets it; all ask at once."""
        asked = {number: self.nodes[number].document(key) for number in numbers or self.nodes}
        return {number: answer.result(30) for number, answer in asked.items()}

    def file(self, number: int) -> Path:
        return self.folder / f"object-{number}"

    def arrived(self, content: Content, number: int, *indexes: int) -> list[bytes]:
        """Return chunks of an object (all if none is given) as soon as a node says it has them."""
        return arrived(self.nodes[number], content, self.file(number), *indexes)

    def check(self, content: Content, *numbers: int) -> None:
        """Assert that every node's file has the object's bytes and no others."""
        for number in numbers or self.nodes:
            assert self.arrived(content, number) == content.parts
            assert self.file(number).read_bytes() == content.data


def arrived(exchange: Exchange, content: Content, file: Path, *indexes: int) -> list[bytes]:
    """Return chunks of an object (all if none is given) as soon as the exchange has them in a file.

    Raises: UnavailableError if the object ends before.
    """
    wanted = indexes or range(len(content.parts))
    news: list[tuple[tuple[int, ...], bool]] = []
    changed = threading.Condition()

    def told(counts: tuple[int, ...], is_over: bool) -> bool:
        with changed:
            news.append((counts, is_over))
            changed.notify()
        return True

    def is_known() -> bool:
        if not news:
            return False
        counts, is_over = news[-1]
        return is_over or all(counts[index % 2] > index // 2 for index in wanted)

    exchange.watch(content.name, told)
    with changed:
        assert changed.wait_for(is_known, 60), "the chunks never came"
        if news[-1][1]:
            raise UnavailableError("the object has ended")
    data, offsets = file.read_bytes(), content.list.offsets
    return [data[offsets[index] : offsets[index + 1]] for index in wanted]


@contextlib.contextmanager
def member(
    address: tuple[str, int], number: int, act: "Act", *, key: bytes = KEY
) -> Iterator[list[protocol.Request]]:
    """Run a member of the job that answers each request by `act`; yield the requests."""
    requests: list[protocol.Request] = []

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            hello = protocol.decode_hello(take(sock, protocol.HELLO_BYTES))
            nonce = os.urandom(32)
            sock.sendall(nonce + protocol.proof(key, b"source", hello, nonce))
            take(sock, protocol.PROOF_BYTES)
            while True:
                request = protocol.decode_request(take(sock, protocol.REQUEST_BYTES))
                requests.append(request)
                act(sock, request)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                threading.Thread(target=serve, args=(sock,), daemon=True).start()

    server = socket.create_server(address)
    threading.Thread(target=accept, daemon=True).start()
    try:
        yield requests
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


Act = Callable[[socket.socket, protocol.Request], None]


def offer_of(number: int, count: int = 1000) -> Offer:
    """Return the offer of a member that has every chunk and feeds no other member."""
    return Offer(number, count, 0, (STORE,))


def take(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = sock.recv(length - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def introduce(
    address: tuple[str, int], source: int, *, child: int = 0, key: bytes = KEY
) -> socket.socket:
    """Connect to a node as a member does."""
    sock = socket.create_connection(address, 10)
    try:
        hello = protocol.Hello(child, source, os.urandom(32))
        sock.sendall(hello.encode())
        nonce = take(sock, protocol.CHALLENGE_BYTES)[:32]
        sock.sendall(protocol.proof(key, b"child", hello, nonce))
    except BaseException:
        sock.close()
        raise
    return sock
