"""Two trees over a job: every node is fed, none feeds more than two, racks stay together."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.fanout.trees import STORE, TREE_COUNT, Place, Trees, chunks_of

racks = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def places_of(sizes: list[int], switches: int = 1) -> list[Place]:
    return [
        (f"spine{rack // switches}", f"leaf{rack}")
        for rack, n in enumerate(sizes)
        for _ in range(n)
    ]


@given(sizes=racks, switches=st.integers(1, 5))
def test_every_node_is_below_the_store_at_little_depth(sizes: list[int], switches: int) -> None:
    count = sum(sizes)
    for trees in (Trees(count), Trees(count, places_of(sizes, switches))):
        for tree in range(TREE_COUNT):
            depths = [len(trees.ancestors(tree, node)) for node in range(count)]
            assert depths.count(0) == 1
            assert max(depths) <= 2 * math.log2(count) + 2


@given(count=st.integers(1, 300))
def test_trees_without_racks_are_as_flat_as_can_be(count: int) -> None:
    trees = Trees(count)
    for tree in range(TREE_COUNT):
        deepest = max(len(trees.ancestors(tree, node)) for node in range(count))
        assert deepest <= math.log2(count) + 1


@given(sizes=racks, switches=st.integers(1, 5))
def test_a_node_feeds_at_most_two_nodes_in_both_trees(sizes: list[int], switches: int) -> None:
    trees = Trees(sum(sizes), places_of(sizes, switches))
    for node in range(sum(sizes)):
        fed = [trees.children(tree, node) for tree in range(TREE_COUNT)]
        assert sum(map(len, fed)) <= 2
        assert not all(fed)
        for tree in range(TREE_COUNT):
            assert all(trees.parent(tree, child) == node for child in fed[tree])


@given(sizes=racks)
def test_a_racks_uplink_carries_an_object_at_most_twice_each_way(sizes: list[int]) -> None:
    places = places_of(sizes)
    trees = Trees(len(places), places)
    halves_in = dict.fromkeys(places, 0)
    halves_out = dict.fromkeys(places, 0)
    for tree in range(TREE_COUNT):
        for node, place in enumerate(places):
            parent = trees.parent(tree, node)
            if parent == STORE or places[parent] != place:
                halves_in[place] += 1
                if parent != STORE:
                    halves_out[places[parent]] += 1
    assert max(halves_in.values()) <= 4
    assert max(halves_out.values()) <= 4


def test_few_edges_of_a_tree_leave_a_spine_of_many_racks() -> None:
    places = places_of([7] * 64, switches=16)
    trees = Trees(len(places), places)
    for tree in range(TREE_COUNT):
        crossing = sum(
            parent == STORE or places[parent][0] != place[0]
            for node, place in enumerate(places)
            for parent in [trees.parent(tree, node)]
        )
        assert crossing <= 8


@given(chunks=st.integers(1, 1000))
def test_chunks_are_dealt_evenly(chunks: int) -> None:
    counts = [chunks_of(tree, chunks) for tree in range(TREE_COUNT)]
    assert sum(counts) == chunks
    assert all(before - after in (0, 1) for before, after in pairwise(counts))


@pytest.mark.parametrize("nodes", [2, 3, 7, 8, 33, 100])
def test_the_children_of_a_lost_node_take_the_two_places_that_it_leaves_free(nodes: int) -> None:
    trees = Trees(nodes)
    for tree in range(TREE_COUNT):
        for lost in range(nodes):
            children = trees.children(tree, lost)
            free = {trees.parent(tree, lost), trees.parent(1 - tree, lost)}
            stand_ins = [trees.stand_in(tree, child) for child in children]
            assert len(set(stand_ins)) == len(stand_ins)
            assert set(stand_ins) <= free
            for child, stand_in in zip(children, stand_ins, strict=True):
                below = [] if stand_in == STORE else [stand_in, *trees.ancestors(tree, stand_in)]
                assert child not in below


def test_the_top_of_a_tree_begins_with_its_root() -> None:
    trees = Trees(100)
    top = trees.top(0, 7)
    assert top[0] == trees.root(0)
    assert [len(trees.ancestors(0, node)) for node in top] == [0, 1, 1, 2, 2, 2, 2]
