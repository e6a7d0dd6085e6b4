"""Mounted images: their files, sharing between mounts, and unmounting."""

import contextlib
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.fuse.kernel import control
from bootseer.linux import mount_table
from bootseer.served.service import live_mounts
from testbed.images.rootfs import odd_tree
from testbed.mounts.image_mounts import (
    checksums_in_child,
    drop_cache,
    index,
    mounted,
    run_program,
    settings_at,
    start_program,
    tree_in_child,
)
from testbed.needs import MissingError
from testbed.waiting import wait_for
from tests.prefetch.mounts.conftest import BIG_BYTES, IndexedDirectory, digest_of, read_hot

pytestmark = pytest.mark.needs("fuse")


@pytest.mark.needs("root", "fuse")
def test_the_mounted_tree_equals_the_source(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    source = odd_tree(tmp_path / "source")
    index(settings, source, "odd:1")
    with mounted(settings, "odd:1", tmp_path / "mnt"):
        found, expected = tree_in_child(tmp_path / "mnt"), tree_in_child(source)
        assert found.keys() == expected.keys()
        for path, attributes in expected.items():
            assert found[path] == attributes, path


@pytest.mark.needs("root", "fuse")
def test_a_mount_on_the_host_gives_no_rights(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    index(settings, odd_tree(tmp_path / "source"), "odd:1")
    code = """
import errno, os, sys
try:
    os.open(sys.argv[1] + "/null", os.O_RDONLY)
except OSError as error:
    print(errno.errorcode[error.errno])
print(bool(os.statvfs(sys.argv[1]).f_flag & os.ST_NOSUID))
"""
    with mounted(settings, "odd:1", tmp_path / "mnt"):
        assert run_program(code, tmp_path / "mnt") == "EACCES\nTrue\n"


def test_seek_finds_the_holes_of_a_sparse_file(node: IndexedDirectory) -> None:
    with (node.source / "sparse").open("wb") as file:
        file.seek(2**20)
        file.write(b"data")
        file.truncate(2**22)
    index(node.settings, node.source, "image:2")
    code = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
data = os.lseek(fd, 0, os.SEEK_DATA)
print(os.lseek(fd, 0, os.SEEK_HOLE), data <= 2**20, os.lseek(fd, data, os.SEEK_HOLE) < 2**22)
"""
    with mounted(node.settings, "image:2", node.base / "mnt"):
        assert run_program(code, node.base / "mnt/sparse") == "0 True True\n"


def test_writing_is_refused(node: IndexedDirectory) -> None:
    code = """
import errno, os, sys
for call in (lambda: open(sys.argv[1] + "/new", "w"), lambda: os.unlink(sys.argv[1] + "/big")):
    try:
        call()
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    with mounted(node.settings, "image:1", node.base / "mnt"):
        assert run_program(code, node.base / "mnt") == "EROFS\nEROFS\n"


def test_the_cache_is_kept_below_its_limit_but_for_what_is_mounted(node: IndexedDirectory) -> None:
    (node.source / "more").write_bytes(os.urandom(2_000_000))
    index(node.settings, node.source, "image:2")
    drop_cache(node.settings)
    small = replace(node.settings, cache_limit_bytes=1_000_000)
    streams = node.settings.cache_dir / "streams"
    for name, reference in (("one", "image:1"), ("two", "image:2")):
        with mounted(small, reference, node.base / name, record="never") as image:
            checksums_in_child([image.directory / "big"])
            # Files of earlier starts are removed; the mounted image stays, beyond the limit.
            wait_for(lambda: len(list(streams.glob("*-*"))) == 1)
            (used,) = streams.glob("*-*")
            assert image.status()["cached_bytes"] >= BIG_BYTES
            found = checksums_in_child([image.directory / "big", image.directory / "hot-1"])
            assert found == [digest_of(node.source / n) for n in ("big", "hot-1")]
            assert used.exists()


def test_two_mounts_share_the_cache(node: IndexedDirectory) -> None:
    with (
        mounted(node.settings, "image:1", node.base / "one") as one,
        mounted(node.settings, "image:1", node.base / "two") as two,
    ):
        read_hot(node, one.directory)
        read_hot(node, two.directory)
        assert two.status()["moved"]["fetched_bytes"] == 0
        assert len(list(live_mounts(node.settings.run_dir))) == 2


def test_a_mount_that_got_the_number_of_one_that_is_gone_is_left_alone(
    node: IndexedDirectory,
) -> None:
    """Regression: the kernel reuses the number at once, and unmounting one image aborted
    another."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(mounted(node.settings, "image:1", node.base / "first"))
        found = mount_table.find_mount(first.directory)
        assert found is not None
        connection = stack.enter_context(control.connection(found.device_minor))
        if connection is None:
            raise MissingError("the control files of FUSE are out of reach")
        assert not connection.wait_gone(0)
        first.close()
        for number in range(5):
            other = stack.enter_context(
                mounted(node.settings, "image:1", node.base / f"other-{number}")
            )
            again = mount_table.find_mount(other.directory)
            assert again is not None
            if again.device_minor == found.device_minor:
                break
        else:
            raise MissingError("other mounts on this machine took the number")
        assert connection.wait_gone(0)
        connection.abort()
        read_hot(node, other.directory)


_COPYING = """
import signal
from bootseer.linux import namespaces
namespaces.unshare(namespaces.CLONE_NEWNS)
namespaces.make_private()
namespaces.mount("tmpfs", "/proc", "tmpfs")
print("copied", flush=True)
signal.pause()
"""


@pytest.mark.needs("root", "fuse")
def test_an_unmount_waits_for_no_copy_in_another_namespace(
    node: IndexedDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
        with start_program(_COPYING) as one, start_program(_COPYING) as other:
            try:
                for process in (one, other):
                    assert process.stdout is not None
                    assert process.stdout.readline() == "copied\n"
                copies = [Path(f"/proc/{process.pid}/mountinfo") for process in (one, other)]
                assert all(str(image.directory) in path.read_text() for path in copies)
                image.close()
                assert not any(str(image.directory) in path.read_text() for path in copies)
            finally:
                one.kill()
                other.kill()
    assert "still has open files" not in caplog.text


def test_taking_a_mount_off_that_is_off_already_is_no_error(node: IndexedDirectory) -> None:
    directory = node.base / "mnt"
    with mounted(node.settings, "image:1", directory) as image:
        kept_open = (directory / "hot-1").open("rb")
        try:
            image.detach()
            image.detach()
            assert not directory.is_mount()
        finally:
            kept_open.close()
