"""The planner's promises, for any input."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from bootseer.transfer.ranges import Chunk, Fetch, Priority, plan, remaining

chunks = st.builds(
    Chunk,
    key=st.sampled_from(["a", "b"]),
    offset=st.integers(0, 300),
    length=st.integers(0, 60),
)


def never_cached(_: Chunk) -> bool:
    return False


@example(
    wanted=[Chunk("a", 0, 0), Chunk("a", 1, 0), Chunk("a", 15, 0)],
    cached=set(),
    max_gap_bytes=14,
    max_fetch_bytes=15,
)
@given(
    wanted=st.lists(chunks, max_size=40),
    cached=st.sets(chunks, max_size=20),
    max_gap_bytes=st.integers(0, 40),
    max_fetch_bytes=st.integers(1, 150),
)
def test_plan_keeps_its_promises(
    wanted: list[Chunk], cached: set[Chunk], max_gap_bytes: int, max_fetch_bytes: int
) -> None:
    fetches = plan(
        wanted,
        cached.__contains__,
        priority=Priority.FILL,
        max_gap_bytes=max_gap_bytes,
        max_fetch_bytes=max_fetch_bytes,
    )
    # Exactly the chunks that are wanted and not cached, each once.
    planned = [chunk for fetch in fetches for chunk in fetch.chunks]
    assert sorted(planned, key=repr) == sorted(set(wanted) - cached, key=repr)
    for fetch in fetches:
        assert fetch.priority is Priority.FILL
        assert {chunk.key for chunk in fetch.chunks} == {fetch.key}
        offsets = [chunk.offset for chunk in fetch.chunks]
        assert offsets == sorted(offsets)
        assert fetch.offset == offsets[0]
        assert fetch.offset + fetch.length == max(chunk.end for chunk in fetch.chunks)
        assert fetch.length <= max_fetch_bytes or len(fetch.chunks) == 1
        # Unwanted bytes in one row are at most the tolerated gap.
        wanted_bytes = {b for chunk in fetch.chunks for b in range(chunk.offset, chunk.end)}
        # An empty chunk is a neighbour, too, from which a gap is counted.
        empty = {chunk.offset for chunk in fetch.chunks if not chunk.length}
        unwanted = "".join(
            ("|" if b in empty else "") + ("." if b in wanted_bytes else "x")
            for b in range(fetch.offset, fetch.offset + fetch.length)
        )
        assert "x" * (max_gap_bytes + 1) not in unwanted
    # A fetch stands where its first-wanted chunk stood.
    order = list(dict.fromkeys(wanted))
    ranks = [min(order.index(chunk) for chunk in fetch.chunks) for fetch in fetches]
    assert ranks == sorted(ranks)
    # No two fetches could have been one.
    for key in ("a", "b"):
        in_offset_order = sorted(
            (fetch for fetch in fetches if fetch.key == key),
            key=lambda fetch: (fetch.offset, fetch.chunks[0].length),
        )
        for before, after in itertools.pairwise(in_offset_order):
            end = before.offset + before.length
            joined_end = max(end, after.chunks[0].end)
            assert (
                after.offset - end > max_gap_bytes or joined_end - before.offset > max_fetch_bytes
            )


@given(wanted=st.lists(chunks, min_size=1, max_size=20), kept=st.sets(st.integers(0, 19)))
def test_remaining_cuts_out_what_is_not_wanted(wanted: list[Chunk], kept: set[int]) -> None:
    for fetch in plan(wanted, never_cached, max_gap_bytes=1000, max_fetch_bytes=1000):
        keep = {chunk for number, chunk in enumerate(fetch.chunks) if number in kept}
        parts = remaining(fetch, keep.__contains__)
        assert [chunk for part in parts for chunk in part.chunks] == [
            chunk for chunk in fetch.chunks if chunk in keep
        ]
        for part in parts:
            first = fetch.chunks.index(part.chunks[0])
            assert part.chunks == fetch.chunks[first : first + len(part.chunks)]
            assert part.offset == part.chunks[0].offset
            assert part.offset + part.length == max(chunk.end for chunk in part.chunks)


def test_remaining_of_all_is_the_same_fetch() -> None:
    (fetch,) = plan([Chunk("a", 0, 10), Chunk("a", 20, 10)], never_cached)
    assert remaining(fetch, lambda _: True) == [fetch]
    assert remaining(fetch, lambda _: False) == []


def test_order_between_fetches_follows_the_first_wanted_chunk() -> None:
    late, early, near_early = Chunk("a", 0, 10), Chunk("a", 5000, 10), Chunk("a", 5010, 10)
    fetches = plan([early, late, near_early], never_cached, max_gap_bytes=100)
    assert fetches == [
        Fetch("a", 5000, 20, (early, near_early), Priority.PREFETCH),
        Fetch("a", 0, 10, (late,), Priority.PREFETCH),
    ]
