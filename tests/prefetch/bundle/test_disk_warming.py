"""Bytes that a start needs are read from the node's disk ahead of it."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bootseer.prefetch.bundle.format import BundleExtent, BundleFrame
from bootseer.prefetch.bundle.replay import disk_runs
from testbed.page_cache import cached_bytes
from testbed.waiting import wait_for
from tests.support.images.stored_image import stored_image

extents = st.builds(
    BundleExtent,
    st.integers(0, 2),
    st.integers(0, 2000).map(lambda sector: 512 * sector),
    st.integers(1, 200_000),
)


def frame(members: list[BundleExtent]) -> BundleFrame:
    return BundleFrame(0, 0, 1, 1, bytes(32), tuple(members), (0,) * len(members))


@given(st.lists(st.lists(extents, min_size=1, max_size=5), max_size=40))
def test_runs_cover_every_byte_and_little_else(members: list[list[BundleExtent]]) -> None:
    runs = list(disk_runs([frame(part) for part in members]))
    assert all(run.length > 0 for run in runs)
    for extent in (extent for part in members for extent in part):
        assert any(
            run.blob == extent.blob
            and run.offset <= extent.offset
            and extent.offset + extent.length <= run.offset + run.length
            for run in runs
        )
    wanted = sum(extent.length for part in members for extent in part)
    count = sum(map(len, members))
    assert sum(run.length for run in runs) <= wanted + 32 * 1024 * count


def test_a_complete_image_is_read_from_disk_ahead(tmp_path: Path) -> None:
    image = stored_image(tmp_path)
    pieces = [image.place("big", offset, 4096) for offset in range(0, 2_900_000, 20_000)]
    digest, header = image.publish_bundle(pieces)
    streams = image.streams(tmp_path / "cache", deadline_s=60)
    streams.fill()
    streams.close()
    image.reads.clear()
    (data,) = (tmp_path / "cache").glob("streams/*/data")
    with data.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    streams = image.streams(tmp_path / "cache", deadline_s=60)
    try:
        image.replay(streams, digest, header).start()
        wait_for(lambda: cached_bytes(data) >= 4096 * len(pieces))
        assert image.reads == []
    finally:
        streams.close()
