"""Timelines that one node gathers of many: one object, and nothing lost with a node."""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bootseer.base.content_digest import content_digest
from bootseer.errors import CorruptError, UnavailableError
from bootseer.fanout.exchange import Exchange
from bootseer.fanout.gathering import GROUP_NODES, Gathering, TimelineRoute, gatherer_of
from bootseer.fanout.protocol import ASK, FEED, KEEP, Request
from bootseer.timeline.stored import OBJECT_BYTES_MAX, decode_gathered
from tests.bootseer.fanout.nodes import KEY, free_addresses, introduce, member

COUNT = 16


def name_of(number: int) -> str:
    return f"20261128T120000Z-7-n{number}-0"


class Group:
    """Nodes of which the first gathers the timelines of all."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.objects: list[dict[str, bytes]] = []
        self.before: Callable[[], None] = lambda: None
        """Function that is called before each object is written."""
        self.addresses = free_addresses(COUNT)
        gathering = Gathering(COUNT, self._publish)
        self.first = stack.enter_context(
            Exchange(self.addresses, 0, KEY, gathering=gathering, has_objects=False)
        )
        self.routes = [
            TimelineRoute(self.addresses, number, KEY, gathering if number == 0 else None)
            for number in range(COUNT)
        ]

    def _publish(self, data: bytes) -> None:
        self.before()
        self.objects.append(dict(decode_gathered(data)))

    def hand_over(self, *numbers: int, content: bytes = b"lines") -> list[bool]:
        with ThreadPoolExecutor(COUNT) as pool:
            return list(pool.map(lambda n: self.routes[n].deliver(name_of(n), content), numbers))


@pytest.fixture
def group() -> Iterator[Group]:
    with contextlib.ExitStack() as stack:
        yield Group(stack)


def test_timelines_of_many_nodes_are_one_object(group: Group) -> None:
    assert group.hand_over(*range(COUNT)) == [True] * COUNT
    assert group.objects[-1] == {name_of(number): b"lines" for number in range(COUNT)}
    assert len(group.objects) < COUNT


def test_a_timeline_that_has_grown_takes_the_place_of_the_last_one(group: Group) -> None:
    group.hand_over(*range(COUNT))
    assert group.hand_over(3, content=b"more") == [True]
    assert group.objects[-1][name_of(3)] == b"more"
    assert group.objects[-1][name_of(4)] == b"lines"


def test_a_node_that_gathers_and_dies_has_promised_nothing(group: Group) -> None:
    writes, dead = threading.Event(), threading.Event()

    def die() -> None:
        writes.set()
        dead.wait(30)
        raise UnavailableError("the node is dead")

    group.before = die
    with ThreadPoolExecutor(1) as pool:
        handed = pool.submit(group.hand_over, 5)
        assert writes.wait(30)
        group.first.close()
        with pytest.raises(ConnectionError):
            handed.result(30)
        dead.set()
    with pytest.raises(ConnectionError):
        group.hand_over(6)


def test_what_cannot_be_stored_is_refused(group: Group) -> None:
    def fail() -> None:
        raise UnavailableError("no store")

    group.before = fail
    assert group.hand_over(1, 2) == [False, False]
    assert not group.objects


def test_an_object_has_a_bound(group: Group) -> None:
    assert group.hand_over(0, content=bytes(OBJECT_BYTES_MAX)) == [False]
    count = OBJECT_BYTES_MAX >> 20
    with ThreadPoolExecutor(count) as pool:
        kept = list(
            pool.map(lambda n: group.routes[0].deliver(name_of(n), bytes(1 << 20)), range(count))
        )
    assert True in kept
    assert False in kept


def test_timelines_that_arrive_at_once_keep_to_the_bound() -> None:
    sizes: list[int] = []
    handed = bytes(OBJECT_BYTES_MAX // COUNT)
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(COUNT) as pool:
            for _ in range(20):
                gathering = Gathering(COUNT, lambda data: sizes.append(len(data)))
                kept = pool.map(
                    lambda n, to=gathering: to.keep(f"{name_of(n)}\n".encode() + handed),
                    range(COUNT),
                )
                assert not all(one.result(30) for one in kept)
    finally:
        sys.setswitchinterval(switch_s)
    assert max(sizes) <= OBJECT_BYTES_MAX


@pytest.mark.parametrize("name", ["../x", "n", "20261128T120000Z-7-n-0.jsonl.zst"])
def test_a_name_that_is_none_is_refused(group: Group, name: str) -> None:
    with pytest.raises((ConnectionError, CorruptError)):
        group.routes[1].deliver(name, b"")
    assert group.hand_over(*range(COUNT)) == [True] * COUNT


@pytest.mark.parametrize("answer", [b"", b"\7", b"\2"], ids=["none", "noise", "refused"])
def test_a_node_that_does_not_gather_is_left(answer: bytes) -> None:
    def act(sock: socket.socket, request: Request) -> None:
        sock.recv(request.count, socket.MSG_WAITALL)
        sock.sendall(answer)
        sock.shutdown(socket.SHUT_RDWR)

    addresses = free_addresses(2)
    with member(addresses[0], 0, act):
        kept = False
        with contextlib.suppress(ConnectionError):
            kept = TimelineRoute(addresses, 1, KEY, None).deliver(name_of(1), b"lines")
    assert not kept


def test_another_key_hands_over_nothing(group: Group) -> None:
    with pytest.raises((ConnectionError, CorruptError)):
        TimelineRoute(group.addresses, 1, bytes(32), None).deliver(name_of(1), b"lines")
    assert not group.objects


def answer_of(group: Group, request: Request, data: bytes = b"") -> bytes:
    """Return the first byte of the gathering node's answer, or b"" if it closes the connection."""
    with introduce(group.addresses[0], 0, child=1) as sock:
        sock.settimeout(20)
        sock.sendall(request.encode() + data)
        with contextlib.suppress(ConnectionResetError):
            return sock.recv(1)
    return b""


def test_a_timeline_whose_bytes_have_changed_is_not_kept(group: Group) -> None:
    data = f"{name_of(1)}\nlines".encode()
    request = Request(KEEP, 0, len(data), content_digest(data))
    assert answer_of(group, request, data.replace(b"lines", b"liNes")) == b""
    assert not group.objects
    assert answer_of(group, request, data) != b""


def test_a_node_that_only_gathers_answers_nothing_else(group: Group) -> None:
    for operation in (ASK, FEED):
        assert answer_of(group, Request(operation, 0, 0, bytes(32))) == b""


def test_each_group_has_one_node_that_gathers() -> None:
    assert [gatherer_of(node) for node in (0, 1, 255, 256, 300)] == [0, 0, 0, 256, 256]
    assert len({gatherer_of(node) for node in range(10_000)}) == -(-10_000 // GROUP_NODES)
