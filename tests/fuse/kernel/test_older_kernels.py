"""Servers and checkpoint mounts with the features of Linux 5.4, 6.8 and 6.13, on a newer kernel."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.linux import mount_table
from testbed.kernels import RELEASES
from testbed.mounts.flat_server import KERNEL
from testbed.mounts.fuse_mount import check_python, clear_mount, run
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

pytestmark = pytest.mark.needs("fuse")
_DEADLINE_S = 60.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "large").write_bytes(os.urandom(8 << 20))
    return path


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Linux release whose features mounts have."""
    return str(request.param)


def _served(release: str, source: Path, mountpoint: Path, mode: str) -> "subprocess.Popen[str]":
    """Start a supervised server, and wait until its mount works."""
    process = subprocess.Popen(
        [sys.executable, "-m", "testbed.mounts.flat_server", "supervise", source, mountpoint, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, KERNEL: release},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate(timeout=_DEADLINE_S)
    return process


@pytest.mark.parametrize("mode", ["cached", "direct_io", "passthrough"])
def test_files_are_read_and_the_mount_ends_as_it_should(
    release: str, mode: str, source: Path, mountpoint: Path
) -> None:
    """A server that is asked for passthrough reads itself if the kernel has none."""
    with _served(release, source, mountpoint, mode) as process:
        try:
            found = run(["sha256sum", mountpoint / "large"]).stdout.split()[0]
            assert found == hashlib.sha256((source / "large").read_bytes()).hexdigest()
            process.terminate()
            out, err = process.communicate(timeout=_DEADLINE_S)
            assert (process.returncode, out) == (0, "ended\n"), err
            assert mount_table.find_mount(mountpoint) is None
        finally:
            clear_mount(mountpoint)
            process.kill()


@pytest.mark.parametrize("release", ["5.4", "6.8"])
def test_before_6_9_a_killed_server_takes_its_mount_along(
    release: str, source: Path, mountpoint: Path
) -> None:
    """No reader waits for ever, and the server's last message has the reason."""
    with _served(release, source, mountpoint, "direct_io") as process:
        try:
            holder = subprocess.Popen(
                [sys.executable, "-c", _READER, mountpoint / "large"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert holder.stdout is not None
            assert holder.stdout.readline() == "opened\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            os.kill(int(children.split()[0]), signal.SIGKILL)
            _, err = process.communicate(timeout=_DEADLINE_S)
            assert process.returncode == 1, err
            assert "Linux 6.9 can" in err
            assert mount_table.find_mount(mountpoint) is None
            assert holder.communicate("go\n", timeout=_DEADLINE_S)[0] == "failed\n"
        finally:
            clear_mount(mountpoint)
            process.kill()


_READER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print("opened", flush=True)
sys.stdin.readline()
try:
    os.pread(fd, 4096, 1 << 20)
except OSError:
    print("failed")
"""


@pytest.fixture
def checkpoints(release: str, tmp_path: Path, mountpoint: Path) -> Iterator[Path]:
    """Mount of checkpoints."""
    (tmp_path / "stored").mkdir()
    words = ["checkpoint", "mount", "--foreground", str(tmp_path / "stored"), str(mountpoint)]
    process = subprocess.Popen(
        [sys.executable, "-c", _MOUNT, release, *words],
        cwd=REPOSITORY,
        env={**os.environ, "BOOTSEER_RUN_DIR": str(tmp_path / "run")},
    )
    try:
        wait_for(lambda: mount_table.find_mount(mountpoint) is not None, "the mount")
        yield mountpoint
        process.terminate()
        assert process.wait(_DEADLINE_S) == 0
    finally:
        clear_mount(mountpoint)
        process.kill()
        process.wait(_DEADLINE_S)


_MOUNT = """
import sys
from bootseer.cli.main import main
from testbed.kernels import offer_as
offer_as(sys.argv[1])
main(sys.argv[2:])
"""


def test_checkpoints_are_written_replaced_and_read(checkpoints: Path) -> None:
    """Reads are also made through a shared mapping, as safetensors makes them."""
    check_python(_SAVES, checkpoints)


_SAVES = """
import mmap, os, sys
top = sys.argv[1]
for step in range(3):
    data = bytes([step]) * 5_000_000
    with open(f"{top}/new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{top}/new", f"{top}/latest")
    with open(f"{top}/latest", "rb") as file:
        assert file.read() == data
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert view[4_999_999] == step
assert os.listdir(top) == ["latest"]
os.truncate(f"{top}/latest", 0)
assert os.stat(f"{top}/latest").st_size == 0
os.unlink(f"{top}/latest")
assert os.listdir(top) == []
"""
