"""Mounted images: real mounts, real servers, and what kills them."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.config import Settings
from bootseer.errors import (
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from bootseer.fuse.kernel import control, mounts
from bootseer.prefetch import hot_store
from bootseer.prefetch.mount import MountedImage, find_live_mount, mount_image, unmount_image
from bootseer.prefetch.mount_state import (
    is_alive,
    live_mounts,
    lock_new,
    new_mount_dir,
    sweep,
    take_lock,
)
from bootseer.prefetch.publish import wait_published
from bootseer.prefetch.records import ImageRecord
from bootseer.prefetch.serve_plan import ServeOptions
from bootseer.prefetch.server_process import log_path
from bootseer.prefetch.settings_json import settings_to_json
from bootseer.store import open_store
from tests.support.image_mounts import (
    bootseer,
    checksums_outside,
    drop_cache,
    index,
    mounted,
    outside,
    settings_at,
    skip_unless_fuse,
    skip_unless_root,
    start_outside,
    sweep_everything,
    tree_outside,
    wait_for,
)
from tests.support.rootfs import odd_tree

pytestmark = pytest.mark.fuse

BIG_BYTES = 8 * 2**20
HOT = ("hot-1", "hot-2")


@dataclass
class Node:
    """An indexed directory and a node that has not seen it."""

    settings: Settings
    source: Path
    record: ImageRecord
    base: Path

    def stored(self, key: str) -> Path:
        path = self.base / "store" / key
        path.chmod(0o600)
        return path


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    skip_unless_fuse()
    source = tmp_path / "source"
    source.mkdir()
    for name, size in (("big", BIG_BYTES), ("hot-1", 700_000), ("hot-2", 9_000), ("cold", 10**6)):
        (source / name).write_bytes(os.urandom(size))
    settings = settings_at(tmp_path)
    record = index(settings, source, "image:1")
    drop_cache(settings)
    yield Node(settings, source, record, tmp_path)
    sweep_everything(settings)


def test_the_mounted_tree_equals_the_source(tmp_path: Path) -> None:
    skip_unless_fuse()
    skip_unless_root()
    settings = settings_at(tmp_path)
    source = odd_tree(tmp_path / "source")
    index(settings, source, "odd:1")
    with mounted(settings, "odd:1", tmp_path / "mnt"):
        found, expected = tree_outside(tmp_path / "mnt"), tree_outside(source)
        assert found.keys() == expected.keys()
        for path, attributes in expected.items():
            assert found[path] == attributes, path


def test_holes_are_found(node: Node) -> None:
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
        assert outside(code, node.base / "mnt/sparse") == "0 True True\n"


def test_writing_is_refused(node: Node) -> None:
    code = """
import errno, os, sys
for call in (lambda: open(sys.argv[1] + "/new", "w"), lambda: os.unlink(sys.argv[1] + "/big")):
    try:
        call()
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    with mounted(node.settings, "image:1", node.base / "mnt"):
        assert outside(code, node.base / "mnt") == "EROFS\nEROFS\n"


def read_hot(node: Node, directory: Path) -> None:
    paths = [directory / name for name in HOT]
    assert checksums_outside(paths) == [digest_of(node.source / name) for name in HOT]


def test_record_then_replay_moves_only_the_hot_bytes(node: Node) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
        assert image.status()["prefetch"] is None
        image.ready()
        # After the record's end nothing more is recorded.
        checksums_outside([image.directory / "cold"])
        wait_for(lambda: image.status()["record"] == "published")
    drop_cache(node.settings)
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        before = image.status()
        read_hot(node, image.directory)
        status = image.status()
        assert status["faults"]["fault_count"] == 0
        assert status["moved"]["fetched_bytes"] == before["moved"]["fetched_bytes"]
        assert status["moved"]["fetched_bytes"] < 1_000_000
        assert status["prefetch"]["recall"] == 1.0
        assert status["prefetch"]["precision"] > 0.95
        image.ready()
        assert image.status()["record"] == "not needed"


def test_a_bundle_that_missed_much_is_made_anew(node: Node) -> None:
    for paths, traces in ((("hot-2",), 1), (("hot-1", "hot-2"), 2)):
        with mounted(node.settings, "image:1", node.base / "mnt") as image:
            checksums_outside([image.directory / name for name in paths])
        assert wait_published(node.settings, 30)
        with open_store(node.settings.store_url) as store:
            pointer = hot_store.read_pointer(store, node.record.index_digest, "train")
        assert pointer is not None
        assert pointer.trace_count == traces


def test_no_record_when_told_so(node: Node) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt", record="never") as image:
        read_hot(node, image.directory)
    assert wait_published(node.settings, 30)
    with open_store(node.settings.store_url) as store:
        assert hot_store.workloads(store, node.record.index_digest) == []


def test_ready_by_datagram_ends_the_record(node: Node) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt", record="always") as image:
        read_hot(node, image.directory)
        outside(
            "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM);"
            "s.sendto(b'ready', '\\0' + sys.argv[1])",
            image.ready_name,
        )
        wait_for(lambda: image.status()["record"] == "published")


def test_a_short_window_ends_the_record(node: Node) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt", window_s=0.2) as image:
        wait_for(lambda: image.status()["record"] != "recording")


def test_kill_9_of_the_worker_while_reading(node: Node) -> None:
    if not mount_can_resend():
        pytest.skip("handing requests to another worker needs Linux 6.9")
    code = """
import hashlib, sys
h = hashlib.sha256()
with open(sys.argv[1], "rb", buffering=0) as file:
    print("go", flush=True)
    while data := file.read(65536):
        h.update(data)
print(h.hexdigest())
"""
    slow = f"limit+{node.settings.store_url}?node_bytes_per_s={4 * 2**20}"
    slow += f"&account={node.base}/account"
    settings = replace(node.settings, store_url=slow)
    with mounted(settings, "image:1", node.base / "mnt") as image:
        reader = start_outside(code, image.directory / "big")
        assert reader.stdout is not None
        assert reader.stdout.readline() == "go\n"
        workers = set()
        for _ in range(3):
            workers.add(kill_worker(image.status()["worker_pid"]))
            wait_for(lambda: worker_of(image) not in workers | {None})
        assert reader.communicate_checked() == digest_of(node.source / "big") + "\n"
        # What earlier workers recorded is not lost.
        assert image.status()["access_count"] >= BIG_BYTES // (1 << 20)


def mount_can_resend() -> bool:
    release = os.uname().release.split(".")
    return (int(release[0]), int("".join(c for c in release[1] if c.isdigit()))) >= (6, 9)


def kill_worker(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    return pid


def worker_of(image: MountedImage) -> int | None:
    try:
        status = image.status()
    except UnavailableError:
        return None
    worker: int = status["worker_pid"]
    return worker


def test_kill_9_of_everything_then_again(node: Node) -> None:
    directory = node.base / "mnt"
    directory.mkdir()
    image = mount_image(node.settings, "image:1", directory)
    checksums_outside([directory / "hot-1"])
    state = find_live_mount(node.settings, directory)[1]
    worker = image.status()["worker_pid"]
    os.kill(state.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not is_alive(image.state_dir))
    assert list(live_mounts(node.settings)) == []
    for arguments in ((), (directory,)):
        shown = bootseer(node.settings, "image", "status", *arguments).stdout
        assert "its server died" in shown
        # A table cuts what is longer than the line.
        assert str(directory)[:40] in shown
    assert sweep(node.settings) == 1
    assert mounts.find_mount(directory) is None
    assert not image.state_dir.exists()
    with mounted(node.settings, "image:1", directory) as again:
        assert again.status()["cached_bytes"] > 700_000
        read_hot(node, directory)


def test_a_mount_that_is_being_made_is_left_alone(tmp_path: Path) -> None:
    """Also between the creation of its lock and the locking, while others look at it."""
    settings = settings_at(tmp_path)
    state_dir = new_mount_dir(settings)
    (state_dir / "lock").touch()
    assert sweep(settings) == 0
    looking = take_lock(state_dir)
    timer = threading.Timer(0.05, os.close, [looking])
    timer.start()
    lock = lock_new(state_dir)
    timer.join()
    assert is_alive(state_dir)
    os.close(lock)
    an_hour_ago_s = time.time() - 3600
    os.utime(state_dir, (an_hour_ago_s, an_hour_ago_s))
    assert sweep(settings) == 1


def test_a_crash_of_the_machine(node: Node) -> None:
    """What was lost of the cache is fetched again; what is intact is not."""
    directory = node.base / "mnt"
    directory.mkdir()
    image = mount_image(node.settings, "image:1", directory, ServeOptions(record="never"))
    right = [digest_of(node.source / name) for name in ("big", "hot-1")]
    assert checksums_outside([directory / "big", directory / "hot-1"]) == right
    for pid in (find_live_mount(node.settings, directory)[1].pid, image.status()["worker_pid"]):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(image.state_dir))
    sweep(node.settings)
    (stream,) = (node.settings.cache_dir / "streams").glob("*-*")
    with (stream / "present").open("r+b") as file:
        file.seek(16)
        file.write(b"another boot id!")
    with (stream / "data").open("r+b") as file:
        file.seek(3 * 2**20)
        file.write(bytes(300_000))
    with mounted(node.settings, "image:1", directory, record="never") as again:
        assert checksums_outside([directory / "big", directory / "hot-1"]) == right
        fetched = again.status()["moved"]["fetched_bytes"]
        assert 300_000 <= fetched < 1_500_000


def test_what_a_killed_publisher_left_is_removed(node: Node) -> None:
    left = node.settings.run_dir / "publishing" / "0123-4567"
    left.mkdir(parents=True)
    (left / "job.json").write_text("{}")
    an_hour_ago_s = time.time() - 3600
    os.utime(left, (an_hour_ago_s, an_hour_ago_s))
    with mounted(node.settings, "image:1", node.base / "mnt", record="never"):
        wait_for(lambda: not left.exists())


def test_the_cache_is_kept_below_its_limit_but_for_what_is_mounted(node: Node) -> None:
    (node.source / "more").write_bytes(os.urandom(2_000_000))
    index(node.settings, node.source, "image:2")
    drop_cache(node.settings)
    small = replace(node.settings, cache_limit_bytes=1_000_000)
    streams = node.settings.cache_dir / "streams"
    for name, reference in (("one", "image:1"), ("two", "image:2")):
        with mounted(small, reference, node.base / name, record="never") as image:
            checksums_outside([image.directory / "big"])
            # What an earlier start left goes; what is mounted stays, beyond the limit.
            wait_for(lambda: len(list(streams.glob("*-*"))) == 1)
            (used,) = streams.glob("*-*")
            assert image.status()["cached_bytes"] >= BIG_BYTES
            found = checksums_outside([image.directory / "big", image.directory / "hot-1"])
            assert found == [digest_of(node.source / n) for n in ("big", "hot-1")]
            assert used.exists()


def test_unmount_of_a_dead_server(node: Node) -> None:
    directory = node.base / "mnt"
    directory.mkdir()
    image = mount_image(node.settings, "image:1", directory)
    worker = image.status()["worker_pid"]
    os.kill(find_live_mount(node.settings, directory)[1].pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not is_alive(image.state_dir))
    unmount_image(node.settings, directory)
    assert mounts.find_mount(directory) is None


def test_mounting_again_where_a_server_died(node: Node) -> None:
    directory = node.base / "mnt"
    directory.mkdir()
    image = mount_image(node.settings, "image:1", directory)
    worker = image.status()["worker_pid"]
    os.kill(find_live_mount(node.settings, directory)[1].pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not is_alive(image.state_dir))
    with mount_image(node.settings, "image:1", directory):
        read_hot(node, directory)
    assert mounts.find_mount(directory) is None


def test_two_mounts_share_the_cache(node: Node) -> None:
    with (
        mounted(node.settings, "image:1", node.base / "one") as one,
        mounted(node.settings, "image:1", node.base / "two") as two,
    ):
        read_hot(node, one.directory)
        read_hot(node, two.directory)
        assert two.status()["moved"]["fetched_bytes"] == 0
        assert len(list(live_mounts(node.settings))) == 2


def test_damaged_frame_is_an_error_to_the_reader(node: Node) -> None:
    path = node.stored(blob_key(node.record.layers[0].blob_digest))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        names = ["big", "hot-1", "hot-2", "cold"]
        found = checksums_outside([image.directory / name for name in names])
        right = [digest_of(node.source / name) for name in names]
        wrong = [f for f, r in zip(found, right, strict=True) if f != r]
        assert wrong == ["EIO"]


@pytest.mark.parametrize("damage", ["flip", "gone", "header", "pointer"])
def test_damaged_bundle_costs_nothing_but_the_help(node: Node, damage: str) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
    assert wait_published(node.settings, 30)
    with open_store(node.settings.store_url) as store:
        pointer = hot_store.read_pointer(store, node.record.index_digest, "train")
    assert pointer is not None
    path = node.stored(hot_store.part_key(pointer.bundle_digest, 0))
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data)
    elif damage == "header":
        path = node.stored(hot_store.header_key(pointer.bundle_digest))
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    elif damage == "gone":
        path.unlink()
    else:
        node.stored(hot_store.pointer_key(node.record.index_digest, "train")).write_bytes(b"{")
    drop_cache(node.settings)
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
        assert image.status()["faults"]["fault_frame_count"] > 0


def test_store_goes_away_under_a_reader(node: Node) -> None:
    settings = replace(node.settings, deadline_s=1.0)
    with mounted(settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
        (node.base / "store").rename(node.base / "elsewhere")
        try:
            assert checksums_outside([image.directory / "cold"])[0].startswith("E")
            # What is here stays readable.
            read_hot(node, image.directory)
        finally:
            (node.base / "elsewhere").rename(node.base / "store")
        assert checksums_outside([image.directory / "cold"]) == [digest_of(node.source / "cold")]


def test_full_disk_still_serves(node: Node) -> None:
    skip_unless_root()
    small = node.base / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], check=True)
    try:
        settings = replace(node.settings, cache_dir=small)
        with mounted(settings, "image:1", node.base / "mnt", record="never") as image:
            names = ["big", "hot-1", "hot-2", "cold"]
            found = checksums_outside([image.directory / name for name in names])
            assert found == [digest_of(node.source / name) for name in names]
            assert image.status()["cache_is_full"]
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_a_mount_that_got_the_number_of_one_that_is_gone_is_left_alone(node: Node) -> None:
    """The kernel reuses the number at once: unmounting one image aborted another."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(mounted(node.settings, "image:1", node.base / "first"))
        found = mounts.find_mount(first.directory)
        assert found is not None
        connection = stack.enter_context(control.connection(found.device_minor))
        if connection is None:
            pytest.skip("the control files of FUSE are out of reach")
        assert not connection.wait_gone(0)
        first.close()
        for number in range(5):
            other = stack.enter_context(
                mounted(node.settings, "image:1", node.base / f"other-{number}")
            )
            again = mounts.find_mount(other.directory)
            assert again is not None
            if again.device_minor == found.device_minor:
                break
        else:
            pytest.skip("other mounts on this machine took the number")
        assert connection.wait_gone(0)
        connection.abort()
        read_hot(node, other.directory)


def test_taking_a_mount_off_that_is_off_already_is_no_error(node: Node) -> None:
    directory = node.base / "mnt"
    with mounted(node.settings, "image:1", directory) as image:
        kept_open = (directory / "hot-1").open("rb")
        try:
            image.detach()
            image.detach()
            assert not directory.is_mount()
        finally:
            kept_open.close()


def test_it_ends_with_the_process_it_was_mounted_for(node: Node) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        directory = node.base / "mnt"
        directory.mkdir()
        options = ServeOptions(watch_pid=process.pid)
        image = mount_image(node.settings, "image:1", directory, options)
        process.kill()
    wait_for(lambda: not image.state_dir.exists())
    assert mounts.find_mount(directory) is None


def test_nobody_waits_for_the_mount(node: Node) -> None:
    """Whoever asked for a mount was killed before it was ready: it must not stay."""
    directory = node.base / "mnt"
    directory.mkdir()
    code = """
import json, os, sys, threading, time
from pathlib import Path
from bootseer.fuse.kernel import control, mounts
from bootseer.prefetch.mount import mount_image
from bootseer.prefetch.settings_json import settings_from_json
directory = Path(sys.argv[2])
def kill():
    while mounts.find_mount(directory) is None:
        time.sleep(0.001)
    os.kill(os.getpid(), 9)
threading.Thread(target=kill, daemon=True).start()
mount_image(settings_from_json(json.loads(sys.argv[1])), "image:1", directory)
time.sleep(10)
"""
    process = start_outside(code, json.dumps(settings_to_json(node.settings)), directory)
    process.communicate(timeout=60)
    # Ready in the same instant is fine, too: then it is mounted and known.
    wait_for(
        lambda: (mounts.find_mount(directory) is None) == (list(live_mounts(node.settings)) == [])
    )


def test_what_cannot_be_mounted_says_so(node: Node) -> None:
    directory = node.base / "mnt"
    with pytest.raises(NotFoundError, match="create it"):
        mount_image(node.settings, "image:1", directory)
    directory.mkdir()
    with pytest.raises(NotFoundError, match="no image"):
        mount_image(node.settings, "image:9", directory)
    with pytest.raises(InvalidInputError, match="record"):
        mount_image(node.settings, "image:1", directory, ServeOptions(record="sometimes"))
    with pytest.raises(NotFoundError, match="no image is mounted"):
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
    assert list(live_mounts(node.settings)) == []
    assert mounts.find_mount(directory) is None


def test_a_cache_that_cannot_be_used_says_so(node: Node) -> None:
    node.settings.cache_dir.mkdir(parents=True, exist_ok=True)
    (node.settings.cache_dir / "streams").write_text("in the way")
    (node.base / "mnt").mkdir()
    with pytest.raises(NotFoundError, match="cache"):
        mount_image(node.settings, "image:1", node.base / "mnt")
    assert mounts.find_mount(node.base / "mnt") is None


def test_a_lost_blob_is_an_io_error_with_a_line_in_the_log(node: Node) -> None:
    (blob,) = node.record.layers
    node.stored("blobs/" + blob.blob_digest.replace(":", "/")).unlink()
    with mounted(node.settings, "image:1", node.base / "mnt", prefetch=False) as image:
        assert checksums_outside([image.directory / "big"]) == ["EIO"]
        log = log_path(node.settings, image.state.id).read_text()
    assert "cannot read bytes" in log
    assert "/big" in log
