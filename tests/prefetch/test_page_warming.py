"""Reading ahead for a start: which pages, and real mounts whose hot files nobody has to ask for."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Inode
from bootseer.config import Settings
from bootseer.fuse.kernel import mounts
from bootseer.prefetch.bundle import BundleExtent
from bootseer.prefetch.mount_state import is_alive
from bootseer.prefetch.page_warming import plan_warming
from bootseer.prefetch.publish import wait_published
from bootseer.prefetch.stream_layout import StreamLayout
from tests.support.image_mounts import (
    checksums_outside,
    drop_cache,
    index,
    mounted,
    settings_at,
    skip_unless_fuse,
    skip_unless_root,
    sweep_everything,
    wait_for,
)

HOT = ("package/a", "package/b", "package/large")
pytest_fuse = pytest.mark.fuse


# ---- which pages ------------------------------------------------------------------------------


def planned(
    *extents: tuple[int, int], fragments: dict[int, list[tuple[int, int]]] | None = None
) -> dict[bytes, list[tuple[int, int]]]:
    """By file; of a stream with 10,000 bytes of "a" at 512, and 8192 of "b" in two pieces."""
    blob = Blob("sha256:" + "1" * 64, 0, (), "sha256:" + "1" * 64, 40_960)
    pieces = (Extent(0, 0, 20_480, 4096), Extent(4096, 0, 30_720, 4096))
    tree = build_tree(
        [(b"a", 1), (b"b", 2)],
        [
            Inode(0o40755),
            Inode(0o100644, size_bytes=10_000, extents=(Extent(0, 0, 512, 10_000),)),
            Inode(0o100644, size_bytes=8192, extents=pieces),
        ],
        [blob],
    )
    wanted = [BundleExtent(0, offset, length) for offset, length in extents]
    found = plan_warming(StreamLayout(tree), tree, wanted, {} if fragments is None else fragments)
    return {tree.path(inode): pages for inode, pages in found.items()}


def test_pages_by_place_and_files_by_use() -> None:
    assert planned((30_720, 4096), (512 + 4096, 4096), (512, 4096), (20_480, 4096)) == {
        b"b": [(0, 8192)],
        b"a": [(0, 8192)],
    }


def test_pages_that_are_not_whole_wait_for_the_rest() -> None:
    fragments: dict[int, list[tuple[int, int]]] = {}
    assert planned((1024, 8192), fragments=fragments) == {b"a": [(4096, 8192)]}
    assert fragments == {1: [(512, 4096), (8192, 8704)]}
    assert planned((20_480, 512), fragments=fragments) == {b"b": []}
    assert planned((512, 512), fragments=fragments) == {b"a": [(0, 4096)]}
    # The last page ends with its file.
    assert planned((9216, 1296), fragments=fragments) == {b"a": [(8192, 10_000)]}
    assert fragments == {2: [(0, 512)]}


def test_what_is_no_content_is_nobodys() -> None:
    assert planned((0, 512), (11_264, 1024)) == {}


# ---- mounts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where an image is indexed whose start was recorded."""
    skip_unless_fuse()
    skip_unless_root()
    base = tmp_path_factory.mktemp("site")
    package = base / "source" / "package"
    package.mkdir(parents=True)
    for name, size in (("a", 5000), ("b", 70_000), ("large", 700_000), ("cold", 100_000)):
        (package / name).write_bytes(os.urandom(size))
    settings = settings_at(base)
    index(settings, base / "source", "image:1")
    with mounted(settings, "image:1", base / "mnt") as image:
        read_hot(image.directory)
    assert wait_published(settings, 30)
    yield base
    sweep_everything(settings)


@pytest.fixture
def settings(site: Path) -> Settings:
    """Of a node that has not seen it."""
    settings = settings_at(site)
    drop_cache(settings)
    return settings


def read_hot(directory: Path) -> None:
    source = directory.parent / "source"
    hot = checksums_outside([directory / name for name in HOT])
    assert hot == checksums_outside([source / name for name in HOT])


@pytest_fuse
def test_what_is_hot_is_there_before_it_is_asked_for(site: Path, settings: Settings) -> None:
    with mounted(settings, "image:1", site / "mnt") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("asked_bytes", 0) >= 775_000)
        before = image.status()
        read_hot(image.directory)
        status = image.status()
        assert status["access_count"] == before["access_count"]
        assert status["prefetch"]["recall"] == 1
        # What the start itself wanted of it cannot be known.
        assert status["prefetch"]["precision"] is None
        image.ready()
        assert image.status()["record"] == "not needed"


@pytest_fuse
def test_a_record_that_was_asked_for_shows_the_start_alone(site: Path, settings: Settings) -> None:
    with mounted(settings, "image:1", site / "mnt", record="always") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        assert image.status()["access_count"] == 0
        read_hot(image.directory)
        assert image.status()["prefetch"]["precision"] > 0.95


@pytest_fuse
def test_reading_ahead_keeps_nobody_from_unmounting(site: Path, settings: Settings) -> None:
    with mounted(settings, "image:1", site / "mnt") as image:
        # Without "lazy": it fails with EBUSY where anybody has a file open there.
        subprocess.run(["umount", image.directory], check=True, timeout=30)
        wait_for(lambda: not is_alive(image.state_dir))


@pytest_fuse
def test_a_server_that_is_killed_while_it_is_read_ahead(site: Path, settings: Settings) -> None:
    with mounted(settings, "image:1", site / "mnt") as image:
        os.kill(image.status()["worker_pid"], signal.SIGKILL)
        read_hot(image.directory)
    assert mounts.find_mount(site / "mnt") is None
