"""Warming of other than local trees: a slow file system, an overlay, other users' files."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import UnsupportedError
from bootseer.fuse.kernel.server import FuseServer
from bootseer.prefetch.warm import recording as recording_module
from bootseer.prefetch.warm.record import FileRange, decode, encode
from bootseer.prefetch.warm.recording import InotifyWatch, WarmRecording, directories
from bootseer.prefetch.warm.residency import has_fowner
from testbed.mounts.fuse_mount import check_python, mounted, short_options
from testbed.mounts.slow_fs import SlowFileSystem
from testbed.needs import MissingError
from testbed.page_cache import cached_bytes
from testbed.users import NOBODY, become, folder_for_all_users
from tests.prefetch.warm.conftest import IMPORT, WarmingNode, evict, make_package

_NOBODY = 65534
# Requests for the package's data file: each of 128 pages lies by itself.
_FAULT_COUNT = 128


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    make_package(directory)
    return directory


def _serve(
    operations: SlowFileSystem, mountpoint: Path, readahead_bytes: int
) -> Iterator[FuseServer]:
    options = short_options(max_readahead_bytes=readahead_bytes, allow_other=os.geteuid() == 0)
    with mounted(operations, mountpoint, options) as server:
        yield server


@pytest.mark.parametrize("readahead_bytes", [0, 128 * 1024])
@pytest.mark.needs("fuse")
def test_a_slow_file_system_is_asked_for_much_at_once_instead_of_page_by_page(
    source: Path, tmp_path: Path, node: WarmingNode, other_node: WarmingNode, readahead_bytes: int
) -> None:
    mountpoint = tmp_path / "mount"
    cold = SlowFileSystem(source)
    for _ in _serve(cold, mountpoint, readahead_bytes):
        assert node.warm_import(mountpoint).stdout == "194"
        assert node.last()["action"] == "recorded"
        shown = node.shown(mountpoint)
    without = cold.counters()
    assert without.small_read_count >= _FAULT_COUNT

    warmed = SlowFileSystem(source)
    for _ in _serve(warmed, mountpoint, readahead_bytes):
        figures = json.loads(other_node.run("warm", mountpoint, "--json").stdout)
        ahead = warmed.counters()
        assert figures["is_complete"]
        assert figures["read_bytes"] == figures["planned_bytes"]
        warmed.reset()
        code = f"import sys; sys.path.insert(0, {str(mountpoint)!r}); {IMPORT}"
        assert check_python(code) == "194"
        later = warmed.counters()
    # Everything that the start reads is cached: not one more read.
    assert (later.read_count, later.read_bytes) == (0, 0)
    # The moved bytes are the recorded ones and the gaps between, except for the ends of pages.
    assert shown["range_bytes"] <= ahead.read_bytes <= figures["planned_bytes"] + 64 * 4096
    assert ahead.small_read_count <= 1
    assert ahead.read_count < without.read_count / 5


@pytest.mark.needs("fuse")
def test_a_command_gets_its_bytes_while_they_are_read_ahead(
    source: Path, tmp_path: Path, node: WarmingNode
) -> None:
    mountpoint = tmp_path / "mount"
    for number in range(2):
        slow = SlowFileSystem(source, latency_s=0.001)
        for _ in _serve(slow, mountpoint, 128 * 1024):
            done = node.warm_import(mountpoint)
            assert (done.returncode, done.stdout, done.stderr) == (0, "194", "")
            assert node.last()["action"] == ("recorded", "read")[number]
            if number:
                # No page came twice.
                data_bytes = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
                assert slow.counters().read_bytes <= data_bytes


@pytest.mark.needs("mount", "fuse")
def test_an_overlay_is_warmed_through_its_lower_files(
    source: Path, tmp_path: Path, node: WarmingNode, other_node: WarmingNode
) -> None:
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    (tmp_path / "upper" / "package").mkdir()
    (tmp_path / "upper" / "package" / "m3.py").write_text("VALUE = 103\n")
    merged = tmp_path / "merged"
    mount = (
        f"mount -t overlay overlay -o lowerdir={source},upperdir={tmp_path}/upper,"
        f'workdir={tmp_path}/work {merged} && exec "$@"'
    )
    # A mount namespace each, as two nodes have: nothing stays mounted.
    prefix = ("unshare", "--mount", "sh", "-c", mount, "sh")
    evict(source)
    evict(tmp_path / "upper")
    script = f"import sys; sys.path.insert(0, {str(merged)!r}); {IMPORT}"
    first = node.run("warm", merged, "--", sys.executable, "-S", "-c", script, prefix=prefix)
    assert (first.returncode, first.stdout, first.stderr) == (0, "294", "")
    assert node.last()["file_count"] == 14
    evict(source)
    evict(tmp_path / "upper")
    done = other_node.run("warm", merged, "--json", prefix=prefix)
    figures = json.loads(done.stdout)
    assert figures["file_count"] == 14
    assert figures["read_bytes"] == figures["planned_bytes"] > 2**19
    # The pages belong to the lower file, so every mount of it finds them.
    assert cached_bytes(source / "package/data")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_for_all_users() as folder:
        yield folder


@pytest.mark.needs("root", "mount")
def test_files_of_another_user_are_recorded_whole(source: Path, tmp_path: Path) -> None:
    evict(source)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            become(NOBODY)
            has_fowner.cache_clear()
            recording = WarmRecording(str(source))
            (source / "package/data").open("rb").read(1)
            os.write(theirs, encode(recording.finish("name:x", "w")))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        record = decode(file.read(), "name:x", "w")
    assert os.waitpid(child, 0)[1] == 0
    assert record.method == "inotify"
    assert [(file.path, file.ranges) for file in record.files] == [
        (b"package/data", (FileRange(0, 2**22),))
    ]


@pytest.mark.needs("mount", "fuse")
def test_root_of_a_container_without_privileges_knows_what_it_is_not_told(
    source: Path, node: WarmingNode
) -> None:
    """Regression: the kernel reported uncached files as cached, and nothing was read ahead."""
    prefix = ("unshare", "--user", "--map-root-user")
    if node.run("--version", prefix=prefix).returncode:
        raise MissingError("no user namespaces here")
    data = source / "package/data"
    os.chown(data, _NOBODY - 1, _NOBODY - 1)
    evict(source)
    done = node.run("warm", source, "--", "head", "-c", "1", data, prefix=prefix)
    assert (done.returncode, done.stderr) == (0, "")
    assert node.last()["method"] == "inotify"
    evict(source)
    figures = json.loads(node.run("warm", source, "--json", prefix=prefix).stdout)
    assert (figures["read_bytes"], figures["cached_bytes"]) == (2**22, 0)


@pytest.mark.needs("mount", "fuse")
def test_inotify_sees_a_command_with_mounts_of_its_own(
    source: Path, tmp_path: Path, node: WarmingNode
) -> None:
    (tmp_path / "bound").mkdir()
    script = f"mount --bind {source} {tmp_path}/bound && exec cat {tmp_path}/bound/package/m1.py"
    done = node.run(
        "warm", "--method", "inotify", source, "--", "unshare", "--mount", "sh", "-c", script
    )
    assert done.returncode == 0, done.stderr
    assert node.last()["file_count"] == 1


def test_a_tree_with_too_many_directories_is_recorded_by_its_pages(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_module, "DIRECTORY_COUNT_MAX", 1)
    with pytest.raises(UnsupportedError, match="more directories"):
        WarmRecording(str(source), "inotify")
    recording = WarmRecording(str(source), "auto")
    recording.close()
    assert recording.method in ("fanotify", "residency")


def test_directories_are_those_of_this_file_system_and_no_links(
    source: Path, tmp_path: Path
) -> None:
    (source / "loop").symlink_to("..")
    (source / "package" / "deep").mkdir()
    assert sorted(directories(str(source))) == [b"", b"package", b"package/deep"]


def test_a_directory_that_goes_meanwhile_is_no_matter(source: Path) -> None:
    watch = InotifyWatch(str(source), 10.0)
    try:
        subprocess.run(
            ["cat", str(source / "package/m1.py")], check=True, stdout=subprocess.DEVNULL
        )
        subprocess.run(["rm", "-r", str(source / "package")], check=True)
        assert list(dict.fromkeys(watch.opened())) == [b"package/m1.py"]
    finally:
        watch.close()
