"""Life of a mount: starts, kills, hangs and ends."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError, NotFoundError, UnsupportedError
from bootseer.fuse.kernel.operations import Caller, Opened
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.striped.mounted.mount import (
    mount_checkpoints,
    mount_spec,
    unmount_checkpoints,
)
from bootseer.fuse.striped.tools.copy import copy_in, copy_out, open_storage
from bootseer.linux.processes import ProcessId, start_time
from bootseer.served.service import lock_new, services_dir
from bootseer.store import open_backend
from bootseer.store.local.backend import LocalBackend
from testbed.mounts.fuse_mount import abort, check_python, mounted, run
from testbed.waiting import wait_for, wait_for_fuse_request
from tests.fuse.striped.support.faulty import FaultyBackend, hanging
from tests.fuse.striped.support.harness import Driver, storage_on
from tests.fuse.striped.support.mounting import BIG, MIB, checkpoints, end, settings_in, shell
from tests.fuse.striped.support.stored import find_garbage

pytestmark = pytest.mark.needs("fuse")


# ---- the life of a mount ------------------------------------------------------------------

SLOW_WRITER = """
import os, sys, time
old = os.open(sys.argv[1] + "/old", os.O_WRONLY | os.O_TRUNC)
new = os.open(sys.argv[1] + "/new", os.O_WRONLY | os.O_CREAT)
red = os.open(sys.argv[1] + "/\x1b[31mred", os.O_WRONLY | os.O_CREAT)
for _ in range(5):
    os.write(old, bytes(2_000_000)); os.write(new, bytes(2_000_000))
os.write(red, b"red")
print("written", flush=True)
time.sleep(60)
"""


def start_slow_writer(mountpoint: Path) -> "subprocess.Popen[bytes]":
    (mountpoint / "old").write_bytes(b"old" * 3_000_000)
    writer = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(mountpoint)], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    return writer


def assert_only_the_old_file(tmp_path: Path, url: str) -> None:
    with open_storage(settings_in(tmp_path), url) as storage:
        assert [info.path for info in storage.tree.stored.entries("")] == ["old"]
        copy_out(storage, "old", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"old" * 3_000_000


def test_kill_9_of_the_server_in_a_save(tmp_path: Path, mountpoint: Path, url: str) -> None:
    with checkpoints(tmp_path, mountpoint, url) as mount:
        writer = start_slow_writer(mountpoint)
        worker_pid = mount.worker_pid
        pid = mount.pid
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)
        # The holder of the mount is dead; the serving process goes on.
        assert run(["stat", mountpoint / "old"]).returncode == 0
        os.kill(worker_pid, signal.SIGKILL)
        assert run(["stat", mountpoint / "old"]).returncode != 0
        end(writer)
        unmount_checkpoints(mount.run_dir, mountpoint, timeout_s=1.0)
        assert not list(services_dir(mount.run_dir).iterdir())
    assert_only_the_old_file(tmp_path, url)
    with contextlib.closing(open_backend(url)) as backend:
        assert find_garbage(backend, "")


def test_unmount_names_what_was_not_finished(tmp_path: Path, mountpoint: Path, url: str) -> None:
    with checkpoints(tmp_path, mountpoint, url) as mount:
        writer = start_slow_writer(mountpoint)
        command = [sys.executable, "-m", "bootseer", "--run-dir", str(mount.run_dir)]
        done = run([*command, "unmount", "--timeout", "1", str(mountpoint)], deadline_s=50)
        end(writer)
        assert done.returncode == 1
        assert "old was still being written" in done.stderr
        assert "new was still being written" in done.stderr
        assert r"\x1b[31mred was still being written" in done.stderr
        again = run([*command, "unmount", str(mountpoint)])
        assert again.returncode == 10
        assert "nothing of Bootseer is mounted on" in again.stderr
    assert_only_the_old_file(tmp_path, url)


def test_a_mount_in_the_foreground_fails_where_files_were_not_finished(
    tmp_path: Path, mountpoint: Path, url: str
) -> None:
    """Regression: it exited with 0, so that its starter took the checkpoint for saved."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "bootseer", "--run-dir", str(run_dir), "checkpoint", "mount"]
    with subprocess.Popen(
        [*command, "--foreground", "--timeout", "1", url, str(mountpoint)],
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            assert any("is mounted on" in line for line in lines)
            writer = start_slow_writer(mountpoint)
            server.terminate()
            said = server.stderr.read()
            assert server.wait(120) == 1
            end(writer)
            assert "old was still being written: nothing of it is kept" in said
            assert "new was still being written: nothing of it is kept" in said
        finally:
            server.kill()
            run(["umount", "-l", mountpoint])
    assert_only_the_old_file(tmp_path, url)


def test_an_unmount_that_finds_the_ended_server_locked_leaves_it_to_the_next_one(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    """The folder stayed for an hour, although its list of lost files had been read."""
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        writer = start_slow_writer(mountpoint)
        # As if a process of the server held the lock for longer than any wait.
        (mount.state_dir / "lock").unlink()
        lock = lock_new(mount.state_dir)
        assert sorted(mount.close(0.5)) == ["\x1b[31mred", "new", "old"]
        end(writer)
        assert mount.state_dir.exists()
        os.close(lock)
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        assert list(services_dir(mount.run_dir).iterdir()) == [mount.state_dir]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_writer_that_is_killed_leaves_the_old_file(
    tmp_path: Path, mountpoint: Path, local_url: str, number: int
) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        writer = start_slow_writer(mountpoint)
        writer.send_signal(number)
        writer.wait(60)
        end(writer)
        shell("test $(stat -c %s {d}/old) = 9000000; test ! -e {d}/new", d=mountpoint)
        # A process that exits without closing its files has finished them.
        shell("sh -c 'head -c 9000000 /dev/zero; exit 3' > {d}/done || true", d=mountpoint)
        shell("test $(stat -c %s {d}/done) = 9000000; rm {d}/done", d=mountpoint)
        mount.close()
    assert_only_the_old_file(tmp_path, local_url)


def wait_until_gone(pid: int) -> None:
    wait_for(lambda: not start_time(pid), "the server's end")


def test_sigterm_unmounts(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        pid = mount.pid
        os.kill(pid, signal.SIGTERM)
        wait_until_gone(pid)
        assert not os.path.ismount(mountpoint)


@pytest.mark.parametrize(
    "kills_the_worker", [False, pytest.param(True, marks=pytest.mark.needs(linux=(6, 9)))]
)
def test_a_save_that_does_not_end_after_sigterm_leaves_the_old_file(
    tmp_path: Path, mountpoint: Path, local_url: str, kills_the_worker: bool
) -> None:
    shutdown_s = 4.0 if kills_the_worker else 0.5
    with checkpoints(tmp_path, mountpoint, local_url, shutdown_s=shutdown_s) as mount:
        writer = start_slow_writer(mountpoint)
        pid, worker_pid = mount.pid, mount.worker_pid
        assert pid
        assert worker_pid
        os.kill(pid, signal.SIGTERM)
        if kills_the_worker:
            wait_for(lambda: not os.path.ismount(mountpoint), "the unmount")
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker_pid, signal.SIGKILL)
        wait_until_gone(pid)
        assert not os.path.ismount(mountpoint)
        end(writer)
    assert_only_the_old_file(tmp_path, local_url)


def test_the_mount_ends_with_the_process_it_is_for(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    job = subprocess.Popen(["sleep", "60"])
    try:
        with checkpoints(tmp_path, mountpoint, local_url, user=ProcessId.of(job.pid)) as mount:
            assert os.path.ismount(mountpoint)
            pid = mount.pid
            job.kill()
            wait_until_gone(pid)
            assert not os.path.ismount(mountpoint)
    finally:
        job.kill()
        job.wait()


def test_read_only(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "f").write_bytes(b"content")
    with checkpoints(tmp_path, mountpoint, local_url, read_only=True):
        code = (
            "import errno, sys\n"
            "assert open(sys.argv[1] + '/f').read() == 'content'\n"
            "try: open(sys.argv[1] + '/g', 'w')\n"
            "except OSError as error: assert error.errno == errno.EROFS\n"
            "else: raise AssertionError\n"
        )
        check_python(code, mountpoint)


def test_warming_reads_the_newest_checkpoint(
    tmp_path: Path, mountpoint: Path, local_url: str, big: Path
) -> None:
    with open_storage(settings_in(tmp_path), local_url) as storage:
        copy_in(storage, big, "step-1/model")
        copy_in(storage, big, "step-2/model")
        storage.backend.create("latest").close()
    (tmp_path / "stored" / "latest").write_text("step-1\n")
    with checkpoints(tmp_path, mountpoint, local_url, read_newest=True) as mount:
        wait_for(lambda: "of the newest checkpoint ahead" in mount.log.read_text())
        assert f"read {BIG} bytes of the newest checkpoint ahead" in mount.log.read_text()
        shell("cmp {b} {d}/step-1/model; cmp {b} {d}/step-2/model", b=big, d=mountpoint)


def test_a_mount_that_cannot_be_made_says_why(tmp_path: Path, mountpoint: Path) -> None:
    settings = settings_in(tmp_path)
    with pytest.raises(NotFoundError, match="absent"):
        mount_checkpoints(
            mount_spec(settings, (tmp_path / "absent").as_uri(), mountpoint, read_only=True)
        )
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="is a file"):
        mount_checkpoints(mount_spec(settings, str(tmp_path / "file"), mountpoint))
    with pytest.raises(InvalidInputError, match="stripe unit"):
        mount_checkpoints(mount_spec(settings, str(tmp_path), mountpoint, stripe_unit_bytes=100))
    with pytest.raises(NotFoundError):
        mount_checkpoints(mount_spec(settings, str(tmp_path / "stored"), tmp_path / "nowhere"))
    with pytest.raises(UnsupportedError, match="arrow_hdfs://n/x cannot be mounted"):
        mount_spec(settings, "arrow_hdfs://n/x", mountpoint)
    assert not os.path.ismount(mountpoint)


def test_the_command_line(tmp_path: Path, mountpoint: Path) -> None:
    command = [sys.executable, "-m", "bootseer", "--run-dir", str(tmp_path / "run")]
    for name in ("checkpoint mount", "unmount"):
        assert "Example:" in run([*command, *name.split(), "--help"]).stdout
    bad = run(
        [
            *command,
            "checkpoint",
            "mount",
            "--stripe-unit",
            "many",
            str(tmp_path / "s"),
            str(mountpoint),
        ]
    )
    assert bad.returncode == 2
    assert "not a size" in bad.stderr
    missing = run(
        [*command, "checkpoint", "mount", "--read-only", str(tmp_path / "absent"), str(mountpoint)]
    )
    assert missing.returncode == 10
    done = run(
        [
            *command,
            "checkpoint",
            "mount",
            "--json",
            "--stripe-unit",
            "1MiB",
            str(tmp_path / "s"),
            str(mountpoint),
        ]
    )
    try:
        assert done.returncode == 0, done.stderr
        assert '"pid"' in done.stdout
        shell("echo hello > {d}/f; grep hello {d}/f", d=mountpoint)
        twice = run([*command, "checkpoint", "mount", str(tmp_path / "s"), str(mountpoint)])
        assert twice.returncode == 19
    finally:
        ended = run([*command, "unmount", "--json", str(mountpoint)])
    assert ended.returncode == 0, ended.stderr
    assert '"unwritten": []' in ended.stdout
    assert (tmp_path / "s" / "f").read_text() == "hello\n"


# ---- a storage that hangs -----------------------------------------------------------------


def test_a_hung_storage_ends_in_an_error_and_its_readers_can_be_killed(
    tmp_path: Path, mountpoint: Path
) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "f").write_bytes(bytes(20 * MIB))
    released = threading.Event()
    backend = FaultyBackend(LocalBackend(stored))
    driver = Driver(storage_on(backend, unit=MIB, deadline_s=3.0))
    try:
        with mounted(driver.fs, mountpoint):
            backend.rules.append(hanging("read", released))
            code = (
                "import errno, sys\n"
                "try: open(sys.argv[1] + '/f', 'rb').read()\n"
                "except OSError as error: assert error.errno == errno.ETIMEDOUT, error\n"
                "else: raise AssertionError\n"
            )
            check_python(code, mountpoint)
            reader = subprocess.Popen(["cat", str(mountpoint / "f")], stdout=subprocess.DEVNULL)
            wait_for_fuse_request(reader.pid)
            reader.kill()
            # The kernel's INTERRUPT ends the wait, not the deadline.
            assert reader.wait(60) == -signal.SIGKILL
            released.set()
    finally:
        released.set()
        driver.storage.close()


def test_a_file_whose_open_was_not_answered_is_not_emptied(
    tmp_path: Path, mountpoint: Path
) -> None:
    """Regression: unmounting under load emptied a file now and then, by O_TRUNC."""
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "f").write_text("old")
    with storage_on(stored) as storage:
        fs = Driver(storage).fs
        open_now = fs.open
        opening, released = threading.Event(), threading.Event()

        def open_late(caller: Caller, node: int, flags: int) -> Opened:
            opened = open_now(caller, node, flags)
            opening.set()
            released.wait(60)
            return opened

        fs.open = open_late  # type: ignore[method-assign]
        with mounted(fs, mountpoint, MountOptions(atomic_truncate=True)):
            code = "import sys; open(sys.argv[1] + '/f', 'wb')"
            writer = subprocess.Popen(
                [sys.executable, "-c", code, mountpoint], stderr=subprocess.DEVNULL
            )
            try:
                assert opening.wait(60)
                assert abort(mountpoint)
                assert writer.wait(60) == 1
            finally:
                released.set()
                end(writer)
    assert (stored / "f").read_text() == "old"


LOAD = """
import errno, os, sys, threading
# By its path it would continue in the folder below the mount.
os.chdir(sys.argv[1])
seen = []
def work(name):
    try:
        while True:
            with open(name, "wb") as file:
                for _ in range(9):
                    file.write(bytes(1_000_000))
            assert len(open(name, "rb").read()) == 9_000_000
    except OSError as error:
        seen.append(error.errno)
threads = [threading.Thread(target=work, args=(f"f{n}",)) for n in range(4)]
for thread in threads:
    thread.start()
print("running", flush=True)
for thread in threads:
    thread.join()
allowed = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT, errno.EIO, errno.ENODEV}
assert len(seen) == 4 and set(seen) <= allowed, [errno.errorcode[code] for code in seen]
"""


def _sizes(folder: Path) -> list[int]:
    with os.scandir(folder) as entries:
        return [entry.stat().st_size for entry in entries]


def test_unmount_under_load(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        load = subprocess.Popen(
            [sys.executable, "-c", LOAD, str(mountpoint)], stdout=subprocess.PIPE
        )
        try:
            assert load.stdout is not None
            assert load.stdout.readline() == b"running\n"
            # A file that is made for the first time shows the written size.
            wait_for(lambda: _sizes(mountpoint) == [9_000_000] * 4, "all four files")
            mount.close(0.3)
            assert load.wait(60) == 0
        finally:
            end(load)
    with open_storage(settings_in(tmp_path), local_url) as storage:
        for info in storage.tree.stored.entries(""):
            assert storage.tree.stored.view(info.path).size_bytes == 9_000_000
            copy_out(storage, info.path, tmp_path / "out")
            assert (tmp_path / "out").stat().st_size == 9_000_000
