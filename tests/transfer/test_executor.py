"""The executor against a store that is slow, hangs, fails and lies."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.transfer.executor import Batch, Executor
from bootseer.transfer.plan import Chunk, Priority
from tests.transfer import faults
from tests.transfer.faults import COUNT, Cache, FaultyReader, chunk, fetch

LONG_S = 20.0


@pytest.fixture
def reader() -> FaultyReader:
    return FaultyReader()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opens at the end of the test, so that no blocked reader outlives it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def make(reader: FaultyReader, gate: threading.Event) -> Iterator[Callable[..., Executor]]:
    made: list[Executor] = []
    before = set(threading.enumerate())

    def build(**options: object) -> Executor:
        settings: dict[str, object] = {"retry_base_s": 0.001, "deadline_s": LONG_S, **options}
        made.append(Executor(reader, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield build
    gate.set()
    for executor in made:
        executor.close()
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("bootseer-")]


def test_a_batch_delivers_every_chunk_once(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache
) -> None:
    moved: list[int] = []
    executor = make(on_progress=moved.append)
    batch = executor.submit([fetch(*range(8)), fetch(*range(8, 20))], cache.deliver)
    batch.wait(LONG_S)
    assert sorted(cache.arrived) == list(range(20))
    assert len(reader.reads) == 2
    assert batch.is_done
    assert batch.remaining_count == 0
    # The callback may still be on its way for the last chunk.
    executor.close()
    assert sum(moved) == 20 * faults.CHUNK_BYTES
    statistics = executor.statistics()
    assert statistics.fetched_bytes == statistics.delivered_bytes == 20 * faults.CHUNK_BYTES
    assert (statistics.fetch_count, statistics.delivered_count) == (2, 20)


def test_an_empty_batch_is_done_at_once(make: Callable[..., Executor], cache: Cache) -> None:
    make().submit([], cache.deliver).wait(0)


def test_demand_returns_after_delivery(make: Callable[..., Executor], cache: Cache) -> None:
    executor = make()
    for number in (5, 3):
        executor.demand(chunk(number), cache.deliver)
        assert cache.arrived[-1] == number
    statistics = executor.statistics()
    assert statistics.demand_count == 2
    assert statistics.demand_wait_p99_ns >= statistics.demand_wait_p50_ns > 0


def test_fetches_of_one_priority_run_in_order_and_lower_numbers_first(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    executor = make(workers=1)
    batches = [executor.submit([fetch(0)], cache.deliver)]
    assert entered.wait(LONG_S)
    for number in (1, 2):
        batches.append(executor.submit([fetch(number, priority=Priority.FILL)], cache.deliver))
    for number in (3, 4):
        batches.append(executor.submit([fetch(number)], cache.deliver))
    # Wanted sooner by somebody else: moves up, behind what is queued there.
    batches.append(executor.submit([fetch(2)], cache.deliver))
    gate.set()
    for batch in batches:
        batch.wait(LONG_S)
    assert cache.arrived == [0, 3, 4, 2, 1]


def test_demand_does_not_wait_behind_prefetch(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    both = [threading.Event(), threading.Event()]
    reader.script.extend([faults.blocking(gate, entered) for entered in both])
    executor = make(workers=2, demand_workers=1)
    batch = executor.submit([fetch(n) for n in range(10)], cache.deliver)
    assert all(entered.wait(LONG_S) for entered in both)
    executor.demand(chunk(40), cache.deliver, deadline_s=LONG_S)  # not queued
    executor.demand(chunk(9), cache.deliver, deadline_s=LONG_S)  # queued last
    assert cache.arrived == [40, 9]
    gate.set()
    batch.wait(LONG_S)
    assert all(count == 1 for count in reader.chunk_reads.values())


def test_demand_waits_for_a_chunk_in_flight(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    executor = make()
    executor.submit([fetch(0, 1, 2)], cache.deliver)
    assert entered.wait(LONG_S)
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    executor.demand(chunk(1), cache.deliver)
    opener.join()
    assert reader.chunk_reads[1] == 1
    assert cache.arrived.count(1) == 1
    assert executor.statistics().joined_count == 1


def test_several_chunks_are_demanded_at_once(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache
) -> None:
    executor = make(attempts=1)
    executor.demand_all([fetch(0, 1, priority=Priority.FILL), fetch(9)], cache.deliver)
    assert sorted(cache.arrived) == [0, 1, 9]
    assert len(reader.reads) == 2
    assert executor.statistics().demand_count == 1
    executor.demand_all([], cache.deliver)
    # The failure of one is reported at once.
    reader.script.append(faults.raising(NotFoundError("gone")))
    with pytest.raises(NotFoundError):
        executor.demand_all([fetch(20), fetch(21)], cache.deliver)


def test_demand_reads_alone_when_the_large_fetch_it_joined_fails(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    wait = faults.blocking(gate, entered)

    def fail_late(data: bytes) -> bytes:
        wait(data)
        raise UnavailableError("gone")

    reader.script.append(fail_late)
    executor = make()
    batch = executor.submit([fetch(0, 1, 2)], cache.deliver)
    assert entered.wait(LONG_S)
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    executor.demand(chunk(1), cache.deliver)
    batch.wait(LONG_S)
    opener.join()
    # Alone at once; what was around it is read again in two pieces, without it.
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
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, fault: faults.Fault
) -> None:
    reader.script.extend([fault, fault])
    executor = make()
    executor.demand(chunk(7), cache.deliver)
    assert cache.arrived == [7]
    assert len(reader.reads) == 3
    assert executor.statistics().retry_count == 2


@pytest.mark.parametrize(
    ("fault", "error", "reads"),
    [
        (faults.raising(UnavailableError("down")), UnavailableError, 4),
        (faults.raising(ConnectionResetError("reset")), UnavailableError, 4),
        (faults.raising(TimeoutError("slow")), DeadlineError, 4),
        (faults.corrupt, CorruptError, 4),
        (faults.short, CorruptError, 4),
        (faults.raising(NotFoundError("no such blob")), NotFoundError, 1),
        (faults.raising(FileNotFoundError("no such blob")), NotFoundError, 1),
        (faults.raising(PermissionDeniedError("not yours")), PermissionDeniedError, 1),
        (faults.raising(ZeroDivisionError("a bug")), BootseerError, 1),
    ],
)
def test_a_lasting_fault_is_reported_and_kills_nothing(
    make: Callable[..., Executor],
    reader: FaultyReader,
    cache: Cache,
    fault: faults.Fault,
    error: type[Exception],
    reads: int,
) -> None:
    executor = make(workers=1, demand_workers=1)
    reader.always = fault
    with pytest.raises(error):
        executor.demand(chunk(7), cache.deliver)
    assert len(reader.reads) == reads
    batch = executor.submit([fetch(1, 2), fetch(3)], cache.deliver)
    with pytest.raises(error):
        batch.wait(LONG_S)
    # The first failure was reported; who asks before the last one would share it.
    while batch.remaining_count:
        time.sleep(0.001)
    assert cache.arrived == []
    reader.always = None
    executor.submit([fetch(1, 2, 3)], cache.deliver).wait(LONG_S)
    assert sorted(cache.arrived) == [1, 2, 3]


def test_only_the_corrupt_chunk_is_read_again(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache
) -> None:
    size = faults.CHUNK_BYTES

    def spoil_second(data: bytes) -> bytes:
        return data[:size] + faults.corrupt(data[size : 2 * size]) + data[2 * size :]

    reader.script.append(spoil_second)
    executor = make()
    executor.submit([fetch(0, 1, 2)], cache.deliver).wait(LONG_S)
    assert reader.reads == [(0, 3 * size), (size, size)]
    assert sorted(cache.arrived) == [0, 1, 2]
    assert executor.statistics().corrupt_count == 1


def test_waiters_keep_their_deadline_while_the_reader_hangs(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    reader.always = faults.blocking(gate)
    executor = make()
    with pytest.raises(DeadlineError):
        executor.demand(chunk(0), cache.deliver, deadline_s=0.05)
    with pytest.raises(DeadlineError):
        executor.submit([fetch(1)], cache.deliver).wait(0.05)


def test_hung_threads_are_replaced(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    # Each lane hangs once. Which of two lanes the next of a row of hangs hits is a matter of luck,
    # and a lane has but one thread to spare.
    reader.always = faults.blocking_first(gate)
    executor = make(workers=1, demand_workers=1, attempt_deadline_s=0.5)
    batch = executor.submit([fetch(0, 1)], cache.deliver)
    executor.demand(chunk(5), cache.deliver)
    batch.wait(LONG_S)
    assert sorted(cache.arrived) == [0, 1, 5]
    assert executor.statistics().hung_count == 2


def test_a_store_that_hangs_for_good_fails_everything_and_may_come_back(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    reader.always = faults.blocking(gate)
    executor = make(workers=1, demand_workers=1, deadline_s=0.3, attempt_deadline_s=0.05)
    batches = [executor.submit([fetch(n)], cache.deliver) for n in range(8)]
    for batch in batches:
        with pytest.raises(DeadlineError):
            batch.wait()  # without a timeout of its own
    reader.always = None
    gate.set()
    while True:
        try:
            executor.submit([fetch(30)], cache.deliver).wait(LONG_S)
            break
        except DeadlineError:
            continue  # no thread has come back yet
    assert cache.arrived == [30]


def test_a_failing_delivery_fails_its_requester_only(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    def full(_: Chunk, __: memoryview) -> None:
        raise NoSpaceError("the cache is full")

    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    executor = make(workers=1)
    failing = executor.submit([fetch(0, 1)], full)
    assert entered.wait(LONG_S)
    working = executor.submit([fetch(0, 1)], cache.deliver)
    gate.set()
    working.wait(LONG_S)
    with pytest.raises(NoSpaceError):
        failing.wait(LONG_S)
    assert len(reader.reads) == 1
    executor.demand(chunk(9), cache.deliver)


def test_a_hanging_delivery_takes_nothing_else_down(
    make: Callable[..., Executor], cache: Cache, gate: threading.Event
) -> None:
    executor = make(workers=1, demand_workers=1, attempt_deadline_s=0.5)
    calls: list[Chunk] = []

    def hang(piece: Chunk, _: memoryview) -> None:
        calls.append(piece)
        gate.wait(LONG_S)

    with pytest.raises(DeadlineError):
        executor.demand(chunk(0), hang)
    with pytest.raises(DeadlineError):
        executor.submit([fetch(1, 2)], hang).wait()
    executor.demand(chunk(3), cache.deliver)
    executor.submit([fetch(4)], cache.deliver).wait(LONG_S)
    # Never a second time while the first call may still be at it.
    assert calls == [chunk(0), chunk(1)]


def test_a_retry_that_waits_too_long_in_the_queue_is_given_up(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    executor = make(workers=1, deadline_s=1.0, attempt_deadline_s=LONG_S)
    entered = threading.Event()
    reader.script.extend([faults.raising(UnavailableError("down")), faults.blocking(gate, entered)])
    # Fails at once and rests; meanwhile the only thread goes to the second read, and is kept
    # there until the first one's deadline is over.
    first = executor.submit([fetch(0, priority=Priority.FILL), fetch(1)], cache.deliver)
    with pytest.raises((DeadlineError, UnavailableError)):
        first.wait()
    gate.set()
    executor.demand(chunk(9), cache.deliver, deadline_s=LONG_S)


def test_a_chunk_that_landed_meanwhile_is_not_read_again(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache
) -> None:
    executor = make(is_cached=cache.holds)
    for _ in range(3):
        executor.demand(chunk(4), cache.deliver)
        executor.submit([fetch(4)], cache.deliver).wait(LONG_S)
    assert len(reader.reads) == 1
    assert cache.arrived == [4]


def test_cancel_drops_what_has_not_started_and_spares_what_others_want(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    executor = make(workers=1)
    doomed = executor.submit([fetch(0), fetch(1, 2, 3, 4, 5)], cache.deliver)
    assert entered.wait(LONG_S)
    other = executor.submit([fetch(2), fetch(4)], cache.deliver)
    doomed.cancel()
    doomed.cancel()
    with pytest.raises(UnavailableError):
        doomed.wait(LONG_S)
    gate.set()
    other.wait(LONG_S)
    assert cache.arrived == [0, 2, 4]


def test_close_fails_waiters_and_ends_the_threads(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache, gate: threading.Event
) -> None:
    entered = threading.Event()
    reader.script.append(faults.blocking(gate, entered))
    executor = make(workers=1)
    batch = executor.submit([fetch(0), fetch(1)], cache.deliver)
    assert entered.wait(LONG_S)
    failures: list[BaseException] = []

    def demand() -> None:
        try:
            executor.demand(chunk(0), cache.deliver)
        except UnavailableError as error:
            failures.append(error)

    waiter = threading.Thread(target=demand)
    waiter.start()
    threading.Timer(0.1, gate.set).start()
    executor.close()
    executor.close()
    waiter.join(LONG_S)
    with pytest.raises(UnavailableError):
        batch.wait(LONG_S)
    assert len(failures) == 1
    assert cache.arrived == []
    with pytest.raises(UnavailableError):
        executor.demand(chunk(2), cache.deliver)
    with pytest.raises(UnavailableError):
        executor.submit([fetch(2)], cache.deliver)


def test_fill_keeps_to_its_rate_and_nothing_else_does(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache
) -> None:
    # A rate at which the burst is less than one fetch: the second one waits for hours.
    executor = make(fill_bytes_per_s=0.01)
    filling = executor.submit([fetch(n, priority=Priority.FILL) for n in range(5)], cache.deliver)
    executor.submit([fetch(n) for n in range(10, 20)], cache.deliver).wait(LONG_S)
    executor.demand(chunk(30), cache.deliver)
    assert filling.remaining_count >= 4
    # Wanted after all: leaves the capped priority.
    executor.demand(chunk(4), cache.deliver)
    assert 4 in cache.arrived


def test_fill_goes_on_by_itself(make: Callable[..., Executor], cache: Cache) -> None:
    executor = make(fill_bytes_per_s=20_000)
    fills = [fetch(n, priority=Priority.FILL) for n in range(COUNT)]
    executor.submit(fills, cache.deliver).wait(LONG_S)
    assert sorted(cache.arrived) == list(range(COUNT))


def test_fifty_threads_read_each_chunk_once(
    make: Callable[..., Executor], reader: FaultyReader, cache: Cache
) -> None:
    executor = make(is_cached=cache.holds)
    prefetch = executor.submit([fetch(*range(n, n + 8)) for n in range(0, 32, 8)], cache.deliver)
    barrier = threading.Barrier(50)
    failures: list[BaseException] = []

    def demand(seed: int) -> None:
        numbers = list(range(COUNT))
        random.Random(seed).shuffle(numbers)
        barrier.wait(LONG_S)
        try:
            for number in numbers:
                executor.demand(chunk(number), cache.deliver)
                assert number in cache.arrived
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=demand, args=(seed,)) for seed in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    prefetch.wait(LONG_S)
    assert failures == []
    assert sorted(cache.arrived) == list(range(COUNT))
    assert reader.chunk_reads == dict.fromkeys(range(COUNT), 1)


FAULTS: dict[str, faults.Fault] = {
    "none": lambda data: data,
    "down": faults.raising(UnavailableError("down")),
    "gone": faults.raising(NotFoundError("gone")),
    "bug": faults.raising(KeyError("bug")),
    "corrupt": faults.corrupt,
    "short": faults.short,
}
ranges = st.tuples(st.integers(0, COUNT - 9), st.integers(1, 8), st.sampled_from(Priority))


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(st.sampled_from(sorted(FAULTS)), max_size=12),
    batches=st.lists(st.tuples(st.lists(ranges, max_size=4), st.booleans()), max_size=5),
    demands=st.lists(st.integers(0, COUNT - 1), max_size=5),
)
def test_every_request_ends_and_success_means_delivered(
    script: list[str],
    batches: list[tuple[list[tuple[int, int, Priority]], bool]],
    demands: list[int],
) -> None:
    reader = FaultyReader()
    reader.script.extend(FAULTS[name] for name in script)
    with Executor(reader, workers=2, demand_workers=1, retry_base_s=0.0005) as executor:
        submitted: list[tuple[Batch, set[int], Cache]] = []
        cancelled: list[Batch] = []
        for listed, is_cancelled in batches:
            cache = Cache()  # each with a delivery of its own, which must come exactly once
            wanted = [fetch(*range(n, n + count), priority=p) for n, count, p in listed]
            batch = executor.submit(wanted, cache.deliver)
            numbers = {n for first, count, _ in listed for n in range(first, first + count)}
            submitted.append((batch, numbers, cache))
            if is_cancelled:
                batch.cancel()
                cancelled.append(batch)
        for number in demands:
            cache = Cache()
            try:
                executor.demand(chunk(number), cache.deliver, deadline_s=LONG_S)
                assert cache.arrived == [number]
            except DeadlineError:
                raise
            except BootseerError:
                assert script
        for batch, numbers, cache in submitted:
            try:
                batch.wait(LONG_S)
                assert set(cache.arrived) == numbers
            except DeadlineError:
                raise
            except BootseerError:
                assert script or batch in cancelled
        assert not reader.concurrent_twice


def test_stress_with_faults_and_cancellation(
    make: Callable[..., Executor], reader: FaultyReader, gate: threading.Event
) -> None:
    """Whatever fails or is cancelled: nobody hangs, nothing wrong arrives, nothing is read twice
    at the same time."""
    chance = random.Random(7)

    def sometimes(data: bytes) -> bytes:
        roll = chance.random()
        if roll < 0.1:
            raise UnavailableError("flaky")
        if roll < 0.15:
            return faults.corrupt(data)
        if roll < 0.2:
            return data[: len(data) // 2]
        return data

    reader.always = sometimes
    executor = make(workers=3, demand_workers=2, attempts=6)
    unexpected: list[BaseException] = []
    cache = Cache()

    def customer(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for _ in range(30):
                first = dice.randrange(COUNT - 8)
                priority = dice.choice([Priority.PREFETCH, Priority.FILL])
                wanted = fetch(*range(first, first + dice.randint(1, 8)), priority=priority)
                batch = executor.submit([wanted], cache.deliver)
                if dice.random() < 0.4:
                    batch.cancel()
                try:
                    executor.demand(chunk(dice.randrange(COUNT)), cache.deliver)
                    batch.wait(LONG_S)
                except (UnavailableError, CorruptError):
                    pass
        except BaseException as error:
            unexpected.append(error)

    threads = [threading.Thread(target=customer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert unexpected == []
    assert not reader.concurrent_twice
    reader.always = None
    executor.submit([fetch(*range(COUNT))], cache.deliver).wait(LONG_S)
    assert set(cache.arrived) == set(range(COUNT))
