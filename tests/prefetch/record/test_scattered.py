"""Files that starts read at different places, and files that only seem to be such."""

import random

import pytest

from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.hotset import merge_traces
from bootseer.prefetch.record.trace import Access, AccessLog, Trace

INDEX = "sha256:" + "1" * 64
LIBRARY, DATA = TracedFile(b"lib.so", b"l" * 32), TracedFile(b"data", b"d" * 32)


def start(library: range, data: list[int], *, handed: int = 0) -> Trace:
    """Return the trace of a start that asked for these pages of the data file.

    It read the library, too, of which a bundle brought the first `handed` pages.
    """
    accesses = [
        Access(0, 4096 * page, 4096, number + (2**62 if number < handed else 0))
        for number, page in enumerate(library)
    ]
    accesses += [Access(1, 4096 * page, 4096, 10**6 + n) for n, page in enumerate(data)]
    return Trace(INDEX, "w", "n", 0, "ready", 0, (LIBRARY, DATA), tuple(accesses))


def sample(seed: int, count: int = 500, of: int = 10_000) -> list[int]:
    return random.Random(seed).sample(range(of), count)


def scattered(traces: list[Trace]) -> tuple[bytes, ...]:
    """Return the paths of the files that are left out of the hot set."""
    return merge_traces(INDEX, "w", traces).scattered


def test_random_samples_are_scattered_and_what_all_read_is_not() -> None:
    traces = [start(range(3000), sample(seed)) for seed in range(3)]
    hot = merge_traces(INDEX, "w", traces)
    assert hot.scattered == (b"data",)
    assert {r.path for r in hot.ranges} == {b"lib.so"}


@pytest.mark.parametrize("count", [1, 2])
def test_few_starts_say_nothing(count: int) -> None:
    assert not scattered([start(range(10), sample(seed)) for seed in range(count)])


def test_little_is_not_looked_at() -> None:
    assert not scattered([start(range(10), sample(seed, count=200)) for seed in range(5)])


def test_samples_that_cover_most_of_a_file_are_hot() -> None:
    traces = [start(range(10), sample(seed, count=700, of=1000)) for seed in range(4)]
    assert not scattered(traces)


def test_a_start_that_ended_early_and_one_that_went_on_are_no_samples() -> None:
    """Pages from a bundle are not asked for again, so each start asks for other pages."""
    traces = [
        start(range(1000), []),
        start(range(2000), [], handed=1000),
        start(range(2000), [], handed=2000),
        start(range(2000), [], handed=2000),
    ]
    assert not scattered(traces)


def test_what_is_handed_over_hides_no_sample() -> None:
    """A bundle with an earlier start's samples brings them to each later start."""
    first = sample(0)
    traces = [start(range(10), first)]
    for seed in (1, 2):
        trace = start(range(10), sample(seed))
        handed = tuple(Access(1, 4096 * page, 4096, 2**62 + page) for page in first)
        traces.append(
            Trace(INDEX, "w", "n", 0, "ready", 0, trace.files, (*trace.accesses, *handed))
        )
    assert scattered(traces) == (b"data",)


def test_the_log_marks_what_was_handed_over() -> None:
    log = AccessLog()
    log.append(1, 0, 10)
    log.append_preloaded(2, 0, 10)
    asked, handed = (Access(*entry) for entry in log.entries())
    assert not asked.is_preloaded
    assert handed.is_preloaded
    assert 0 <= handed.after_ns < 60 * 10**9
