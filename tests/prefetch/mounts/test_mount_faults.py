"""Mounted images with a failing store, cache or disk: a clear error, and other reads go on."""

import subprocess

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.errors import BusyError, CorruptError, NotFoundError
from bootseer.linux import mount_table
from bootseer.prefetch.images.mount import mount_image, unmount_image
from bootseer.served.service import live_mounts, log_path
from testbed.mounts.image_mounts import checksums_in_child, drop_cache, mounted
from testbed.waiting import wait_for
from tests.prefetch.mounts.conftest import IndexedDirectory, digest_of, read_hot

pytestmark = pytest.mark.needs("fuse")


def test_damaged_frame_is_an_error_to_the_reader(node: IndexedDirectory) -> None:
    path = node.stored(blob_key(node.record.layers[0].blob_digest))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        names = ["big", "hot-1", "hot-2", "cold"]
        found = checksums_in_child([image.directory / name for name in names])
        right = [digest_of(node.source / name) for name in names]
        wrong = [f for f, r in zip(found, right, strict=True) if f != r]
        assert wrong == ["EIO"]


def test_store_goes_away_under_a_reader(node: IndexedDirectory) -> None:
    # By the simulated network, since an open blob of a folder stays readable after a rename.
    url = f"limit+{node.settings.store_url}"
    settings = replace(node.settings, deadline_s=5.0, store_url=url)
    with mounted(settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
        (node.base / "store").rename(node.base / "elsewhere")
        try:
            assert checksums_in_child([image.directory / "cold"])[0].startswith("E")
            # Local content stays readable.
            read_hot(node, image.directory)
        finally:
            (node.base / "elsewhere").rename(node.base / "store")
        # For a moment no read waits for a piece again that another one has waited for in vain.
        right = [digest_of(node.source / "cold")]
        wait_for(lambda: checksums_in_child([image.directory / "cold"]) == right)


@pytest.mark.needs("root")
def test_full_disk_still_serves(node: IndexedDirectory) -> None:
    small = node.base / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], check=True)
    try:
        settings = replace(node.settings, cache_dir=small)
        with mounted(settings, "image:1", node.base / "mnt", record="never") as image:
            names = ["big", "hot-1", "hot-2", "cold"]
            found = checksums_in_child([image.directory / name for name in names])
            assert found == [digest_of(node.source / name) for name in names]
            assert image.status()["cache_is_full"]
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_what_cannot_be_mounted_says_so(node: IndexedDirectory) -> None:
    directory = node.base / "mnt"
    with pytest.raises(NotFoundError, match="create it"):
        mount_image(node.settings, "image:1", directory)
    directory.mkdir()
    with pytest.raises(NotFoundError, match="no image"):
        mount_image(node.settings, "image:9", directory)
    with pytest.raises(NotFoundError, match="nothing of Bootseer is mounted"):
        unmount_image(node.settings, directory)
    with (
        mounted(node.settings, "image:1", directory),
        pytest.raises(BusyError, match="mounted there"),
    ):
        mount_image(node.settings, "image:1", directory)
    index_path = node.stored("indexes/" + node.record.index_digest.replace(":", "/"))
    index_path.write_bytes(b"damaged")
    drop_cache(node.settings)
    with pytest.raises(CorruptError, match="digest"):
        mount_image(node.settings, "image:1", directory)
    assert list(live_mounts(node.settings.run_dir)) == []
    assert mount_table.find_mount(directory) is None


def test_a_cache_that_cannot_be_used_says_so(node: IndexedDirectory) -> None:
    node.settings.cache_dir.mkdir(parents=True, exist_ok=True)
    (node.settings.cache_dir / "streams").write_text("in the way")
    (node.base / "mnt").mkdir()
    with pytest.raises(NotFoundError, match="cache"):
        mount_image(node.settings, "image:1", node.base / "mnt")
    assert mount_table.find_mount(node.base / "mnt") is None


def test_a_lost_blob_is_an_io_error_with_a_line_in_the_log(node: IndexedDirectory) -> None:
    (blob,) = node.record.layers
    node.stored("blobs/" + blob.blob_digest.replace(":", "/")).unlink()
    settings = replace(node.settings, deadline_s=20.0)
    with mounted(settings, "image:1", node.base / "mnt", prefetch=False) as image:
        assert checksums_in_child([image.directory / "big"]) == ["EIO"]
        log = log_path(settings.run_dir, image.state.id).read_text()
    assert "cannot read bytes" in log
    assert "/big" in log
