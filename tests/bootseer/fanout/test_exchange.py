"""Nodes that feed each other over real sockets, with some of them at fault."""

import asyncio
import contextlib
import gc
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import TypeVarTuple

import pytest

from bootseer.errors import InvalidInputError, UnavailableError
from bootseer.fanout.exchange import Exchange
from bootseer.fanout.hosting import in_flight
from bootseer.fanout.plan import Reason
from bootseer.fanout.protocol import ASK, FEED, Request
from bootseer.fanout.trees import STORE, Trees
from bootseer.transfer.ranges import Chunk
from testbed.waiting import wait_for
from tests.bootseer.fanout.nodes import (
    KEY,
    Content,
    FanoutJob,
    Gate,
    arrived,
    free_addresses,
    member,
)

_Given = TypeVarTuple("_Given")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FanoutJob]:
    with contextlib.ExitStack() as stack:
        yield FanoutJob(stack, tmp_path, 6)


def test_all_nodes_get_an_object_of_which_the_store_sends_one_copy(job: FanoutJob) -> None:
    content = Content(41)
    job.start(*range(6))
    job.join(content)
    job.check(content)
    assert content.reads == 41
    fed = [one for node in job.nodes.values() for one in node.source_records()]
    assert sum(one.byte_count for one in fed if one.source == STORE) == len(content.data)
    assert {one.source for one in job.nodes[0].source_records()} == {
        Trees(6).parent(t, 0) for t in (0, 1)
    }


def test_no_sound_node_sends_wrong_bytes(job: FanoutJob) -> None:
    """The memory of a large chunk is used again only when all children have it."""
    content = Content(80, chunk_bytes=1 << 20)
    job.start(*range(6))
    job.join(content)
    job.check(content)
    fed = [one for node in job.nodes.values() for one in node.source_records()]
    assert Reason.WRONG.value not in {one.left_because for one in fed}


def test_an_object_of_one_chunk_and_two_objects_at_once(job: FanoutJob) -> None:
    small, other = Content(1), Content(9, seed=2)
    job.start(*range(6))
    job.join(small)
    for number, node in job.nodes.items():
        node.join(other.name, job.folder / f"other-{number}", other)
    job.check(small)
    assert arrived(job.nodes[5], other, job.folder / "other-5", 8) == [other.parts[8]]


def test_nodes_that_come_later_or_never_are_done_without(job: FanoutJob) -> None:
    content = Content(20)
    job.start(5)
    job.join(content)
    job.check(content)
    roots = {Trees(6).root(tree) for tree in (0, 1)}
    late = [n for n in range(5) if n not in roots][:2]
    job.start(*late)
    job.join(content, *late)
    job.check(content)
    # Everybody above them is missing, and what node 5 has is found nevertheless.
    assert content.reads == 20


def test_a_node_that_ends_in_the_middle_is_left(job: FanoutJob) -> None:
    content = Content(40)
    content.before = gate = Gate(20)
    job.start(*range(6))
    job.join(content)
    for number in job.nodes:
        assert job.arrived(content, number, 10) == [content.parts[10]]
    # Each node feeds somebody.
    job.nodes.pop(1).close()
    gate.open()
    job.check(content)


def test_a_full_disk_ends_the_object_on_its_node_alone(
    job: FanoutJob, caplog: pytest.LogCaptureFixture
) -> None:
    content = Content(10)
    job.start(*range(6))
    full = Trees(6).root(0)
    job.nodes[full].join(content.name, Path("/dev/full"), content)
    others = [n for n in range(6) if n != full]
    job.join(content, *others)
    with pytest.raises(UnavailableError):
        job.arrived(content, full)
    assert "No space left" in caplog.text
    job.check(content, *others)


def test_a_store_that_fails_is_read_again(job: FanoutJob) -> None:
    content = Content(4)
    failures: list[int] = []

    def fail(index: int) -> None:
        if len(failures) < 8:
            failures.append(index)
            raise UnavailableError("the store is away")

    content.before = fail
    job.start(0, 1)
    job.join(content)
    job.check(content)
    assert len(failures) == 8


def test_wrong_bytes_of_the_store_reach_nobody(job: FanoutJob) -> None:
    content, other = Content(6), Content(6, seed=3)
    job.start(*range(6))
    good = content.parts[2]
    content.parts[2] = other.parts[2]
    job.join(content)
    wait_for(lambda: content.reads > 12, "second reads")
    for number in job.nodes:
        assert other.parts[2] not in job.file(number).read_bytes()
    content.parts[2] = good
    job.check(content)


def test_what_cannot_be_right_is_refused_in_one_sentence(tmp_path: Path) -> None:
    addresses = free_addresses(2)
    with pytest.raises(InvalidInputError, match="32 bytes"):
        Exchange(addresses, 0, b"short")
    with pytest.raises(InvalidInputError, match="own"):
        Exchange(addresses, 2, KEY)
    with socket.create_server(("", addresses[0][1])), pytest.raises(OSError, match="in use"):
        Exchange(addresses, 0, KEY)
    content = Content(1)
    exchange = Exchange(addresses, 0, KEY)
    with pytest.raises(UnavailableError, match="does not travel"):
        exchange.watch(content.name, lambda counts, is_over: True)
    exchange.join(content.name, tmp_path / "one", content)
    with pytest.raises(InvalidInputError, match="joined already"):
        exchange.join(content.name, tmp_path / "two", content)
    exchange.close()
    exchange.close()
    with pytest.raises(UnavailableError, match="closed"):
        exchange.join(content.name, tmp_path / "one", content)


def test_files_on_several_disks_are_read_at_once(tmp_path: Path) -> None:
    chunks = [Chunk(f"part-{n % 8}", n // 8, 1, bytes(32)) for n in range(40)]
    assert in_flight(chunks) == 4
    assert in_flight([Chunk("one", n, 1, bytes(32)) for n in range(40)]) == 2
    assert in_flight([Chunk(str(n), 0, 1, bytes(32)) for n in range(40)]) == 8
    content = Content(8)
    # Each of the eight reads waits for all others.
    together = threading.Barrier(8)

    def meet(index: int) -> None:
        together.wait(30)

    content.before = meet
    with Exchange(free_addresses(1), 0, KEY) as exchange:
        exchange.join(content.name, tmp_path / "object", content, in_flight(chunks))
        assert arrived(exchange, content, tmp_path / "object") == content.parts


def test_an_object_beside_another_one_begins_with_one_read_of_the_store(tmp_path: Path) -> None:
    """Otherwise the first chunk of each of many objects comes with the last of the others."""
    first, second = Content(8, seed=1), Content(8, seed=2)
    gate, begun = Gate(0), list[int]()
    first.before = gate

    def wait(index: int) -> None:
        begun.append(index)
        gate(index)

    second.before = wait
    with Exchange(free_addresses(1), 0, KEY) as exchange:
        exchange.join(first.name, tmp_path / "first", first, 4)
        exchange.join(second.name, tmp_path / "second", second, 4)
        wait_for(lambda: len(begun) >= 2, "a read of each tree")
        # What the loop has begun before it answers has begun by then.
        exchange.watch(second.name, lambda counts, is_over: True)
        assert sorted(begun) == [0, 1]
        gate.open()
        for content, name in ((first, "first"), (second, "second")):
            assert arrived(exchange, content, tmp_path / name) == content.parts


def test_names_that_do_not_resolve_are_nodes_that_are_not_there(tmp_path: Path) -> None:
    addresses = [("nowhere.invalid", 9), *free_addresses(1)]
    content = Content(5)
    with Exchange(addresses, 1, KEY) as exchange:
        exchange.join(content.name, tmp_path / "object", content)
        assert arrived(exchange, content, tmp_path / "object") == content.parts


def test_a_node_that_has_an_object_is_not_waited_for(job: FanoutJob) -> None:
    """After one node of a job is replaced, all the others have the object already."""
    content = Content(10)
    job.start(*range(6))
    for number in range(5):
        job.nodes[number].decline(content.name)
    job.join(content, 5)
    job.check(content, 5)
    fed = [one for one in job.nodes[5].source_records() if one.source != STORE]
    assert fed
    # They said so, and were not left because they stayed silent or had nothing.
    assert {one.left_because for one in fed} == {Reason.BUSY.value}
    assert not any(one.byte_count for one in fed)


def test_a_node_that_declined_an_object_joins_it_later(job: FanoutJob) -> None:
    """One process of a node has the object from an earlier start, and another one lacks it."""
    content = Content(10)
    job.start(0, 1)
    job.nodes[1].decline(content.name)
    job.join(content)
    job.check(content)


def test_a_user_is_told_how_far_an_object_has_come(job: FanoutJob) -> None:
    content = Content(20)
    content.before = gate = Gate(10)
    job.start(0, 1)
    job.join(content)
    seen: list[tuple[int, bool]] = []
    refusals = [True, True]

    def told(counts: tuple[int, ...], is_over: bool) -> bool:
        if refusals and sum(counts):
            return not refusals.pop()
        seen.append((sum(counts), is_over))
        return True

    job.nodes[1].watch(content.name, told)
    wait_for(lambda: (10, False) in seen, "half of the object")
    gate.open()
    wait_for(lambda: (20, False) in seen, "all of the object")
    job.nodes[1].close()
    assert seen[-1] == (20, True)
    assert seen == sorted(seen)


def test_all_nodes_know_that_bytes_of_an_unfinished_chunk_come(job: FanoutJob) -> None:
    content = Content(6)
    content.before = gate = Gate(0)
    job.start(*range(6))
    for number, node in job.nodes.items():
        node.join(content.name, job.file(number), content, store_moved_s=time.monotonic)
    told: Counter[int] = Counter()

    def heard(number: int, counts: tuple[int, ...], is_over: bool) -> bool:
        told[number] += 1
        return True

    for number, node in job.nodes.items():
        node.watch(content.name, partial(heard, number))
    wait_for(lambda: all(told[number] > 1 for number in job.nodes), "news of bytes at all nodes")
    gate.open()
    job.check(content)


def test_connections_that_come_as_a_node_ends_are_closed(job: FanoutJob) -> None:
    """Otherwise the garbage collector finds them, at any time later."""
    for _ in range(20):
        job.start(0)
        clients = [socket.create_connection(job.addresses[0], 5) for _ in range(4)]
        job.nodes.pop(0).close()
        for client in clients:
            with client:
                client.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""
    assert gc.collect() >= 0


class _StoppedLoop(asyncio.SelectorEventLoop):
    """Event loop that stops at one of its steps until another thread has called for the second
    time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps_left = 0
        """Steps that are still taken; 0 is without end."""
        self.is_stopped, self._is_called = threading.Event(), threading.Event()
        self._calls = 0

    def call_soon(
        self, callback: Callable[[*_Given], object], *given: *_Given, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon(callback, *given, context=context)
        self.steps_left -= 1
        if self.steps_left == 0:
            self.is_stopped.set()
            self._is_called.wait(20)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Given], object], *given: *_Given, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(callback, *given, context=context)
        self._calls += self.steps_left > 0 or self.is_stopped.is_set()
        if self._calls == 2:
            self._is_called.set()
        return handle

    def has_stopped(self) -> bool:
        """Return whether the loop has stopped; otherwise take a step, in case that none is left."""
        if self.is_stopped.wait(0.5):
            return True
        super().call_soon_threadsafe(lambda: self.call_soon(int))
        return False


@pytest.mark.parametrize("steps", range(5, 15, 3))
def test_a_node_that_closes_as_an_object_becomes_whole_leaves_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The node cancels its reads of the store then, and its questions to nodes that are silent."""
    content, trees, loop = Content(2), Trees(4), _StoppedLoop()
    gate = Gate(0)
    read: set[int] = set()

    def before(index: int) -> None:
        read.add(index)
        gate(index)

    content.before = before
    own = next(n for n in range(4) if STORE not in (trees.parent(0, n), trees.parent(1, n)))

    def act(sock: socket.socket, request: Request) -> None:
        if request.operation == FEED:
            raise ConnectionResetError

    def question_count() -> int:
        return sum(one.operation == ASK for several in requests for one in several)

    with contextlib.ExitStack() as stack:
        stack.callback(gate.open)
        job = FanoutJob(stack, tmp_path, 4)
        requests = [
            stack.enter_context(member(job.addresses[number], number, act))
            for number in range(4)
            if number != own
        ]
        monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)
        job.start(own)
        job.join(content)
        wait_for(lambda: len(read) == 2, "reads of the store")
        known = question_count()
        wait_for(lambda: question_count() > known, "a question")
        gate.let_pass(1)
        job.arrived(content, own, 0)
        loop.steps_left = steps
        gate.let_pass(2)
        wait_for(loop.has_stopped, "the step")
        job.nodes[own].close()
        assert not asyncio.all_tasks(loop)
