"""The fetcher: order of reads, sharing of reads, cancellation, and its end."""

import threading
from collections.abc import Callable

import pytest

from bootseer.errors import NotFoundError, UnavailableError
from bootseer.transfer.chunks import ChunkFetcher
from bootseer.transfer.policy import Policy
from bootseer.transfer.ranges import Priority
from tests.bootseer.transfer import faults
from tests.bootseer.transfer.faults import (
    COUNT,
    LONG_S,
    Cache,
    FaultyReader,
    chunk,
    fetch,
    open_when_joined,
)

pytestmark = pytest.mark.usefixtures("no_second_requests")


def test_a_batch_delivers_every_chunk_once(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache
) -> None:
    moved: list[int] = []
    fetcher = make(on_progress=moved.append)
    batch = fetcher.submit([fetch(*range(8)), fetch(*range(8, 20))], cache.deliver)
    batch.wait(LONG_S)
    assert sorted(cache.arrived) == list(range(20))
    assert len(reader.reads) == 2
    assert batch.remaining_count == 0
    # The callback may still be on its way for the last chunk.
    fetcher.close()
    assert sum(moved) == 20 * faults.CHUNK_BYTES
    statistics = fetcher.statistics()
    assert statistics.fetched_bytes == statistics.delivered_bytes == 20 * faults.CHUNK_BYTES
    assert (statistics.fetch_count, statistics.delivered_count) == (2, 20)


def test_an_empty_batch_is_done_at_once(make: Callable[..., ChunkFetcher], cache: Cache) -> None:
    make().submit([], cache.deliver).wait(0)


def test_demand_returns_after_delivery(make: Callable[..., ChunkFetcher], cache: Cache) -> None:
    fetcher = make()
    for number in (5, 3):
        fetcher.demand(chunk(number), cache.deliver)
        assert cache.arrived[-1] == number
    statistics = fetcher.statistics()
    assert statistics.demand_count == 2
    assert statistics.demand_wait_p99_ns >= statistics.demand_wait_p50_ns > 0


def test_fetches_of_one_priority_run_in_order_and_lower_numbers_first(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    fetcher = make(threads=1)
    batches = [fetcher.submit([fetch(0)], cache.deliver)]
    assert entered.wait(LONG_S)
    for number in (1, 2):
        batches.append(fetcher.submit([fetch(number, priority=Priority.FILL)], cache.deliver))
    for number in (3, 4):
        batches.append(fetcher.submit([fetch(number)], cache.deliver))
    # Another request at a higher priority moves it up, behind the requests queued there.
    batches.append(fetcher.submit([fetch(2)], cache.deliver))
    gate.set()
    for batch in batches:
        batch.wait(LONG_S)
    assert cache.arrived == [0, 3, 4, 2, 1]


def test_demand_does_not_wait_behind_prefetch(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    both = [threading.Event(), threading.Event()]
    reader.script.extend([faults.blocking(gate, entered) for entered in both])
    fetcher = make(threads=2, demand_threads=1)
    batch = fetcher.submit([fetch(n) for n in range(10)], cache.deliver)
    assert all(entered.wait(LONG_S) for entered in both)
    fetcher.demand(chunk(40), cache.deliver, deadline_s=LONG_S)  # not queued
    fetcher.demand(chunk(9), cache.deliver, deadline_s=LONG_S)  # queued last
    assert cache.arrived == [40, 9]
    gate.set()
    batch.wait(LONG_S)
    assert all(count == 1 for count in reader.chunk_reads.values())


def test_demand_waits_for_a_chunk_in_flight(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    fetcher = make()
    fetcher.submit([fetch(0, 1, 2)], cache.deliver)
    assert entered.wait(LONG_S)
    opener = open_when_joined(fetcher, gate)
    fetcher.demand(chunk(1), cache.deliver)
    opener.join()
    assert reader.chunk_reads[1] == 1
    assert cache.arrived.count(1) == 1
    assert fetcher.statistics().joined_count == 1


def test_several_chunks_are_demanded_at_once(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache
) -> None:
    fetcher = make(policy=Policy(attempts=1))
    fetcher.demand_all([fetch(0, 1, priority=Priority.FILL), fetch(9)], cache.deliver)
    assert sorted(cache.arrived) == [0, 1, 9]
    assert len(reader.reads) == 2
    assert fetcher.statistics().demand_count == 1
    fetcher.demand_all([], cache.deliver)
    # The failure of one is reported at once.
    reader.script.append(faults.raising(NotFoundError("gone")))
    with pytest.raises(NotFoundError):
        fetcher.demand_all([fetch(20), fetch(21)], cache.deliver)


def test_a_chunk_that_landed_meanwhile_is_not_read_again(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache
) -> None:
    fetcher = make(is_cached=cache.holds)
    for _ in range(3):
        fetcher.demand(chunk(4), cache.deliver)
        fetcher.submit([fetch(4)], cache.deliver).wait(LONG_S)
    assert len(reader.reads) == 1
    assert cache.arrived == [4]


def test_cancel_drops_what_has_not_started_and_spares_what_others_want(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    fetcher = make(threads=1)
    doomed = fetcher.submit([fetch(0), fetch(1, 2, 3, 4, 5)], cache.deliver)
    assert entered.wait(LONG_S)
    other = fetcher.submit([fetch(2), fetch(4)], cache.deliver)
    doomed.cancel()
    doomed.cancel()
    with pytest.raises(UnavailableError):
        doomed.wait(LONG_S)
    gate.set()
    other.wait(LONG_S)
    assert cache.arrived == [0, 2, 4]


def test_close_fails_waiters_and_ends_the_threads(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    fetcher = make(threads=1)
    batch = fetcher.submit([fetch(0), fetch(1)], cache.deliver)
    assert entered.wait(LONG_S)
    failures: list[BaseException] = []

    def demand() -> None:
        try:
            fetcher.demand(chunk(0), cache.deliver)
        except UnavailableError as error:
            failures.append(error)

    waiter = threading.Thread(target=demand)
    waiter.start()

    def open_when_closed() -> None:
        with pytest.raises(UnavailableError):
            batch.wait(LONG_S)
        gate.set()

    opener = threading.Thread(target=open_when_closed)
    opener.start()
    fetcher.close()
    fetcher.close()
    waiter.join(LONG_S)
    opener.join(LONG_S)
    assert gate.is_set()
    assert len(failures) == 1
    assert cache.arrived == []
    with pytest.raises(UnavailableError):
        fetcher.demand(chunk(2), cache.deliver)
    with pytest.raises(UnavailableError):
        fetcher.submit([fetch(2)], cache.deliver)


def test_fill_keeps_to_its_rate_and_nothing_else_does(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache
) -> None:
    # A rate at which the burst is less than one fetch: the second one waits for hours.
    fetcher = make(fill_bytes_per_s=0.01)
    filling = fetcher.submit([fetch(n, priority=Priority.FILL) for n in range(5)], cache.deliver)
    fetcher.submit([fetch(n) for n in range(10, 20)], cache.deliver).wait(LONG_S)
    fetcher.demand(chunk(30), cache.deliver)
    assert filling.remaining_count >= 4
    # Wanted after all: leaves the capped priority.
    fetcher.demand(chunk(4), cache.deliver)
    assert 4 in cache.arrived


def test_fill_goes_on_by_itself(make: Callable[..., ChunkFetcher], cache: Cache) -> None:
    fetcher = make(fill_bytes_per_s=20_000)
    fills = [fetch(n, priority=Priority.FILL) for n in range(COUNT)]
    fetcher.submit(fills, cache.deliver).wait(LONG_S)
    assert sorted(cache.arrived) == list(range(COUNT))
