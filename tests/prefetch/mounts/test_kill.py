"""Kills of servers, workers and publishers, crashes of the machine, and the starts after them."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.base.documents import to_line
from bootseer.errors import NotFoundError, UnavailableError
from bootseer.fuse.kernel.unmount import detach
from bootseer.linux import mount_table, namespaces
from bootseer.prefetch.images.mount import (
    MountedImage,
    find_live_mount,
    mount_image,
    unmount_image,
)
from bootseer.prefetch.serve.plan import ServeOptions
from bootseer.served.ending import sweep
from bootseer.served.service import (
    ServiceState,
    is_alive,
    live_mounts,
    lock_new,
    new_service_dir,
    services_dir,
    take_lock,
    write_state,
)
from testbed.cgroups import frozen
from testbed.mounts.image_mounts import (
    bootseer,
    checksums_in_child,
    mounted,
    settings_at,
    start_program,
)
from testbed.waiting import wait_for
from tests.prefetch.mounts.conftest import BIG_BYTES, IndexedDirectory, digest_of, read_hot

pytestmark = pytest.mark.needs("fuse")


@pytest.mark.needs(linux=(6, 9))
def test_kill_9_of_the_worker_while_reading(node: IndexedDirectory) -> None:
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
        reader = start_program(code, image.directory / "big")
        assert reader.stdout is not None
        assert reader.stdout.readline() == "go\n"
        workers = set()
        for _ in range(3):
            workers.add(kill_worker(image.status()["worker_pid"]))
            wait_for(lambda: worker_of(image) not in workers | {None})
        assert reader.communicate_checked() == digest_of(node.source / "big") + "\n"
        # Records of earlier workers are not lost.
        assert image.status()["access_count"] >= BIG_BYTES // (1 << 20)


@pytest.mark.needs(linux=(6, 9))
def test_a_frozen_worker_is_replaced_while_a_job_reads(node: IndexedDirectory) -> None:
    # The deadline decides when a silent worker is replaced.
    settings = replace(node.settings, deadline_s=20.0)
    with mounted(settings, "image:1", node.base / "mnt") as image:
        worker = image.status()["worker_pid"]
        with frozen(worker):
            assert checksums_in_child([image.directory / "big"]) == [digest_of(node.source / "big")]
        assert image.status()["worker_pid"] != worker


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


def test_kill_9_of_everything_then_again(node: IndexedDirectory) -> None:
    directory = node.base / "mnt"
    directory.mkdir()
    image = mount_image(node.settings, "image:1", directory)
    checksums_in_child([directory / "hot-1"])
    state = find_live_mount(node.settings, directory)[1]
    worker = image.status()["worker_pid"]
    os.kill(state.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not is_alive(image.state_dir))
    assert list(live_mounts(node.settings.run_dir)) == []
    for arguments, code in (((), 0), ((directory,), 1)):
        shown = bootseer(node.settings, "status", *arguments)
        assert shown.returncode == code
        assert "its server was killed" in shown.stdout
        assert f"`bootseer unmount {directory}` removes it" in shown.stdout
    assert sweep(node.settings.run_dir) == 1
    assert mount_table.find_mount(directory) is None
    assert not image.state_dir.exists()
    with mounted(node.settings, "image:1", directory) as again:
        assert again.status()["cached_bytes"] > 700_000
        read_hot(node, directory)


def test_a_mount_that_is_being_made_is_left_alone(tmp_path: Path) -> None:
    """Also between the creation of its lock and the locking, while others look at it."""
    settings = settings_at(tmp_path)
    state_dir = new_service_dir(settings.run_dir)
    (state_dir / "lock").touch()
    assert sweep(settings.run_dir) == 0
    looking = take_lock(state_dir)
    timer = threading.Timer(0.05, os.close, [looking])
    timer.start()
    lock = lock_new(state_dir)
    timer.join()
    assert is_alive(state_dir)
    os.close(lock)
    an_hour_ago_s = time.time() - 3600
    os.utime(state_dir, (an_hour_ago_s, an_hour_ago_s))
    assert sweep(settings.run_dir) == 1


@pytest.mark.needs("mount")
def test_one_folder_that_cannot_be_removed_is_said_once_and_keeps_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_at(tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    scratches = []
    for number in range(3):
        state_dir = new_service_dir(settings.run_dir)
        os.close(lock_new(state_dir))
        scratch = settings.cache_dir / "containers" / state_dir.name
        (scratch / "upper/folder").mkdir(parents=True)
        write_state(
            state_dir,
            ServiceState(
                id=state_dir.name,
                reference="image:1",
                index_digest="",
                workload="",
                directory=str(tmp_path / f"nothing-{number}"),
                pid=0,
                started_ns=number,
                purpose="run",
                scratch=str(scratch),
            ),
        )
        scratches.append(scratch)
    point = scratches[1] / "upper/folder"
    namespaces.mount(kept, point, flags=namespaces.MS_BIND)
    try:
        assert sweep(settings.run_dir) == 3
        assert [path.exists() for path in scratches] == [False, True, False]
        assert os.listdir(point) == ["file"]
        (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert str(scratches[1]) in said.getMessage()
        assert sweep(settings.run_dir) == 0
        assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1
    finally:
        namespaces.unmount(point)


def test_a_crash_of_the_machine(node: IndexedDirectory) -> None:
    directory = node.base / "mnt"
    directory.mkdir()
    image = mount_image(replace(node.settings, record="never"), "image:1", directory)
    right = [digest_of(node.source / name) for name in ("big", "hot-1")]
    assert checksums_in_child([directory / "big", directory / "hot-1"]) == right
    for pid in (find_live_mount(node.settings, directory)[1].pid, image.status()["worker_pid"]):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(image.state_dir))
    sweep(node.settings.run_dir)
    (stream,) = (node.settings.cache_dir / "streams").glob("*-*")
    with (stream / "sums").open("r+b") as file:
        file.seek(16)
        file.write(b"another boot id!")
    with (stream / "data").open("r+b") as file:
        file.seek(3 * 2**20)
        file.write(bytes(300_000))
    with mounted(node.settings, "image:1", directory, record="never") as again:
        assert checksums_in_child([directory / "big", directory / "hot-1"]) == right
        fetched = again.status()["moved"]["fetched_bytes"]
        assert 300_000 <= fetched < 1_500_000


def test_what_a_killed_publisher_left_is_removed(node: IndexedDirectory) -> None:
    left = node.settings.run_dir / "services" / "0123-4567"
    left.mkdir(parents=True)
    (left / "job.json").write_text("{}")
    an_hour_ago_s = time.time() - 3600
    os.utime(left, (an_hour_ago_s, an_hour_ago_s))
    with mounted(node.settings, "image:1", node.base / "mnt", record="never"):
        wait_for(lambda: not left.exists())


def _with_a_dead_server(node: IndexedDirectory) -> Path:
    """Mount point of an image whose server and worker were killed."""
    directory = node.base / "mnt"
    directory.mkdir()
    image = mount_image(node.settings, "image:1", directory)
    worker = image.status()["worker_pid"]
    os.kill(find_live_mount(node.settings, directory)[1].pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not is_alive(image.state_dir))
    return directory


def test_unmount_of_a_dead_server(node: IndexedDirectory) -> None:
    directory = _with_a_dead_server(node)
    unmount_image(node.settings, directory)
    assert mount_table.find_mount(directory) is None


def test_unmount_where_only_its_state_is_left(node: IndexedDirectory) -> None:
    directory = _with_a_dead_server(node)
    detach(directory, lazy=True)
    unmount_image(node.settings, directory)
    wait_for(lambda: not any(services_dir(node.settings.run_dir).iterdir()))
    with pytest.raises(NotFoundError):
        unmount_image(node.settings, directory)


def test_mounting_again_where_a_server_died(node: IndexedDirectory) -> None:
    directory = _with_a_dead_server(node)
    with mount_image(node.settings, "image:1", directory):
        read_hot(node, directory)
    assert mount_table.find_mount(directory) is None


def test_it_ends_with_the_process_it_was_mounted_for(node: IndexedDirectory) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        directory = node.base / "mnt"
        directory.mkdir()
        options = ServeOptions(watch_pid=process.pid)
        image = mount_image(node.settings, "image:1", directory, options)
        process.kill()
    wait_for(lambda: not image.state_dir.exists())
    assert mount_table.find_mount(directory) is None


def test_nobody_waits_for_the_mount(node: IndexedDirectory) -> None:
    directory = node.base / "mnt"
    directory.mkdir()
    code = """
import json, os, sys, threading, time
from pathlib import Path
from bootseer.fuse.kernel.unmount import detach
from bootseer.linux import mount_table
from bootseer.prefetch.images.mount import mount_image
from bootseer.settings.config import Settings
from bootseer.base.documents import from_line
directory = Path(sys.argv[2])
def kill():
    while mount_table.find_mount(directory) is None:
        time.sleep(0.001)
    os.kill(os.getpid(), 9)
threading.Thread(target=kill, daemon=True).start()
mount_image(from_line(sys.argv[1], Settings), "image:1", directory)
time.sleep(10)
"""
    process = start_program(code, to_line(node.settings), directory)
    process.communicate(timeout=60)
    # It may also become ready in the same instant: then it is mounted and known.
    wait_for(
        lambda: (
            (mount_table.find_mount(directory) is None)
            == (list(live_mounts(node.settings.run_dir)) == [])
        )
    )
