"""Random faults of several nodes at once; each chunk that a node reports is compared.

Nodes begin, end, return, freeze and get full disks at random, members lie, ask for anything and
send halves of messages, and the store is slow or sends wrong bytes now and then.
"""

import contextlib
import gc
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from bootseer.errors import UnavailableError
from bootseer.fanout import protocol
from bootseer.fanout.exchange import Exchange, SourceRecord
from bootseer.fanout.plan import Reason
from bootseer.fanout.protocol import ASK, FEED, KEEP, READ, Request
from testbed.waiting import pause, wait_for
from tests.bootseer.fanout.nodes import (
    KEY,
    Content,
    free_addresses,
    introduce,
    member,
    offer_of,
)
from tests.bootseer.fanout.test_trust import FEEDS, lying_as

_NODES, _STEPS = 7, 12


class _Faulty(Content):
    """Object of a store that is slow, fails, or sends wrong bytes now and then."""

    def __init__(self, dice: random.Random, count: int, size: int) -> None:
        super().__init__(count, dice.randrange(1 << 30), chunk_bytes=size)
        self.dice, self.is_faulty = dice, True

    def chunk(self, index: int, offset: int, length: int) -> bytes:
        data = bytearray(super().chunk(index, offset, length))
        turn = self.dice.random() if self.is_faulty else 1.0
        if turn < 0.02:
            raise UnavailableError("the store is away")
        if turn < 0.04:
            data[-1] ^= 1
        pause(0.3 if turn < 0.1 else 0.005)
        return bytes(data)


class _Node:
    """A node, and its user, who compares each chunk that is said to be here."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.wrong = exchange, 0
        self.is_free = threading.Event()
        """Cleared: the thread of the node's event loop stops at the next news, as a frozen node."""
        self.is_free.set()

    def join(self, content: Content, file: Path) -> None:
        self.exchange.join(content.name, file, content)
        reader = os.open(file, os.O_RDONLY)
        self.exchange.watch(content.name, partial(self._told, content, reader, [0, 0]))

    def _told(
        self, content: Content, reader: int, seen: list[int], counts: tuple[int, ...], is_over: bool
    ) -> bool:
        self.is_free.wait(10)
        for tree, count in enumerate(counts):
            for place in range(seen[tree], count):
                index = 2 * place + tree
                part, offset = content.parts[index], content.list.offsets[index]
                self.wrong += os.pread(reader, len(part), offset) != part
            seen[tree] = count
        if is_over:
            os.close(reader)
        return True

    def records(self) -> list[SourceRecord]:
        return self.exchange.source_records()

    def close(self) -> None:
        self.is_free.set()
        self.exchange.close()
        assert self.wrong == 0


def _mixture(
    dice: random.Random, number: int, contents: Sequence[Content], sock: socket.socket, to: Request
) -> None:
    """Send right chunks, and now and then something else, or half of it."""
    content = next((one for one in contents if one.name == to.name), contents[0])
    count = to.count
    if to.needs_list:
        _send(sock, number, protocol.LIST, content.chunk_list())
    while (index := 2 * count + to.tree) < len(content.parts):
        turn, part = dice.random(), content.parts[index]
        if turn < 0.8:
            _send(sock, number, protocol.CHUNK, part)
            count += 1
        elif turn < 0.84:
            _send(sock, number, protocol.BEAT, b"")
        elif turn < 0.87:
            head = protocol.encode_frame(protocol.CHUNK, len(part), offer_of(number))
            sock.sendall((head + part)[: dice.randrange(len(head + part))])
            pause(dice.choice([0.0, 0.3, 1.5]))
            return
        else:
            kind = dice.choice([protocol.LIST, protocol.CHUNK, protocol.BUSY, protocol.DOCUMENT, 9])
            _send(sock, number, kind, dice.choice([b"", b"x", part[:-1], part + b"x"]))
    pause(0.5)


def _send(sock: socket.socket, number: int, kind: int, data: bytes) -> None:
    sock.sendall(protocol.encode_frame(kind, len(data), offer_of(number)) + data)


def _disturb(
    dice: random.Random, address: tuple[str, int], number: int, names: Sequence[bytes]
) -> None:
    """Ask a node for anything, in any order, and read little of what it answers."""
    with contextlib.suppress(OSError), introduce(address, number, child=dice.randrange(9)) as sock:
        sock.settimeout(0.2)
        for _ in range(dice.randrange(40)):
            operation = dice.choice([ASK, ASK, ASK, FEED, READ, KEEP, 0, 9])
            count = dice.choice([0, 1, 5, 1000, (1 << 32) - 1])
            name = dice.choice([*names, bytes(32)])
            tree, leaves, needs = dice.choice([0, 1, 2]), dice.random() < 0.5, dice.random() < 0.5
            data = Request(operation, tree, count, name, leaves, needs).encode()
            sock.sendall(data if dice.random() < 0.95 else data[:7])
            if dice.random() < 0.3:
                sock.recv(dice.choice([1, 200, 100_000]))


class _Site:
    """Nodes of one job, some of them hostile."""

    def __init__(self, dice: random.Random, folder: Path, stack: contextlib.ExitStack) -> None:
        self._dice, self._folder = dice, folder
        self._addresses = free_addresses(_NODES)
        # Small chunks, and large ones, of which a line takes a part at a time.
        sizes = [dice.choice([(1, 5000), (17, 300_000), (60, 70_000)]), (40, 1 << 20)]
        self.contents = [_Faulty(dice, *size) for size in sizes]
        self.nodes: dict[int, _Node] = {}
        self._epoch = 0
        hostile = dice.sample(range(_NODES), dice.choice([0, 1, 1, 2]))
        for number in hostile:
            mixture = partial(_mixture, dice, number, self.contents)
            feeds: list[Callable[[socket.socket, Request], None]] = [*FEEDS, mixture, mixture]
            act = lying_as(number, dice.choice(feeds))
            stack.enter_context(member(self._addresses[number], number, act))
        self.sound = [number for number in range(_NODES) if number not in hostile]

    def begin(self, number: int) -> None:
        node = self.nodes[number] = _Node(Exchange(self._addresses, number, KEY))
        self._epoch += 1
        for at, content in enumerate(self.contents):
            is_full = self._dice.random() < 0.1
            file = self._folder / f"{number}-{self._epoch}-{at}"
            node.join(content, Path("/dev/full") if is_full else file)

    def end(self, number: int) -> None:
        node = self.nodes.pop(number)
        node.close()
        wrong = Reason.WRONG.value
        blamed = {one.source for one in node.records() if one.left_because == wrong}
        assert not blamed & set(self.sound)

    def end_all(self) -> None:
        for number in list(self.nodes):
            self.end(number)

    def step(self) -> None:
        number = self._dice.choice(self.sound)
        node = self.nodes.get(number)
        if node is None:
            self.begin(number)
            return
        turn = self._dice.random()
        if turn < 0.25:
            self.end(number)
        elif turn > 0.7:
            names = [content.name for content in self.contents]
            _disturb(self._dice, self._addresses[number], number, names)
        elif turn < 0.4:
            node.is_free.clear()
        elif turn < 0.6:
            node.is_free.set()
        pause(self._dice.random() * 0.15)

    def finish(self) -> None:
        """Let all faults but the hostile members end, and all nodes get everything."""
        for content in self.contents:
            content.is_faulty = False
        for number in self.sound:
            if number in self.nodes:
                self.nodes[number].is_free.set()
            else:
                self.begin(number)
        nodes = self.nodes.values()
        wait_for(lambda: all(node.exchange.has_everything for node in nodes), "everything")


@pytest.mark.parametrize("seed", range(3))
def test_random_faults(tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    dice = random.Random(seed)
    with contextlib.ExitStack() as stack:
        site = _Site(dice, tmp_path, stack)
        stack.callback(site.end_all)
        for _ in range(_STEPS):
            site.step()
        site.finish()
    wait_for(lambda: threading.active_count() <= threads, "the end of all threads")
    gc.collect()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= files, "closed files")
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == []
