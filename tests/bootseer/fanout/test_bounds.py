"""Memory, threads and news of a node whose users and members are slow, hostile or too many."""

import contextlib
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bootseer.base.content_digest import content_digest
from bootseer.errors import UnavailableError
from bootseer.fanout import protocol
from bootseer.fanout.addresses import NotedAddresses
from bootseer.fanout.exchange import Exchange
from bootseer.fanout.protocol import FEED, READ, Request
from bootseer.fanout.trees import Trees
from bootseer.store import open_store
from testbed.waiting import wait_for
from tests.bootseer.fanout.nodes import (
    KEY,
    Content,
    FanoutJob,
    Gate,
    free_addresses,
    introduce,
    take,
)

NODES = 4
_MIB = 1 << 20


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FanoutJob]:
    with contextlib.ExitStack() as stack:
        yield FanoutJob(stack, tmp_path, NODES)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def mib_used() -> float:
    return tracemalloc.get_traced_memory()[0] / _MIB


def test_a_user_that_is_slow_hears_of_the_last_chunk(job: FanoutJob) -> None:
    """A user may refuse the news several times, also when nothing more comes."""
    content = Content(8)
    job.start(0)
    job.join(content)
    refusals, counts = 5, [0]

    def told(have: tuple[int, ...], is_over: bool) -> bool:
        nonlocal refusals
        if sum(have) == 8 and refusals:
            refusals -= 1
            return False
        counts.append(sum(have))
        return True

    job.nodes[0].watch(content.name, told)
    wait_for(lambda: counts[-1] == 8, "news of the last chunk", timeout_s=20)


def test_objects_that_are_whole_take_no_memory(job: FanoutJob, traced: None) -> None:
    job.start(*range(NODES))
    contents = [Content(6, seed, chunk_bytes=_MIB) for seed in range(4)]
    before_mib = mib_used()
    for seed, content in enumerate(contents):
        for number, node in job.nodes.items():
            node.join(content.name, job.folder / f"{seed}-{number}", content)
    wait_for(lambda: all(node.has_everything for node in job.nodes.values()))
    wait_for(lambda: mib_used() - before_mib < 8, "free memory")


class _Copies(Content):
    """Object whose store hands out memory of its own for each chunk, as stores do."""

    def chunk(self, index: int, offset: int, length: int) -> bytes:
        return bytes(bytearray(super().chunk(index, offset, length)))


def test_children_that_take_few_bytes_hold_little_memory(job: FanoutJob, traced: None) -> None:
    """A child that is slow in the middle of a chunk gets the rest of the chunk from the file."""
    content, count = _Copies(24, chunk_bytes=4 * _MIB), 10
    children: list[socket.socket] = []
    content.before = gate = Gate(0)
    job.start(0)
    job.join(content)
    have = [0]

    def told(counts: tuple[int, ...], is_over: bool) -> bool:
        have[0] = counts[0]
        return True

    def has_more_than(count: int) -> bool:
        return have[0] > count

    def begin(request: Request) -> socket.socket | None:
        """Return a child that is fed; None if there is no room for it."""
        sock = stack.enter_context(introduce(job.addresses[0], 0, child=99))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.sendall(request.encode())
        head = memoryview(take(sock, protocol.FRAME_BYTES))
        return None if protocol.decode_frame(head, 0, NODES).kind == protocol.BUSY else sock

    def is_little_used() -> bool:
        for child in children:
            take(child, 1000)
        return mib_used() - before_mib < 16

    with contextlib.ExitStack() as stack:
        stack.callback(gate.open)
        job.nodes[0].watch(content.name, told)
        before_mib = mib_used()
        for number in range(count):
            request = Request(FEED, 0, number, content.name, leaves_store=True)
            child = wait_for(partial(begin, request), "room")
            assert child is not None
            children.append(child)
            gate.let_pass(2 * number + 2)
            wait_for(partial(has_more_than, number), "a chunk")
        wait_for(is_little_used, "little memory", timeout_s=20)


def test_a_node_closes_while_threads_call_it() -> None:
    """Every call ends, with a result or an error of ours."""
    failures: list[BaseException] = []

    def call(exchange: Exchange) -> None:
        try:
            while True:
                exchange.decline(bytes(32))
        except UnavailableError:
            pass
        except BaseException as error:
            failures.append(error)

    for _ in range(30):
        exchange = Exchange(free_addresses(1), 0, KEY)
        threads = [threading.Thread(target=call, args=(exchange,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        exchange.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert not failures


def test_a_known_document_is_passed_on_when_no_more_are_taken(job: FanoutJob) -> None:
    job.start(0)
    keys = [f"hot/{number}" for number in range(256)]
    job.stored.update(dict.fromkeys(keys, b"\x01data"))
    job.documents("hot/0")

    def ask(sock: socket.socket, key: str) -> bytes:
        text = key.encode()
        sock.sendall(Request(READ, 0, len(text), content_digest(text)).encode() + text)
        while True:
            head = memoryview(take(sock, protocol.FRAME_BYTES))
            frame = protocol.decode_frame(head, 0, NODES)
            if frame.kind == protocol.DOCUMENT:
                return take(sock, frame.length)

    with introduce(job.addresses[0], 0) as sock:
        for key in keys:
            assert ask(sock, key) == b"\1data"
        with pytest.raises(ConnectionError):
            ask(sock, "hot/one-more")
    with introduce(job.addresses[0], 0) as sock:
        assert ask(sock, "hot/0") == b"\1data"


def test_nodes_are_found_while_all_reads_of_the_store_are_slow(tmp_path: Path) -> None:
    """Addresses in the store are looked up although every thread for chunks waits."""
    trees = Trees(2)
    slow, sound = trees.root(0), trees.root(1)
    blocked, content, gate = Content(100, seed=2), Content(100), Gate(0)
    waiting, counts = [], [0, 0]

    def before(index: int) -> None:
        waiting.append(index)
        gate(index)

    def told(have: tuple[int, ...], is_over: bool) -> bool:
        counts[:] = have
        return True

    blocked.before = before
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store((tmp_path / "store").as_uri()))
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]

        def begin(node: int, host: str, listener: socket.socket) -> Exchange:
            noted = NotedAddresses(store, ("job", "1", "0"), port)
            noted.note(node, host, f"n{node}")
            addresses = [("nowhere.invalid", 9)] * 2
            return stack.enter_context(
                Exchange(addresses, node, KEY, trees, listener=listener, noted=noted)
            )

        node = begin(slow, "127.0.0.1", listener)
        stack.callback(gate.open)
        node.join(blocked.name, tmp_path / "blocked", blocked, in_flight=40)
        wait_for(lambda: len(waiting) == 32, "all threads")
        other = begin(sound, "127.0.0.2", socket.create_server(("127.0.0.2", port)))
        other.join(content.name, tmp_path / "other", content)
        node.join(content.name, tmp_path / "object", content)
        node.watch(content.name, told)
        wait_for(lambda: counts[1] == 50, "the other tree", timeout_s=20)


def test_strangers_that_stop_are_hung_up_on(job: FanoutJob) -> None:
    """A connection without a proof has two seconds altogether, however often a byte comes."""
    job.start(0)
    hello = protocol.Hello(1, 0, bytes(32)).encode()
    with contextlib.ExitStack() as stack:
        socks = [
            stack.enter_context(socket.create_connection(job.addresses[0], 10)) for _ in range(3)
        ]
        socks[1].sendall(hello)
        take(socks[1], protocol.CHALLENGE_BYTES)
        data = iter(hello)

        def is_hung_up_on() -> bool:
            with contextlib.suppress(ConnectionError):
                socks[2].sendall(bytes([next(data, 0)]))
            for sock in socks[:2]:
                sock.settimeout(20)
                with contextlib.suppress(ConnectionError):
                    assert sock.recv(1) == b""
            socks[2].settimeout(0.2)
            with contextlib.suppress(ConnectionError):
                return socks[2].recv(1) == b""
            return True

        wait_for(is_hung_up_on, "the end of a slow stranger", timeout_s=20)
