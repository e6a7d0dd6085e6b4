"""Starts of images with a cache on a full or read-only disk."""

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.prefetch.publish.publishing import wait_published
from bootseer.settings.config import Settings
from testbed.images.building import Member, write_layout
from testbed.mounts.image_mounts import bootseer, checksums_in_child, mounted
from testbed.mounts.sweeping import sweep
from testbed.needs import require
from tests.prefetch.mounts.conftest import IndexedDirectory, digest_of

pytestmark = pytest.mark.needs("fuse")
NAMES = ["big", "hot-1", "hot-2", "cold"]


@pytest.fixture(params=["full", "no inodes", "read-only"])
def settings(node: IndexedDirectory, request: pytest.FixtureRequest) -> Iterator[Settings]:
    """Settings of a node whose cache is on a disk that cannot be written to."""
    require("root")
    disk = node.base / "disk"
    disk.mkdir()
    inodes = ",nr_inodes=3" if request.param == "no inodes" else ""
    options = f"size=1m{inodes},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)
    try:
        (disk / "cache").mkdir(mode=0o700)
        if request.param == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        elif request.param == "no inodes":
            (disk / "last").touch()
        else:
            fill(disk)
        # The run folder is in memory, as `/run` is.
        yield replace(node.settings, cache_dir=disk / "cache")
        sweep(node.settings.run_dir.parent, node.settings)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> None:
    """Fill a disk to the last page."""
    with (disk / "full").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def test_an_image_is_mounted_without_a_cache(node: IndexedDirectory, settings: Settings) -> None:
    with mounted(settings, "image:1", node.base / "mnt") as image:
        found = checksums_in_child([image.directory / name for name in NAMES])
        assert found == [digest_of(node.source / name) for name in NAMES]
        assert image.status()["cache_is_full"]
    assert wait_published(settings, 60)


def test_a_container_runs_without_a_cache(node: IndexedDirectory, settings: Settings) -> None:
    done = bootseer(settings, "run", "--image", "image:1", "--", "/nothing")
    # The image has no program, so the start ends where it would run one.
    assert done.returncode == 127, done.stderr
    assert "Traceback" not in done.stderr


def test_an_indexed_image_is_not_pulled_for_want_of_a_cache(
    node: IndexedDirectory, settings: Settings
) -> None:
    content = b"of the layer" * 100_000
    layout = write_layout(node.base / "layout", [[Member("file", data=content)]])
    source = f"oci:{layout.directory}"
    done = bootseer(node.settings, "image", "index", source)
    assert done.returncode == 0, done.stderr
    with mounted(settings, source, node.base / "mnt") as image:
        assert image.record.layers
        (found,) = checksums_in_child([image.directory / "file"])
        assert found == hashlib.sha256(content).hexdigest()
