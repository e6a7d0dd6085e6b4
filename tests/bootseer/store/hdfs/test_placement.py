"""Parts of a file are spread evenly over the DataNodes, and never have fewer replicas."""

import random
import threading
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.errors import UnavailableError
from bootseer.store import open_backend
from bootseer.store.hdfs.backend import HdfsBackend
from bootseer.store.hdfs.placement import ServerChooser
from testbed.hdfs.cluster import MiniHdfs
from testbed.waiting import pause, wait_for
from tests.bootseer.store.hdfs.name_nodes import NativeClient, replaced_library

MIB = 2**20


class Drawing:
    """Storage that draws servers at random among the allowed ones."""

    def __init__(self, server_count: int, replica_count: int, seed: int) -> None:
        self.servers = [f"s{number}" for number in range(server_count)]
        self.replica_count = replica_count
        self.asked_count = 0
        self._numbers = random.Random(seed)

    def place(self, avoid: Collection[str]) -> tuple[str, ...] | None:
        self.asked_count += 1
        left = [server for server in self.servers if server not in avoid]
        if len(left) < self.replica_count:
            return None
        return tuple(self._numbers.sample(left, self.replica_count))


@pytest.mark.parametrize("replica_count", [1, 2, 3])
@pytest.mark.parametrize("server_count", [3, 4, 8, 100])
def test_parts_are_spread_evenly(server_count: int, replica_count: int) -> None:
    for seed in range(20):
        drawing, placement = Drawing(server_count, replica_count, seed), ServerChooser()
        parts: Counter[str] = Counter()
        for _ in range(8):
            parts.update(placement.choose(drawing.place))
        assert sum(parts.values()) == 8 * replica_count
        if replica_count == 1:
            assert max(parts.values()) == -(-8 // server_count)
        # A refusal tells that all servers are known: it is not asked for again and again.
        assert drawing.asked_count <= 8 + 1


def _always(servers: tuple[str, ...], avoid: Collection[str]) -> tuple[str, ...]:
    return servers


@pytest.mark.parametrize("server_count", [7, 8, 12])
def test_parts_with_two_replicas_are_joined_to_a_ring(server_count: int) -> None:
    """Two parts on the same two DataNodes were once both read from one, as the other was slow."""
    drawing, placement = Drawing(server_count, 2, 5), ServerChooser()
    for pair in zip(drawing.servers, drawing.servers[1:], strict=False):
        placement.release(placement.choose(partial(_always, pair)))
    for _ in range(20):
        groups = [placement.choose(drawing.place, is_one_rack=True) for _ in range(server_count)]
        assert Counter(chain(*groups)) == dict.fromkeys(drawing.servers, 2)
        ring = {groups[0][0]}
        for _ in groups:
            ring.update(*(group for group in groups if ring.intersection(group)))
        assert ring == set(drawing.servers)
        for group in groups:
            placement.release(group)


def test_parts_that_have_ended_count_no_more() -> None:
    drawing, placement = Drawing(2, 1, 0), ServerChooser()
    first = placement.choose(drawing.place)
    assert placement.choose(drawing.place) != first
    placement.release(first)
    assert placement.choose(drawing.place) == first


def test_a_server_that_takes_no_part_is_not_chosen_again() -> None:
    """A dead server has no open parts, so that all others would be placed on it."""
    drawing, placement = Drawing(3, 1, 1), ServerChooser()
    dead = placement.choose(drawing.place)
    others = [(server,) for server in drawing.servers if (server,) != dead]
    assert placement.count_actual(dead, others[0]) == others[0]
    chosen = [placement.choose(drawing.place) for _ in range(5)]
    assert dead not in chosen
    assert Counter([others[0], *chosen]) == dict.fromkeys(others, 3)


def test_a_slow_storage_places_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy node eight placements took longer than allowed, and the last were left to chance.

    Two of eight DataNodes then had no part of the file, and two had twice their share.
    """
    monkeypatch.setattr("bootseer.store.hdfs.placement.TURN_MAX_S", 4.0)
    drawing, placement = Drawing(8, 1, 0), ServerChooser()

    def place(avoid: Collection[str]) -> tuple[str, ...] | None:
        # Eight in turn take longer than one may wait; one is far from it on a busy machine.
        pause(0.6)
        return drawing.place(avoid)

    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda _: placement.choose(place), range(8)))
    assert sorted(chosen) == sorted((server,) for server in drawing.servers)


def test_a_storage_that_hangs_places_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.store.hdfs.placement.TURN_MAX_S", 0.05)
    placement, over = ServerChooser(), threading.Event()

    def hang(avoid: Collection[str]) -> tuple[str, ...] | None:
        over.wait(60)
        return ()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(placement.choose, hang)
        wait_for(placement._turn.locked, interval_s=0.001)
        assert placement.choose(lambda avoid: ("s0",)) == ()
        over.set()
        assert first.result() == ()
    assert placement.choose(lambda avoid: ("s0",)) == ("s0",)


def test_a_storage_that_says_nothing() -> None:
    placement = ServerChooser()
    assert placement.choose(lambda avoid: ()) == ()
    assert placement.count_actual((), ("a",)) == ()
    assert placement.choose(lambda avoid: None) == ()


class _Refusing(NativeClient):
    """NameNode that creates files, with DataNodes that refuse all data."""

    def __init__(self) -> None:
        self.created_count = 0

    @property
    def inner(self) -> "_Refusing":
        return self

    def create(self, path: str, options: object) -> "_Refusing":
        self.created_count += 1
        return self

    def write(self, data: bytes) -> None:
        raise RuntimeError("DataNode lost")

    def get_file_info(self, path: str) -> Any:
        return SimpleNamespace(isdir=path.endswith("x"), permission=0o755, replication=3, length=0)

    def delete(self, path: str, recursive: bool) -> bool:
        return True


def test_a_file_of_a_group_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails is begun anew up to four times, which once made 48 attempts in all."""
    client = _Refusing()
    with replaced_library(monkeypatch, client) as url:
        writer = open_backend(url).group().create("f")
        with pytest.raises(UnavailableError, match="DataNode lost"):
            writer.write(bytes(100_000))
        writer.abort()
    assert client.created_count == 4


@pytest.mark.hdfs
def test_hdfs_lets_its_servers_be_chosen(hdfs: MiniHdfs, hdfs_url: str) -> None:
    backend = open_backend(hdfs_url + "?replication=1")
    assert isinstance(backend, HdfsBackend)
    counts: Counter[str] = Counter()
    writers = []
    placement = ServerChooser()
    for number in range(2 * hdfs.datanode_count):
        path = f"f{number}"
        writers.append(backend.create(path))
        servers = placement.choose(writers[-1].place)
        writers[-1].write(b"x" * 100_000)
        assert writers[-1].servers() == servers
        counts.update(servers)
    assert list(counts.values()) == [2] * hdfs.datanode_count
    for writer in writers:
        writer.close()
    assert backend.read("f5") == b"x" * 100_000
    # With two replicas, only one server would be left: rather two, anywhere.
    double = open_backend(hdfs_url + "?replication=2")
    assert isinstance(double, HdfsBackend)
    with double.create("g") as writer:
        first = writer.place(())
        assert first is not None
        assert len(first) == 2
        writer.write(b"y")
    with double.create("h") as writer:
        assert writer.place(first) is None
        writer.write(b"y" * 100_000)
        assert len(writer.servers()) == 2
    # The group is closed, so there is nothing to place.
    assert writers[5].place(()) == ()
