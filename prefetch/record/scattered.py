"""Which files are read at other places in each start: random samples of a data file, mostly.

A bundle cannot meet such reads, so what one start read of these files must not be fetched ahead of
the next ones. Frames are the unit of verification and cannot be smaller than they were made, so
each such read goes on fetching one. Pure; any thread.
"""

from collections.abc import Sequence
from itertools import combinations

from msgspec.structs import replace

from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.touches import first_touches
from bootseer.prefetch.record.trace import Trace

SCATTERED_COUNT_MAX = 32
"""Files that a pointer names; workloads have one or two."""

_TRACE_COUNT = 3
"""The fewest traces: with fewer, a start that ended early and one that went on look the same."""
_PAGES_MIN = 256
"""A megabyte: less costs nothing worth a rule."""
_ALIKE = 2.0
"""Starts that read the same file at random read about as much of it."""
_SHARED_MAX = 0.5
"""The share of what the start that read less read: so much, or more, both read of a file that is
hot."""

_Runs = list[tuple[int, int]]


def scattered_files(traces: Sequence[Trace]) -> frozenset[TracedFile]:
    """The files of which several starts asked for about as much, and each for something else.

    What a server handed over unasked is left out: it says what its bundle had.
    """
    asked: dict[TracedFile, list[_Runs]] = {}
    for trace in traces:
        wanted = tuple(access for access in trace.accesses if not access.is_preloaded)
        by_file: dict[int, _Runs] = {}
        for touched in first_touches(replace(trace, accesses=wanted)):
            run = touched.first, touched.first + touched.page_count
            by_file.setdefault(touched.file, []).append(run)
        for number, runs in by_file.items():
            if _count(runs) >= _PAGES_MIN:
                asked.setdefault(trace.files[number], []).append(sorted(runs))
    return frozenset(file for file, starts in asked.items() if _is_scattered(starts))


def _is_scattered(starts: list[_Runs]) -> bool:
    if len(starts) < _TRACE_COUNT:
        return False
    largest = sorted(starts, key=_count)[-_TRACE_COUNT:]
    return all(
        _count(more) <= _ALIKE * _count(less) and _shared(less, more) < _SHARED_MAX * _count(less)
        for less, more in combinations(largest, 2)
    )


def _count(runs: _Runs) -> int:
    return sum(end - first for first, end in runs)


def _shared(some: _Runs, others: _Runs) -> int:
    """How many pages are in both; each sorted and disjoint."""
    count = i = j = 0
    while i < len(some) and j < len(others):
        count += max(0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return count
