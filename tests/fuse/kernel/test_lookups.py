"""Lookup counts against a simple model."""

from hypothesis import given
from hypothesis import strategies as st

from bootseer.fuse.kernel.dispatch import LookupCounts


def _look_up(counts: LookupCounts, *nodes: int) -> None:
    counts.begin()
    counts.end(nodes)


def test_dropped_comes_with_the_last_reference() -> None:
    dropped: list[int] = []
    counts = LookupCounts(dropped.append)
    _look_up(counts, 2, 3, 2)
    counts.forget(2, 1)
    assert dropped == []
    counts.forget(2, 1)
    assert dropped == [2]
    counts.forget(3, 1)
    assert dropped == [2, 3]


def test_a_lookup_under_way_keeps_what_it_may_name() -> None:
    dropped: list[int] = []
    counts = LookupCounts(dropped.append)
    _look_up(counts, 2, 3)
    counts.begin()
    counts.forget(2, 1)
    counts.forget(3, 1)
    assert dropped == []
    counts.end([2])
    assert dropped == [3]
    counts.forget(2, 1)
    assert dropped == [3, 2]


def test_a_reference_that_the_kernel_did_not_take_leaves_those_of_a_predecessor() -> None:
    """Regression: a file that was opened anew after a restart was not found (ESTALE)."""
    dropped: list[int] = []
    counts = LookupCounts(dropped.append, [99])
    _look_up(counts, 99)
    counts.forget(99, 1)
    _look_up(counts, 99, 99)
    counts.forget(99, 1)
    assert dropped == []
    # With the inode, the kernel drops all references, also those of the predecessor.
    counts.forget(99, 3)
    assert dropped == [99]
    _look_up(counts, 99)
    counts.forget(99, 1)
    assert dropped == [99, 99]


@given(st.lists(st.tuples(st.booleans(), st.integers(2, 5)), max_size=60))
def test_counts_match_a_model(steps: list[tuple[bool, int]]) -> None:
    dropped: list[int] = []
    expected_drops: list[int] = []
    counts = LookupCounts(dropped.append)
    model: dict[int, int] = {}
    for is_lookup, node in steps:
        if is_lookup:
            _look_up(counts, node)
            model[node] = model.get(node, 0) + 1
        elif model.get(node):
            counts.forget(node, 1)
            model[node] -= 1
            if not model[node]:
                expected_drops.append(node)
    assert dropped == expected_drops
    for node, count in model.items():
        if count:
            counts.forget(node, count)
            expected_drops.append(node)
    assert dropped == expected_drops
