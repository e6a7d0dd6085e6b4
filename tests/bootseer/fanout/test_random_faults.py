"""Random faults of several nodes at once; each chunk that a node reports is compared.

Nodes begin, end, return, freeze and get full disks at random, members lie, and the store is slow
or sends wrong bytes now and then.
"""

import contextlib
import gc
import logging
import os
import random
import threading
from functools import partial
from pathlib import Path

import pytest

from bootseer.errors import UnavailableError
from bootseer.fanout.exchange import Exchange, SourceRecord
from bootseer.fanout.plan import Reason
from testbed.waiting import pause, wait_for
from tests.bootseer.fanout.nodes import KEY, Content, free_addresses, member
from tests.bootseer.fanout.test_trust import FEEDS, lying_as

_NODES, _OBJECTS, _STEPS = 7, 2, 12


class _Faulty(Content):
    """Object of a store that is slow, fails, or sends wrong bytes now and then."""

    def __init__(self, dice: random.Random) -> None:
        count, size = dice.choice([(1, 5000), (17, 300_000), (60, 70_000), (9, 2_000_000)])
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


class _Site:
    """Nodes of one job, some of them hostile."""

    def __init__(self, dice: random.Random, folder: Path, stack: contextlib.ExitStack) -> None:
        self._dice, self._folder = dice, folder
        self._addresses = free_addresses(_NODES)
        self.contents = [_Faulty(dice) for _ in range(_OBJECTS)]
        self.nodes: dict[int, _Node] = {}
        self._epoch = 0
        hostile = dice.sample(range(_NODES), dice.choice([0, 1, 1, 2]))
        for number in hostile:
            act = lying_as(number, dice.choice(FEEDS))
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
