"""Ordinary files of this node, which the kernel reads past the mount's server."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.fuse.striped.mounted.mount import restart_checkpoints
from bootseer.fuse.striped.mounted.status import mount_status
from testbed.mounts.fuse_mount import run
from testbed.needs import MissingError, require
from tests.fuse.striped.support.mounting import MIB, checkpoints

pytestmark = pytest.mark.needs("mount", "fuse")

OLD = bytes(range(256)) * (5 * MIB // 256)

READ_ON = """
import mmap, os, signal, sys
folder, stored = sys.argv[1], sys.argv[2]
old = bytes(range(256)) * (5 * 2**20 // 256)
names = ("kept", "replaced", "emptied", "gone", "grown", "small")
opened = {name: os.open(folder + "/" + name, os.O_RDONLY) for name in names}
mapped = mmap.mmap(opened["emptied"], 0, prot=mmap.PROT_READ)
direct = os.open(folder + "/kept", os.O_RDONLY | os.O_DIRECT)
assert os.pread(direct, 1000, 3) == old[3:1003]
print("open", flush=True)
sys.stdin.readline()
open(folder + "/new", "wb").write(b"new")
os.rename(folder + "/new", folder + "/replaced")
open(folder + "/emptied", "wb").write(b"new")
os.unlink(folder + "/gone")
with open(folder + "/small", "ab", buffering=0) as more:
    more.write(b"more")
    # No byte reaches the stored file before it is whole.
    assert open(stored + "/small", "rb").read() == b"old"
os.truncate(folder + "/grown", 0)
for name in names:
    expected = b"old" if name == "small" else old
    assert os.pread(opened[name], 2 * len(old), 0) == expected, name
assert mapped[:] == old
now = {name: open(folder + "/" + name, "rb").read() for name in sorted(os.listdir(folder))}
assert now == {
    "emptied": b"new", "grown": b"", "kept": old, "replaced": b"new", "small": b"oldmore"
}, {name: len(data) for name, data in now.items()}
# Readers and writers in turn.
for turn in range(5):
    with open(folder + "/small", "ab") as more, open(folder + "/small", "rb") as back:
        before = back.read()
        more.write(b".")
    assert open(folder + "/small", "rb").read() == before + b"."
assert os.pread(opened["small"], 10, 0) == b"old"
print("done", flush=True)
"""


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    require("root", linux=(6, 9))
    folder = tmp_path / "stored"
    folder.mkdir()
    if run(["stat", "-f", "-c", "%T", folder]).stdout.strip() == "overlayfs":
        raise MissingError("the kernel passes no files of an overlay through")
    return folder


def test_an_ordinary_file_is_read_past_the_server(stored: Path, mountpoint: Path) -> None:
    (stored / "file").write_bytes(OLD)
    with checkpoints(stored.parent, mountpoint, stored.as_uri()) as mount:
        done = run(["cmp", str(stored / "file"), str(mountpoint / "file")])
        assert done.returncode == 0, done.stderr
        assert mount_status(mount.run_dir, mountpoint)["statistics"]["served_bytes"] == 0


@pytest.mark.parametrize("restart", ["killed", "handed over"])
def test_who_has_a_file_open_reads_that_generation_past_any_server(
    stored: Path, mountpoint: Path, restart: str
) -> None:
    for name in ("kept", "replaced", "emptied", "gone", "grown"):
        (stored / name).write_bytes(OLD)
    (stored / "small").write_bytes(b"old")
    with checkpoints(stored.parent, mountpoint, stored.as_uri()) as mount:
        reader = subprocess.Popen(
            [sys.executable, "-c", READ_ON, str(mountpoint), str(stored)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "open\n"
            if restart == "killed":
                os.kill(mount.worker_pid, signal.SIGKILL)
            else:
                restart_checkpoints(mount.run_dir, mountpoint, timeout_s=20.0)
            out, _ = reader.communicate("\n", 60)
            assert out == "done\n"
        finally:
            reader.kill()
            reader.wait(60)
