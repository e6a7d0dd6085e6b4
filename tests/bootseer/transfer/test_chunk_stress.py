"""Many threads, faults and cancellations at once: every request ends, and nothing wrong arrives."""

import random
import threading
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
)
from bootseer.transfer.chunks import Batch, ChunkFetcher
from bootseer.transfer.policy import Policy
from bootseer.transfer.ranges import Priority
from tests.bootseer.transfer import faults
from tests.bootseer.transfer.faults import COUNT, FAST, LONG_S, Cache, FaultyReader, chunk, fetch
from tests.support.ranged import as_reader


def test_fifty_threads_read_each_chunk_once(
    make: Callable[..., ChunkFetcher], reader: FaultyReader, cache: Cache
) -> None:
    fetcher = make(is_cached=cache.holds)
    prefetch = fetcher.submit([fetch(*range(n, n + 8)) for n in range(0, 32, 8)], cache.deliver)
    barrier = threading.Barrier(50)
    failures: list[BaseException] = []

    def demand(seed: int) -> None:
        numbers = list(range(COUNT))
        random.Random(seed).shuffle(numbers)
        barrier.wait(LONG_S)
        try:
            for number in numbers:
                fetcher.demand(chunk(number), cache.deliver)
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


@settings(max_examples=60)
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
    with ChunkFetcher(
        as_reader(reader), threads=2, demand_threads=1, policy=Policy(base_s=0.0005)
    ) as fetcher:
        submitted: list[tuple[Batch, set[int], Cache]] = []
        cancelled: list[Batch] = []
        for listed, is_cancelled in batches:
            cache = Cache()  # each with a delivery of its own, which must come exactly once
            wanted = [fetch(*range(n, n + count), priority=p) for n, count, p in listed]
            batch = fetcher.submit(wanted, cache.deliver)
            numbers = {n for first, count, _ in listed for n in range(first, first + count)}
            submitted.append((batch, numbers, cache))
            if is_cancelled:
                batch.cancel()
                cancelled.append(batch)
        for number in demands:
            cache = Cache()
            try:
                fetcher.demand(chunk(number), cache.deliver, deadline_s=LONG_S)
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
    make: Callable[..., ChunkFetcher], reader: FaultyReader, gate: threading.Event
) -> None:
    """No request hangs, gets wrong bytes, or reads a chunk that another one is reading."""
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
    fetcher = make(threads=3, demand_threads=2, policy=FAST)
    unexpected: list[BaseException] = []
    cache = Cache()

    def customer(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for _ in range(30):
                first = dice.randrange(COUNT - 8)
                priority = dice.choice([Priority.PREFETCH, Priority.FILL])
                wanted = fetch(*range(first, first + dice.randint(1, 8)), priority=priority)
                batch = fetcher.submit([wanted], cache.deliver)
                if dice.random() < 0.4:
                    batch.cancel()
                try:
                    fetcher.demand(chunk(dice.randrange(COUNT)), cache.deliver)
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
    fetcher.submit([fetch(*range(COUNT))], cache.deliver).wait(LONG_S)
    assert set(cache.arrived) == set(range(COUNT))
