"""Restarts of a mount's server: processes with open files notice a pause only."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import BusyError, NotFoundError
from bootseer.fuse.striped.mounted.mount import MountedCheckpoints, restart_checkpoints
from bootseer.fuse.striped.mounted.status import mount_status
from bootseer.fuse.striped.tools.copy import copy_out, open_storage
from bootseer.linux.processes import start_time
from testbed.mounts.fuse_mount import run
from testbed.waiting import wait_for
from tests.fuse.striped.support.mounting import checkpoints, end, settings_in, shell

BIG = 20_000_000
SAVED = b"saved" * 2_000_000

# From 6.9 on, the kernel can resend a mount's requests to another process.
pytestmark = [pytest.mark.needs("fuse"), pytest.mark.needs(linux=(6, 9))]


def kill_the_worker(mount: MountedCheckpoints) -> None:
    """Kill the worker and wait until another one answers."""
    before = mount.worker_pid
    assert before, "the mount has ended"
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: mount.worker_pid not in (0, before), "another worker")


def test_a_restart_waits_for_a_writer_whose_file_was_removed(
    tmp_path: Path, mountpoint: Path
) -> None:
    """Regression (exerciser): the message named no file, and the server did not end."""
    (tmp_path / "stored").mkdir()
    code = """
import os, sys
file = os.open(sys.argv[1] + "/f", os.O_RDWR | os.O_CREAT)
os.write(file, b"unsaved")
os.unlink(sys.argv[1] + "/f")
print("written", flush=True)
sys.stdin.readline()
os.fsync(file)
os.close(file)
print("closed", flush=True)
sys.stdin.readline()
"""
    with checkpoints(tmp_path, mountpoint, (tmp_path / "stored").as_uri()) as mount:
        writer = subprocess.Popen(
            [sys.executable, "-c", code, str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert writer.stdin is not None
            assert writer.stdout is not None
            assert writer.stdout.readline() == "written\n"
            with pytest.raises(BusyError, match="f is being written"):
                restart_checkpoints(mount.run_dir, mountpoint, timeout_s=0.0)
            writer.stdin.write("go on\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "closed\n"
            before = mount.worker_pid
            assert restart_checkpoints(mount.run_dir, mountpoint, timeout_s=60.0) != before
        finally:
            writer.kill()
            writer.communicate()


READERS = """
import hashlib, mmap, os, random, sys, threading
folder, size = sys.argv[1], int(sys.argv[2])
data = random.Random(7).randbytes(size)
model = os.open(folder + "/model", os.O_RDONLY)
gone = os.open(folder + "/gone", os.O_RDONLY)
replaced = os.open(folder + "/replaced", os.O_RDONLY)
os.unlink(folder + "/gone")
open(folder + "/new", "wb").write(b"new" * 4_000_000)
os.rename(folder + "/new", folder + "/replaced")
mapped = mmap.mmap(model, 0, prot=mmap.PROT_READ)
assert mapped[:5] == data[:5]
names = os.scandir(folder + "/many")
seen = [next(names).name]
print("open", flush=True)
whole = hashlib.sha256()
for at in range(0, size, 300_000):
    whole.update(os.pread(model, 300_000, at))
assert whole.digest() == hashlib.sha256(data).digest()
print("read", flush=True)
sys.stdin.readline()
assert mapped[:] == data
assert os.pread(gone, size, 0) == data[:9_000_000]
assert os.pread(replaced, size, 0) == data[:9_000_000]
assert open(folder + "/replaced", "rb").read() == b"new" * 4_000_000
seen += [entry.name for entry in names]
assert sorted(seen) == sorted(os.listdir(folder + "/many")) and len(seen) == 60, len(seen)
for fd in (model, gone, replaced):
    os.close(fd)
print("done", flush=True)
"""


def test_kill_9_of_the_worker_while_reading(tmp_path: Path, mountpoint: Path, url: str) -> None:
    big = tmp_path / "big"
    big.write_bytes(random.Random(7).randbytes(BIG))
    with checkpoints(tmp_path, mountpoint, url) as mount:
        shell("cp {b} {d}/model", b=big, d=mountpoint)
        shell("for f in gone replaced; do head -c 9000000 {b} > {d}/$f; done", b=big, d=mountpoint)
        shell("mkdir {d}/many; cd {d}/many; touch $(seq 60)", d=mountpoint)
        reader = subprocess.Popen(
            [sys.executable, "-c", READERS, str(mountpoint), str(BIG)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None
        assert reader.stdin is not None
        try:
            assert reader.stdout.readline() == "open\n"
            for _ in range(3):
                kill_the_worker(mount)
            assert reader.stdout.readline() == "read\n"
            kill_the_worker(mount)
            out, _ = reader.communicate("\n", 60)
            assert out == "done\n"
        finally:
            reader.kill()
            reader.wait(60)
        # The tables hold nothing of the old readers.
        status = mount_status(mount.run_dir, mountpoint)
        assert status["files_open"] == 0
        assert status["pid"] == mount.pid


WRITERS = """
import errno, os, sys
folder = sys.argv[1]
open(folder + "/old", "wb").write(b"old" * 3_000_000)
doomed = os.open(folder + "/old", os.O_WRONLY | os.O_TRUNC)
os.write(doomed, bytes(9_000_000))
log = os.open(folder + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, b"before\\n")
os.fsync(log)
empty = os.open(folder + "/later", os.O_RDWR | os.O_CREAT | os.O_EXCL)
print("written", flush=True)
sys.stdin.readline()
for attempt in range(2):
    try:
        os.write(doomed, b"more")
    except OSError as error:
        assert error.errno == errno.EIO, error
    else:
        raise AssertionError("a writer must hear of what was lost")
try:
    os.close(doomed)
except OSError as error:
    assert error.errno == errno.EIO, error
else:
    raise AssertionError("and once more when it closes")
os.write(log, b"after\\n")
os.close(log)
os.write(empty, b"content")
assert os.pread(empty, 10, 0) == b"content"
os.close(empty)
assert open(folder + "/log").read() == "before\\nafter\\n"
assert open(folder + "/later").read() == "content"
assert open(folder + "/old", "rb").read() == b"old" * 3_000_000
print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_a_worker_that_ends_in_a_save_fails_that_file_alone(
    tmp_path: Path, mountpoint: Path, local_url: str, how: str
) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITERS, str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdin is not None
        try:
            assert writer.stdout.readline() == "written\n"
            if how == "killed":
                kill_the_worker(mount)
            else:
                with pytest.raises(BusyError, match="old is being written"):
                    restart_checkpoints(mount.run_dir, mountpoint, timeout_s=0.0)
                restart_checkpoints(mount.run_dir, mountpoint, timeout_s=0.0, force=True)
            out, _ = writer.communicate("\n", 60)
            assert out == "done\n"
        finally:
            writer.kill()
            writer.wait(60)
        shell("cp {d}/old {d}/again; cmp {d}/old {d}/again", d=mountpoint)
        assert mount.close() == ()


SAVER = """
import os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
begun = os.open("begun", os.O_WRONLY | os.O_CREAT, dir_fd=folder)
log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, dir_fd=folder)
os.write(log, b"before\\n")
os.fsync(log)
print("open", flush=True)
sys.stdin.readline()
later = os.open("later", os.O_WRONLY | os.O_CREAT, dir_fd=folder)
for file in (begun, later):
    os.write(file, b"saved" * 2_000_000)
os.write(log, b"after\\n")
for file in (begun, later, log, folder):
    os.close(file)
print("saved", flush=True)
"""


@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_a_save_goes_on_when_a_worker_ends_after_sigterm(
    tmp_path: Path, mountpoint: Path, local_url: str, how: str
) -> None:
    """The supervisor ended the mount with the worker: what was not written yet was lost."""
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        pid = mount.pid
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert saver.stdout is not None
            assert saver.stdout.readline() == "open\n"
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda: not os.path.ismount(mountpoint), "the unmount")
            for _ in range(2):
                if how == "killed":
                    kill_the_worker(mount)
                else:
                    restart_checkpoints(mount.run_dir, mountpoint, timeout_s=60.0)
            out, _ = saver.communicate("\n", 60)
            assert out == "saved\n"
        finally:
            saver.kill()
            saver.wait(60)
        wait_for(lambda: not start_time(pid), "the server's end")
    with open_storage(settings_in(tmp_path), local_url) as storage:
        for name, content in (("begun", SAVED), ("later", SAVED), ("log", b"before\nafter\n")):
            copy_out(storage, name, tmp_path / name)
            assert (tmp_path / name).read_bytes() == content


def test_restart_with_newer_code_under_load(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    big = tmp_path / "big"
    big.write_bytes(random.Random(7).randbytes(20_000_000))
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        shell("cp {b} {d}/model; echo old > {d}/log", b=big, d=mountpoint)
        # Nothing would be lost: it has not written yet.
        log = (mountpoint / "log").open("w")
        reader = subprocess.Popen(["cmp", big, mountpoint / "model"])
        command = [sys.executable, "-m", "bootseer", "--run-dir", str(mount.run_dir)]
        command += ["checkpoint", "restart"]
        before = mount.worker_pid
        try:
            done = run([*command, "--json", mountpoint])
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["worker_pid"] == mount.worker_pid != before
            assert reader.wait(100) == 0
        finally:
            end(reader)
        # The process that holds the mount runs the new code, too, with the same id.
        assert b"--resume" in Path(f"/proc/{mount.pid}/cmdline").read_bytes()
        assert run([*command, mountpoint, "x"]).returncode == 2
        kill_the_worker(mount)
        shell("cmp {b} {d}/model", b=big, d=mountpoint)
        print("new", file=log)
        log.close()
        assert (mountpoint / "log").read_text() == "new\n"
        assert mount.close() == ()
        assert not os.path.ismount(mountpoint)
        with pytest.raises(NotFoundError):
            restart_checkpoints(mount.run_dir, mountpoint, timeout_s=0.0)


def test_a_damaged_journal_costs_what_is_open_and_not_the_mount(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        shell("mkdir {d}/sub; echo content > {d}/sub/f", d=mountpoint)
        (mount.state_dir / "journal").write_text("nonsense\n")
        kill_the_worker(mount)
        # The kernel keeps the names for a second.
        shown = ["cat", str(mountpoint / "sub" / "f")]
        wait_for(lambda: run(shown).stdout == "content\n", "another node of it")
