"""Snapshots that are mounted: what a job sees, who keeps them, and what kills leave."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bootseer.config import Settings
from bootseer.errors import BootseerError
from bootseer.fuse.kernel import mounts
from bootseer.prefetch.covers import cover_at, covers, uncover
from bootseer.prefetch.mount_state import live_mounts
from bootseer.prefetch.publish import wait_published
from bootseer.snapshots.mounted import unmount_snapshot
from bootseer.snapshots.request import Request
from bootseer.snapshots.run import run_setup
from tests.snapshots.conftest import MakeNode
from tests.support.image_mounts import skip_unless_fuse, skip_unless_root
from tests.support.trees import describe, differences, make_zoo

_WAIT_S = 20.0


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Whatever happens, no mount, no server and no publisher stays."""
    skip_unless_root()
    skip_unless_fuse()
    yield
    for cover in reversed(covers()):
        if cover.path.is_relative_to(tmp_path):
            with contextlib.suppress(BootseerError):
                uncover(cover)
    for mount in mounts.find_mounts("bootseer-image"):
        if mount.path.is_relative_to(tmp_path):
            mounts.abort_connection(mount.device_minor, mount.path)
            with contextlib.suppress(BootseerError):
                mounts.detach(mount.path, lazy=True)


def _mounting(settings: Settings) -> Settings:
    return replace(settings, restore_mode="mount")


def _wait_gone(settings: Settings) -> None:
    """Until no server of the node is alive, and nothing is published any more."""
    end = time.monotonic() + _WAIT_S
    while list(live_mounts(settings)):
        assert time.monotonic() < end, "a server does not end"
        time.sleep(0.05)
    assert wait_published(settings, _WAIT_S)
    assert list((settings.cache_dir / "containers").iterdir()) == []


def _zoo_request(tmp_path: Path) -> tuple[Request, Path]:
    """A set-up that makes a directory with everything nasty in it."""
    target = tmp_path / "work/env"
    make_zoo(tmp_path / "zoo")
    target.parent.mkdir()
    copy = ["cp", "-a", str(tmp_path / "zoo"), str(target)]
    return Request(command=copy, targets=[str(target)]), target


def test_a_mounted_tree_is_the_original(tmp_path: Path, make_node: MakeNode) -> None:
    request, target = _zoo_request(tmp_path)
    run_setup(make_node("a"), request)
    original = describe(target)
    shutil.rmtree(target)
    node = _mounting(make_node("b"))
    said: list[str] = []
    result = run_setup(node, request, report=said.append)
    assert (result.how, result.mode, result.mode_reason) == (
        "restored",
        "mount",
        "it was asked for",
    )
    assert "mounted: it was asked for" in said[-1]
    assert cover_at(target) is not None
    assert differences(original, describe(target)) == []
    again = run_setup(node, request)
    assert (again.how, again.mode) == ("in place", "mount")
    unmount_snapshot(node, target)
    assert cover_at(target) is None
    assert list(target.iterdir()) == []
    _wait_gone(node)
