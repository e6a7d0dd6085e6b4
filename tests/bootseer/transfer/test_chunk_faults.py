"""The fetcher against stores and deliveries that hang, fail or have wrong bytes."""

import threading
from collections.abc import Callable

import pytest

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.transfer.chunks import ChunkFetcher
from bootseer.transfer.ranges import Chunk, Priority
from testbed.waiting import wait_for
from tests.bootseer.transfer import faults
from tests.bootseer.transfer.faults import (
    LONG_S,
    Cache,
    FaultyReader,
    chunk,
    fetch,
    open_when_joined,
)

pytestmark = pytest.mark.usefixtures("no_second_requests")


def test_demand_reads_alone_when_the_large_fetch_it_joined_fails(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    wait = faults.blocking(gate, entered)

    def fail_late(data: bytes) -> bytes:
        wait(data)
        raise UnavailableError("gone")

    reader.script.append(fail_late)
    fetcher = make()
    batch = fetcher.submit([fetch(0, 1, 2)], cache.deliver)
    assert entered.wait(LONG_S)
    opener = open_when_joined(fetcher, gate)
    fetcher.demand(chunk(1), cache.deliver)
    batch.wait(LONG_S)
    opener.join()
    # The chunk is read again alone at once; its neighbours in two pieces without it.
    size = faults.CHUNK_BYTES
    assert sorted(reader.reads[1:]) == [(0, size), (size, size), (2 * size, size)]
    assert sorted(cache.arrived) == [0, 1, 2]


@pytest.mark.parametrize(
    "fault",
    [
        faults.raising(UnavailableError("down")),
        faults.raising(ConnectionResetError("reset")),
        faults.raising(TimeoutError("slow")),
        faults.raising(OSError(5, "Input/output error")),
        faults.corrupt,
        faults.short,
    ],
)
def test_a_passing_fault_is_retried(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, fault: faults.Fault
) -> None:
    reader.script.extend([fault, fault])
    fetcher = make()
    fetcher.demand(chunk(7), cache.deliver)
    assert cache.arrived == [7]
    assert len(reader.reads) == 3
    assert fetcher.statistics().retry_count == 2


@pytest.mark.parametrize(
    ("fault", "error", "reads"),
    [
        (faults.raising(UnavailableError("down")), UnavailableError, 6),
        (faults.raising(ConnectionResetError("reset")), UnavailableError, 6),
        (faults.raising(TimeoutError("slow")), DeadlineError, 6),
        (faults.corrupt, CorruptError, 4),
        (faults.short, CorruptError, 4),
        (faults.raising(NotFoundError("no such blob")), NotFoundError, 1),
        (faults.raising(FileNotFoundError("no such blob")), NotFoundError, 1),
        (faults.raising(PermissionDeniedError("not yours")), PermissionDeniedError, 1),
        (faults.raising(ZeroDivisionError("a bug")), BootseerError, 1),
    ],
)
def test_a_lasting_fault_is_reported_and_kills_nothing(
    make: Callable[..., ChunkFetcher],
    reader: FaultyReader,
    cache: Cache,
    fault: faults.Fault,
    error: type[Exception],
    reads: int,
) -> None:
    fetcher = make(threads=1, demand_threads=1)
    reader.always = fault
    with pytest.raises(error):
        fetcher.demand(chunk(7), cache.deliver)
    assert len(reader.reads) == reads
    batch = fetcher.submit([fetch(1, 2), fetch(3)], cache.deliver)
    with pytest.raises(error):
        batch.wait(LONG_S)
    # The first failure was reported; a request before the last failure would share it.
    wait_for(lambda: not batch.remaining_count, interval_s=0.001)
    assert cache.arrived == []
    reader.always = None
    fetcher.submit([fetch(1, 2, 3)], cache.deliver).wait(LONG_S)
    assert sorted(cache.arrived) == [1, 2, 3]


def test_only_the_corrupt_chunk_is_read_again(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache
) -> None:
    size = faults.CHUNK_BYTES

    def spoil_second(data: bytes) -> bytes:
        return data[:size] + faults.corrupt(data[size : 2 * size]) + data[2 * size :]

    reader.script.append(spoil_second)
    fetcher = make()
    fetcher.submit([fetch(0, 1, 2)], cache.deliver).wait(LONG_S)
    assert reader.reads == [(0, 3 * size), (size, size)]
    assert sorted(cache.arrived) == [0, 1, 2]
    assert fetcher.statistics().corrupt_count == 1


def test_waiters_keep_their_deadline_while_the_reader_hangs(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    reader.always = faults.blocking(gate)
    fetcher = make()
    with pytest.raises(DeadlineError):
        fetcher.demand(chunk(0), cache.deliver, deadline_s=0.05)
    with pytest.raises(DeadlineError):
        fetcher.submit([fetch(1)], cache.deliver).wait(0.05)


def test_hung_threads_are_replaced(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    # Each pool hangs once. Which of two pools the next of a row of hangs hits is a matter of luck,
    # and a pool has but one thread to spare.
    reader.always = faults.blocking_first(gate)
    fetcher = make(threads=1, demand_threads=1, stall_s=3.0)
    batch = fetcher.submit([fetch(0, 1)], cache.deliver)
    fetcher.demand(chunk(5), cache.deliver)
    batch.wait(LONG_S)
    assert sorted(cache.arrived) == [0, 1, 5]
    assert fetcher.statistics().hung_count >= 2


def test_a_store_that_hangs_for_good_fails_everything_and_may_come_back(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    reader.always = faults.blocking(gate)
    fetcher = make(threads=1, demand_threads=1, deadline_s=0.3, stall_s=0.05)
    batches = [fetcher.submit([fetch(n)], cache.deliver) for n in range(8)]
    for batch in batches:
        with pytest.raises(DeadlineError):
            batch.wait()  # without a timeout of its own
    reader.always = None
    gate.set()
    wait_for(lambda: _is_fetched(fetcher, cache), "a thread that came back")
    assert set(cache.arrived) == {30}


def _is_fetched(fetcher: ChunkFetcher, cache: Cache) -> bool:
    try:
        fetcher.submit([fetch(30)], cache.deliver).wait(LONG_S)
    except DeadlineError:
        return False
    return True


def test_a_failing_delivery_fails_its_requester_only(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    def full(_: Chunk, __: memoryview) -> None:
        raise NoSpaceError("the cache is full")

    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    fetcher = make(threads=1)
    failing = fetcher.submit([fetch(0, 1)], full)
    assert entered.wait(LONG_S)
    working = fetcher.submit([fetch(0, 1)], cache.deliver)
    gate.set()
    working.wait(LONG_S)
    with pytest.raises(NoSpaceError):
        failing.wait(LONG_S)
    assert len(reader.reads) == 1
    fetcher.demand(chunk(9), cache.deliver)


def test_a_hanging_delivery_takes_nothing_else_down(
    make: Callable[..., ChunkFetcher], cache: Cache, gate: threading.Event
) -> None:
    fetcher = make(threads=1, demand_threads=1, stall_s=1.5)
    calls: list[Chunk] = []

    def hang(piece: Chunk, _: memoryview) -> None:
        calls.append(piece)
        gate.wait(LONG_S)

    with pytest.raises(DeadlineError):
        fetcher.demand(chunk(0), hang)
    with pytest.raises(DeadlineError):
        fetcher.submit([fetch(1, 2)], hang).wait()
    fetcher.demand(chunk(3), cache.deliver)
    fetcher.submit([fetch(4)], cache.deliver).wait(LONG_S)
    # Never a second time while the first call may still be at it.
    assert calls == [chunk(0), chunk(1)]


def test_a_retry_that_waits_too_long_in_the_queue_is_given_up(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    fetcher = make(threads=1, deadline_s=1.0, stall_s=LONG_S)
    entered = threading.Event()
    reader.script.extend([faults.raising(UnavailableError("down")), faults.blocking(gate, entered)])
    # Fails at once and rests; meanwhile the only thread goes to the second read, and is kept
    # there until the first one's deadline is over.
    first = fetcher.submit([fetch(0, priority=Priority.FILL), fetch(1)], cache.deliver)
    with pytest.raises((DeadlineError, UnavailableError)):
        first.wait()
    gate.set()
    fetcher.demand(chunk(9), cache.deliver, deadline_s=LONG_S)
