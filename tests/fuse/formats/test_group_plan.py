"""Plan of group reads: every needed byte is read by one rank, in rounds that fit its memory."""

import itertools
import random
from collections import Counter
from functools import partial

import pytest

from bootseer.errors import CorruptError
from bootseer.fuse.striped.group.plan import Assembly, GroupPlan, NeededRange, plan_group

PIECE = 100


def _check(needs: list[set[NeededRange]], pieces_per_round: int) -> list[GroupPlan]:
    """Assert the promises of `plan_group` byte by byte."""
    plans = plan_group(needs, piece_bytes=PIECE, pieces_per_round=pieces_per_round)
    assert plans == plan_group(needs, piece_bytes=PIECE, pieces_per_round=pieces_per_round)
    readers: Counter[tuple[str, int]] = Counter()
    seen: list[set[tuple[str, int]]] = [set() for _ in needs]
    for rank, plan in enumerate(plans):
        assert plan.rounds == plans[0].rounds
        for piece in plan.own(rank):
            path = plan.files[piece.file]
            assert piece.owner == rank
            assert 0 < piece.length <= PIECE
            assert piece.start // PIECE == (piece.start + piece.length - 1) // PIECE
            for at in range(piece.start, piece.start + piece.length):
                readers[path, at] += 1
                for member in plan.audiences[piece.audience]:
                    seen[member].add((path, at))
    for pieces in plans[0].rounds:
        assert 0 < len(pieces) <= pieces_per_round
        assert len({piece.owner for piece in pieces}) == len(pieces)
        assert all(p.owner in plans[0].audiences[p.audience] for p in pieces)
    wanted = [
        {(e.path, at) for e in extents for at in range(e.start, e.start + e.length)}
        for extents in needs
    ]
    assert seen == wanted
    assert set(readers.values()) <= {1}
    return plans


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_once(seed: int) -> None:
    numbers = random.Random(seed)
    extents = []
    for path in ("a", "b", "c"):
        start = 0
        while start < 1500:
            length = numbers.choice([0, 1, 7, 99, 100, 350])
            extents.append(NeededRange(path, start, length))
            start += length + numbers.choice([0, 0, 0, 40])
    needs = [
        {extent for extent in extents if numbers.random() < share}
        for share in numbers.choices([0.0, 0.3, 1.0, 1.0], k=numbers.randrange(1, 6))
    ]
    _check(needs, numbers.choice([1, 2, 8]))


def test_what_all_need_is_dealt_out_evenly_and_in_order() -> None:
    needs = [{NeededRange("f", 0, 5000), NeededRange("f", 5000, 3010)}] * 4
    plan = _check(needs, 8)[0]
    assert plan.private == ()
    assert [len(pieces) for pieces in plan.rounds] == [4] * 20 + [1]
    flat = [piece.start for pieces in plan.rounds for piece in pieces]
    assert flat == sorted(flat)
    loads = Counter(piece.owner for pieces in plan.rounds for piece in pieces)
    assert max(loads.values()) - min(loads.values()) <= 1


def test_groups_without_a_common_rank_go_together() -> None:
    left, right = {NeededRange("a", 0, 1000)}, {NeededRange("b", 0, 1000)}
    plan = _check([left, right, left, right], 8)[0]
    assert [len(pieces) for pieces in plan.rounds] == [4] * 5


def test_what_one_rank_needs_is_its_own_affair() -> None:
    plans = _check([{NeededRange("a", 0, 250)}, {NeededRange("a", 250, 250)}, set()], 8)
    assert plans[0].rounds == ()
    assert [len(plan.private) for plan in plans] == [3, 3, 0]


def _note(found: list[tuple[NeededRange, bytes]], extent: NeededRange, view: memoryview) -> None:
    found.append((extent, bytes(view)))


def test_items_from_pieces_in_any_order() -> None:
    numbers = random.Random(1)
    data = numbers.randbytes(1000)
    extents = [
        NeededRange("f", 0, 90),
        NeededRange("f", 90, 10),
        NeededRange("f", 150, 600),
        NeededRange("f", 750, 1),
    ]
    for _ in range(50):
        found: list[tuple[NeededRange, bytes]] = []
        assembly = Assembly(extents, partial(_note, found))
        cuts = sorted({0, 1000, *numbers.choices(range(1000), k=8)})
        pieces = list(itertools.pairwise(cuts))
        numbers.shuffle(pieces)
        for start, end in pieces:
            assembly.add("f", start, memoryview(data)[start:end])
        assembly.finish()
        assert sorted(found) == [(e, data[e.start : e.start + e.length]) for e in extents]


def test_items_that_overlap_are_refused() -> None:
    assembly = Assembly(
        [NeededRange("f", 0, 10), NeededRange("f", 5, 10)], lambda extent, view: None
    )
    assembly.add("f", 8, memoryview(bytes(8)))
    with pytest.raises(CorruptError):
        assembly.finish()
