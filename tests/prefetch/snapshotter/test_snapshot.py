"""Content of a snapshot, and the trees it needs. Pure."""

from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError
from bootseer.prefetch.snapshotter.snapshot import (
    REF_LABEL,
    WORKLOAD_LABEL,
    Lower,
    Snapshot,
    SnapshotKind,
    SnapshotMount,
    chain_named,
    chains_in_use,
    lower_of,
    mounts_of,
    wanted_chain,
    workload_of,
)
from testbed.images.building import digest

CHAIN, TOP = digest(b"chain"), digest(b"top")
FS, WORK = Path("/root/9/fs"), Path("/root/9/work")


def snapshot(
    number: int,
    parent: int = 0,
    kind: SnapshotKind = SnapshotKind.COMMITTED,
    chain_id: str = "",
    workload: str = "",
) -> Snapshot:
    labels = {WORKLOAD_LABEL: workload} if workload else {}
    above = str(parent) if parent else ""
    return Snapshot(number, str(number), above, kind, labels, 0, 0, chain_id)


def test_a_chain_stands_for_everything_below_it() -> None:
    ancestors = [snapshot(4, 3), snapshot(3, 2), snapshot(2, 1, chain_id=TOP), snapshot(1)]
    assert lower_of(ancestors) == Lower((4, 3), TOP)
    assert lower_of(ancestors[2:]) == Lower((), TOP)
    assert lower_of(ancestors[3:]) == Lower((1,), "")
    assert lower_of([]) == Lower((), "")


def test_mounts_are_those_of_containerds_overlay_snapshotter() -> None:
    active, view = snapshot(9, kind=SnapshotKind.ACTIVE), snapshot(9, kind=SnapshotKind.VIEW)
    lower = [Path("/b"), Path("/a")]
    over = "lowerdir=/b:/a"
    assert mounts_of(active, [], FS, WORK) == (SnapshotMount("bind", str(FS), ("rw", "rbind")),)
    assert mounts_of(view, [], FS, WORK) == (SnapshotMount("bind", str(FS), ("ro", "rbind")),)
    assert mounts_of(view, lower[:1], FS, WORK) == (SnapshotMount("bind", "/b", ("ro", "rbind")),)
    assert mounts_of(view, lower, FS, WORK) == (
        SnapshotMount("overlay", "overlay", (over, "index=off")),
    )
    (mount,) = mounts_of(active, lower, FS, WORK)
    assert mount.options == (f"workdir={WORK}", f"upperdir={FS}", over, "index=off")


def test_trees_in_use_are_those_below_what_is_mounted() -> None:
    base, top = snapshot(1, chain_id=CHAIN), snapshot(2, 1, chain_id=TOP)
    ordinary, plain = snapshot(3, 1), snapshot(4)
    every = [base, top, ordinary, plain]
    assert chains_in_use(every, "train") == frozenset()
    running = [
        snapshot(10, 2, SnapshotKind.ACTIVE),
        snapshot(11, 2, SnapshotKind.ACTIVE, workload="evaluate"),
        snapshot(12, 3, SnapshotKind.VIEW),
        snapshot(13, 4, SnapshotKind.ACTIVE),
        snapshot(14, 0, SnapshotKind.ACTIVE),
    ]
    assert chains_in_use(every + running, "train") == {
        (TOP, "train"),
        (TOP, "evaluate"),
        (CHAIN, "train"),
    }


@pytest.mark.parametrize(
    "label", ["../../etc", "", "/etc/passwd", "sha256:../x", "a b", "x" * 5000]
)
def test_a_label_that_names_no_chain_is_refused(label: str) -> None:
    with pytest.raises(InvalidInputError):
        wanted_chain({REF_LABEL: label})


def test_a_chain_of_another_kind_of_digest_is_left_to_containerd() -> None:
    assert wanted_chain({REF_LABEL: "sha384:" + "ab" * 48}) is None
    assert wanted_chain({}) is None
    assert wanted_chain({REF_LABEL: CHAIN}) == CHAIN


def test_an_image_s_snapshot_is_named_after_its_chain() -> None:
    chain = f"sha256:{'0' * 64}"
    assert [chain_named(key) for key in (chain, f"k8s.io/17/{chain}")] == [chain, chain]
    keys = ("", "k8s.io/17/train", f"{chain}/x", "default/3/sha256:0", f"{chain}0")
    assert [chain_named(key) for key in keys] == [""] * len(keys)


def test_a_workload_that_could_be_none_is_the_default() -> None:
    assert workload_of({WORKLOAD_LABEL: "evaluate"}, "train") == "evaluate"
    assert workload_of({WORKLOAD_LABEL: "../x"}, "train") == "train"
