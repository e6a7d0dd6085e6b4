"""Which pages a start touched, and in which order: a trace as runs of pages. Pure; any thread."""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from bootseer.prefetch.record.trace import Trace

PAGE_BYTES = 4096
"""The kernel's unit of caching, and so of what a start can touch."""

TOUCH_COUNT_MAX = 2**20
"""Pages of one trace that count, 4 GiB: what comes after is no start. Also bounds what a trace that
claims absurd lengths can cost."""


class Touched(NamedTuple):
    """`page_count` pages of file number `file` of a trace, from page `first` on, which a start
    touched one after the other: the first of them as its touch number `position`."""

    file: int
    first: int
    page_count: int
    position: int


def first_touches(trace: Trace) -> list[Touched]:
    """Each page of the trace once, as runs in order; at most `TOUCH_COUNT_MAX` pages. Pure.

    Takes time by the accesses, not by the pages that they claim.
    """
    by_file: dict[int, list[tuple[int, int, int]]] = {}
    for number, access in enumerate(trace.accesses):
        end = -(-(access.offset + access.length) // PAGE_BYTES)
        by_file.setdefault(access.file, []).append((access.offset // PAGE_BYTES, end, number))
    runs = [
        (number, file, first, end)
        for file, spans in by_file.items()
        for first, end, number in _earliest(spans)
    ]
    runs.sort()
    found: list[Touched] = []
    position = 0
    for _, file, first, end in runs:
        count = min(end - first, TOUCH_COUNT_MAX - position)
        if count <= 0:
            break
        found.append(Touched(file, first, count, position))
        position += count
    return found


def _earliest(spans: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Which of `spans` (first, end, number) covers each part first, by its number: the same pages
    as disjoint spans."""
    spans.sort()
    # Those that begin at or before `position`, the earliest on top, ended ones among them.
    active: list[tuple[int, int]] = []
    position = following = 0
    while active or following < len(spans):
        if not active:
            position = max(position, spans[following][0])
        while following < len(spans) and spans[following][0] <= position:
            _, end, number = spans[following]
            heappush(active, (number, end))
            following += 1
        number, end = active[0]
        if end <= position:
            heappop(active)
            continue
        stop = end
        if following < len(spans) and spans[following][0] < end:
            stop = spans[following][0]
        yield position, stop, number
        position = stop
