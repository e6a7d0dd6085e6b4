"""Names and pages of a bundle are in the kernel before they are asked for."""

import pytest

from bootseer.prefetch.publish.publishing import wait_published
from testbed.mounts.image_mounts import checksums_in_child, drop_cache, mounted
from testbed.waiting import wait_for
from tests.prefetch.mounts.conftest import IndexedDirectory, digest_of

pytestmark = pytest.mark.needs("fuse")


@pytest.fixture
def recorded(node: IndexedDirectory) -> IndexedDirectory:
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        checksums_in_child([image.directory / name for name in ("hot-2", "hot-1")])
    assert wait_published(node.settings, 30)
    drop_cache(node.settings)
    return node


def test_one_file_read_brings_the_next_one(recorded: IndexedDirectory) -> None:
    with mounted(recorded.settings, "image:1", recorded.base / "mnt") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        checksums_in_child([image.directory / "hot-2"])
        # Pages given to the kernel are noted as read: a frame's part of the file that comes next.
        wait_for(lambda: image.status()["prefetch"]["precision"] > 0.5)
        before = image.status()["sources"]["cache_bytes"]
        one = image.directory / "hot-1"
        assert checksums_in_child([one]) == [digest_of(recorded.source / "hot-1")]
        assert image.status()["sources"]["cache_bytes"] - before < 300_000
        image.ready()
        assert image.status()["record"] == "not needed"


def test_a_record_that_was_asked_for_says_only_what_was_read(recorded: IndexedDirectory) -> None:
    with mounted(recorded.settings, "image:1", recorded.base / "mnt", record="always") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        checksums_in_child([image.directory / "hot-2"])
        assert image.status()["prefetch"]["precision"] < 0.5
