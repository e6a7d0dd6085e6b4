"""Hostile, slow or silent members, and strangers: every node gets all bytes, and none is wrong."""

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.fanout import protocol
from bootseer.fanout.exchange import Exchange
from bootseer.fanout.protocol import (
    ASK,
    BEAT,
    BUSY,
    CHUNK,
    DOCUMENT,
    FEED,
    LIST,
    Request,
    encode_frame,
    encode_offer,
)
from bootseer.fanout.trees import Trees
from testbed.waiting import pause, wait_for
from tests.bootseer.fanout.nodes import (
    KEY,
    Act,
    Content,
    FanoutJob,
    Gate,
    introduce,
    member,
    offer_of,
    take,
)

NODES = 5
HOSTILE = Trees(NODES).root(0)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FanoutJob]:
    with contextlib.ExitStack() as stack:
        yield FanoutJob(stack, tmp_path, NODES)


def lying_as(number: int, feed: Callable[[socket.socket, Request], None]) -> Act:
    """Return an act that claims to have every chunk, and calls `feed` for members that ask."""

    def act(sock: socket.socket, request: Request) -> None:
        if request.operation == ASK:
            sock.sendall(encode_offer(offer_of(number)))
        else:
            feed(sock, request)
            raise ConnectionResetError

    return act


def send(sock: socket.socket, kind: int, data: bytes, length: int | None = None) -> None:
    sock.sendall(
        encode_frame(kind, len(data) if length is None else length, offer_of(HOSTILE)) + data
    )


CONTENT = Content(24)


def wrong_chunks(sock: socket.socket, request: Request) -> None:
    send(sock, LIST, CONTENT.list.encode())
    for index in range(request.count * 2 + request.tree, 24, 2):
        send(sock, CHUNK, bytes(len(CONTENT.parts[index])))


def another_list(sock: socket.socket, request: Request) -> None:
    send(sock, LIST, Content(24, seed=9).list.encode())


def huge_frame(sock: socket.socket, request: Request) -> None:
    send(sock, CHUNK, b"", length=(1 << 32) - 1)


def wrong_length(sock: socket.socket, request: Request) -> None:
    send(sock, LIST, CONTENT.list.encode())
    send(sock, CHUNK, b"x")


def noise(sock: socket.socket, request: Request) -> None:
    sock.sendall(os.urandom(10_000))


def silence(sock: socket.socket, request: Request) -> None:
    sock.settimeout(20)
    take(sock, 1)


def drip(sock: socket.socket, request: Request) -> None:
    send(sock, LIST, CONTENT.list.encode())
    data = CONTENT.parts[request.tree]
    sock.sendall(encode_frame(CHUNK, len(data), offer_of(HOSTILE)))
    for byte in data:
        sock.sendall(bytes([byte]))
        pause(0.2)


def endless_lists(sock: socket.socket, request: Request) -> None:
    while True:
        send(sock, LIST, CONTENT.list.encode())


def documents(sock: socket.socket, request: Request) -> None:
    while True:
        send(sock, DOCUMENT, b"")
        pause(0.1)


FEEDS = (
    wrong_chunks,
    another_list,
    huge_frame,
    wrong_length,
    noise,
    silence,
    drip,
    endless_lists,
    documents,
)


@pytest.mark.parametrize("feed", FEEDS, ids=lambda feed: feed.__name__)
def test_a_hostile_root_stops_nobody(job: FanoutJob, feed: Callable[..., None]) -> None:
    content = Content(24)
    with member(job.addresses[HOSTILE], HOSTILE, lying_as(HOSTILE, feed)) as requests:
        job.start(*(n for n in range(NODES) if n != HOSTILE))
        job.join(content)
        job.check(content)
        assert any(one.operation == FEED for one in requests)


def test_a_member_with_another_key_gets_and_gives_nothing(job: FanoutJob) -> None:
    content, stranger = Content(6), (HOSTILE + 1) % NODES
    job.start(*(n for n in range(NODES) if n != stranger))
    job.start(stranger, key=bytes(32))
    job.join(content)
    job.check(content)
    sources = {
        one.source
        for n, node in job.nodes.items()
        for one in node.source_records()
        if one.byte_count
    }
    assert stranger not in sources
    # It has read the store by itself.
    assert content.reads == 12


def refuses(sock: socket.socket) -> bool:
    """Return whether the node closes the connection without an answer."""
    sock.settimeout(10)
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def request_of(content: Content) -> bytes:
    return Request(FEED, 0, 0, content.name, needs_list=True).encode()


def test_proofs_that_are_none(job: FanoutJob) -> None:
    content = Content(6)
    job.start(1)
    job.join(content)
    address = job.addresses[1]
    with introduce(address, 1, key=bytes(32)) as sock:
        sock.sendall(request_of(content))
        assert refuses(sock)
    # Who looks for node 2 does not even get a proof.
    with pytest.raises(ConnectionError):
        introduce(address, 2)


def test_a_proof_that_was_heard_is_good_once(job: FanoutJob) -> None:
    content = Content(6)
    job.start(1)
    job.join(content)
    hello = protocol.Hello(0, 1, os.urandom(32))
    heard = b""
    for _ in range(2):
        with socket.create_connection(job.addresses[1], 10) as sock:
            sock.sendall(hello.encode())
            nonce = take(sock, protocol.CHALLENGE_BYTES)[:32]
            if heard:
                sock.sendall(heard + request_of(content))
                assert refuses(sock)
            else:
                heard = protocol.proof(KEY, b"child", hello, nonce)
                sock.sendall(heard + request_of(content))
                assert take(sock, protocol.FRAME_BYTES)


def test_the_sources_proof_does_not_serve_as_a_childs(job: FanoutJob) -> None:
    job.start(1)
    with socket.create_connection(job.addresses[1], 10) as sock:
        sock.sendall(protocol.Hello(0, 1, os.urandom(32)).encode())
        sock.sendall(take(sock, protocol.CHALLENGE_BYTES)[32:])
        assert refuses(sock)


def test_noise_ends_its_connection(job: FanoutJob) -> None:
    content = Content(6)
    job.start(1)
    job.join(content)
    for data in (b"GET / HTTP/1.1\r\n" * 9, os.urandom(1000)):
        with socket.create_connection(job.addresses[1], 10) as sock:
            sock.sendall(data)
            assert refuses(sock)
    with introduce(job.addresses[1], 1) as sock:
        sock.sendall(b"\xff" * protocol.REQUEST_BYTES)
        assert refuses(sock)


def test_connections_of_one_address_are_few(job: FanoutJob) -> None:
    content = Content(6)
    job.start(1)
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(introduce(job.addresses[1], 1))
        one_more = stack.enter_context(socket.create_connection(job.addresses[1], 10))
        assert refuses(one_more)
    wait_for(lambda: introduces(job.addresses[1]), "room again")
    job.join(content)
    job.check(content)


def test_strangers_take_no_places_of_members(job: FanoutJob) -> None:
    """Any process of a node may fill the places of the node's address at the others."""
    job.start(1)
    with contextlib.ExitStack() as stack:
        for _ in range(70):
            stack.enter_context(socket.create_connection(job.addresses[1], 10))
        assert introduces(job.addresses[1])


def test_streams_that_want_nothing_give_their_places_up(job: FanoutJob) -> None:
    """A member that claims to have more than its source is sent nothing, for ever."""
    source = 1
    child = Trees(NODES).children(0, source)[0]
    content = Content(40)
    content.before = gate = Gate(20)
    job.start(source)
    job.join(content)

    def kind_of_answer(sock: socket.socket, request: Request) -> int:
        sock.sendall(request.encode())
        head = take(sock, protocol.FRAME_BYTES)
        return protocol.decode_frame(memoryview(head), source, NODES).kind

    def is_fed() -> bool:
        with introduce(job.addresses[source], source) as sock:
            request = Request(FEED, 0, 0, content.name, needs_list=True)
            return kind_of_answer(sock, request) != BUSY

    with contextlib.ExitStack() as stack:
        stack.callback(gate.open)
        idle = [
            stack.enter_context(introduce(job.addresses[source], source, child=child))
            for _ in range(5)
        ]
        for sock in idle:
            assert kind_of_answer(sock, Request(FEED, 0, 1000, content.name)) == BEAT
        wait_for(is_fed, "a place", timeout_s=20)
        # The oldest one has made room.
        idle[0].settimeout(20)
        while idle[0].recv(1 << 16):
            pass


class _NeighboursListener(socket.socket):
    """Listener whose connections seem to come from addresses that it is given."""

    def __init__(self, addresses: Iterator[str]) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.bind(("127.0.0.1", 0))
        self.listen(256)
        self._addresses = addresses

    def accept(self) -> tuple[socket.socket, tuple[str, int, int, int]]:
        return super().accept()[0], (next(self._addresses), 1, 0, 0)


def is_oldest_hung_up_on(place: tuple[str, int]) -> bool:
    """Return whether the first one of 65 strangers makes room for the last one."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(place, 10)) for _ in range(65)]
        assert introduces(place)
        strangers[0].setblocking(False)
        try:
            return strangers[0].recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True


@pytest.mark.parametrize(
    ("address", "is_one_network"),
    [("2001:db8::{:x}", True), ("2001:db8:0:{:x}::1", False), ("::ffff:a00:{:x}", False)],
)
def test_strangers_of_one_network_are_few(address: str, is_one_network: bool) -> None:
    """A machine may have all 2^64 addresses of an IPv6 network, and members many neighbours."""
    listener = _NeighboursListener(address.format(n) for n in itertools.count(1))
    place = listener.getsockname()
    with Exchange([place] * 2, 1, KEY, listener=listener), contextlib.ExitStack() as stack:
        members = [stack.enter_context(introduce(place, 1)) for _ in range(70)]
        wait_for(lambda: is_oldest_hung_up_on(place) == is_one_network, "the end of strangers")
        for sock in members:
            sock.sendall(Request(ASK, 0, 0, bytes(32)).encode())
            assert take(sock, protocol.OFFER_BYTES)


def test_questions_that_come_together_are_answered_in_their_order(job: FanoutJob) -> None:
    job.start(1)
    job.join(CONTENT, 1)
    job.check(CONTENT, 1)
    names = [CONTENT.name, bytes(32), CONTENT.name]
    with introduce(job.addresses[1], 1) as sock:
        sock.sendall(b"".join(Request(ASK, 0, 0, name).encode() for name in names))
        answers = [take(sock, protocol.OFFER_BYTES) for _ in names]
    counts = [protocol.decode_offer(answer, 1, NODES).count for answer in answers]
    assert counts == [12, 0, 12]


def test_a_member_that_answers_unasked_is_no_source(job: FanoutJob) -> None:
    def act(sock: socket.socket, request: Request) -> None:
        sock.sendall(2 * encode_offer(offer_of(HOSTILE)))

    with member(job.addresses[HOSTILE], HOSTILE, act) as requests:
        others = [number for number in range(NODES) if number != HOSTILE]
        job.start(*others)
        job.join(CONTENT, *others)
        job.check(CONTENT, *others)
        assert requests


def introduces(address: tuple[str, int]) -> bool:
    with contextlib.suppress(ConnectionError), introduce(address, 1) as sock:
        sock.sendall(Request(ASK, 0, 0, bytes(32)).encode())
        return bool(take(sock, protocol.OFFER_BYTES))
    return False
