"""Choice of the starts to record once there is a bundle, on real mounts."""

import os
from pathlib import Path

import pytest

from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.served.service import new_service_dir, services_dir, take_lock
from bootseer.store import open_store
from testbed.mounts.image_mounts import (
    checksums_in_child,
    index,
    mounted,
    settings_at,
)
from testbed.mounts.sweeping import sweep

pytestmark = pytest.mark.needs("fuse")

FILE_BYTES = 40_960


@pytest.mark.needs("fuse")
def test_a_bundle_that_is_mostly_wasted_shrinks(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(10):
        (source / str(number)).write_bytes(os.urandom(FILE_BYTES))
    settings = settings_at(tmp_path)
    digest = index(settings, source, "image:1").index_digest

    def start(count: int, *, ready: bool) -> tuple[int, int]:
        """Read some files; return the number of traces in the bundle, and its bytes."""
        with mounted(settings, "image:1", tmp_path / "mnt") as image:
            checksums_in_child([image.directory / str(number) for number in range(count)])
            if ready:
                image.ready()
        assert wait_published(settings, 30)
        with open_store(settings.store_url) as store:
            pointer = hot_store.read_pointer(store, digest, "train")
        assert pointer is not None
        return pointer.trace_count, pointer.size_bytes

    try:
        count, size_bytes = start(10, ready=True)
        assert (count, size_bytes > 9 * FILE_BYTES) == (1, True)
        # The start may have failed half-way: no reason to drop the rest from the bundle.
        assert start(2, ready=False) == (1, size_bytes)
        # The kernel's cache is gone with each mount, so every start reads all its files.
        assert start(2, ready=True)[0] == 2
        count, size_bytes = start(2, ready=True)
        assert (count, size_bytes < 3 * FILE_BYTES) == (3, True)
        # The bundle now fits, and no start is recorded any more.
        assert start(2, ready=True) == (3, size_bytes)
    finally:
        sweep(settings.run_dir.parent, settings)


def test_a_publisher_that_ends_meanwhile_does_not_hide_another_one(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    busy = new_service_dir(settings.run_dir, "busy-00000000")
    lock = take_lock(busy)
    # Names of removed folders: a stat of one may end after the listing.
    for number in range(20):
        (services_dir(settings.run_dir) / f"gone-{number:08}").symlink_to(tmp_path / "gone")
    assert not wait_published(settings, 0)
    os.close(lock)
    assert wait_published(settings, 0)
