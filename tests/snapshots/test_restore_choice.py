"""Choice of the way of restoring, with its reasons."""

import pytest
from msgspec.structs import replace

from bootseer.settings.config import RESTORE_MODES
from bootseer.snapshots.mounted import LINK, MOUNT
from bootseer.snapshots.restore import (
    EXTRACT,
    OVERLAY,
    REFLINK,
    SMALL_BYTES,
    TARGETS_MAX,
    Facts,
    choose,
)

SMALL = {"file_count": 1, "content_bytes": 1}
ROOT = Facts(
    may_mount=True,
    has_fuse=True,
    is_container=False,
    is_throwaway=False,
    all_whole=True,
    has_mounts_inside=False,
    is_entered=False,
    has_trees=False,
    can_reflink=False,
    target_count=1,
    file_count=40_000,
    content_bytes=2 * 10**9,
)
"""Large environment, on a node where everything but reflinks is possible."""


@pytest.mark.parametrize(
    ("changes", "mode", "reason"),
    [
        ({}, MOUNT, "root and FUSE are available"),
        ({"may_mount": False}, EXTRACT, "needs root"),
        ({"has_fuse": False}, EXTRACT, "no /dev/fuse"),
        ({"has_mounts_inside": True}, EXTRACT, "mounted inside"),
        ({"is_entered": True}, EXTRACT, "working directory"),
        ({"all_whole": False}, EXTRACT, "other things"),
        ({"all_whole": False, "is_throwaway": True}, MOUNT, "root and FUSE"),
        ({"target_count": TARGETS_MAX + 1}, EXTRACT, "too many mounts"),
        ({"file_count": 10, "content_bytes": 10}, EXTRACT, "small"),
        ({"file_count": 10, "content_bytes": SMALL_BYTES}, MOUNT, "root and FUSE"),
        ({"can_reflink": True}, MOUNT, "root and FUSE"),
        ({"can_reflink": True, "has_trees": True}, LINK, "share their blocks"),
        ({"has_trees": True}, MOUNT, "root and FUSE"),
        ({"has_trees": True, "has_fuse": False}, LINK, "an overlay over this node's cache"),
        ({"has_trees": True, "has_fuse": False, "all_whole": False}, EXTRACT, "no /dev/fuse"),
        ({"is_container": True}, LINK, "an overlay over this node's cache"),
        ({"is_container": True, "may_mount": False}, EXTRACT, "needs root"),
        ({"is_container": True, **SMALL}, EXTRACT, "it is small"),
        ({"is_container": True, **SMALL, "lingers": True}, LINK, "an overlay over"),
        ({"lingers": True, **SMALL}, EXTRACT, "it is small"),
    ],
)
def test_the_best_way_that_a_node_allows_is_taken(
    changes: dict[str, object], mode: str, reason: str
) -> None:
    choice = choose("auto", replace(ROOT, **changes))
    assert (choice.mode, choice.is_refusal) == (mode, False)
    assert reason in choice.reason
    assert choice.sentence().endswith(choice.reason)


@pytest.mark.parametrize(
    ("wanted", "changes", "mode"),
    [
        ("mount", {}, MOUNT),
        ("mount", {"all_whole": False, "file_count": 1, "content_bytes": 1}, MOUNT),
        ("mount", {"may_mount": False}, EXTRACT),
        ("mount", {"is_container": True}, EXTRACT),
        ("link", {}, LINK),
        ("link", {"may_mount": False}, EXTRACT),
        ("link", {"has_mounts_inside": True}, EXTRACT),
        ("mount", {"is_entered": True}, EXTRACT),
        ("link", {"is_entered": True}, EXTRACT),
        ("link", {"is_entered": True, "can_reflink": True}, LINK),
        ("link", {"can_reflink": True}, LINK),
        ("link", {"is_container": True}, LINK),
        ("extract", {}, EXTRACT),
    ],
)
def test_a_way_that_was_asked_for(wanted: str, changes: dict[str, object], mode: str) -> None:
    choice = choose(wanted, replace(ROOT, **changes))
    assert choice.mode == mode
    assert choice.is_refusal is (mode != wanted)
    assert choice.reason


def test_a_link_is_a_reflink_where_it_can_be() -> None:
    assert choose("link", ROOT).method == OVERLAY
    assert choose("link", replace(ROOT, can_reflink=True)).method == REFLINK
    assert choose("link", replace(ROOT, can_reflink=True, is_container=True)).method == OVERLAY


def test_every_choice_can_be_carried_out_by_extracting() -> None:
    for wanted in RESTORE_MODES:
        nothing = replace(ROOT, may_mount=False, has_fuse=False)
        assert choose(wanted, nothing).mode == EXTRACT
