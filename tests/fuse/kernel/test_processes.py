"""Servers as processes: signals end them cleanly, and a kill of a supervised one is not noticed."""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.fuse.kernel.unmount import unmount
from bootseer.linux import mount_table
from bootseer.linux.processes import wait_readable
from bootseer.served.supervision.supervisor import RestartPolicy
from testbed.cgroups import freezers, frozen
from testbed.mounts import fuse_mount
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.waiting import pause, wait_channels, wait_for

pytestmark = pytest.mark.needs("fuse")

_DEADLINE_S = 60.0
_FILE_BYTES = 96 << 20
_KILLS = 4
# Seed of the random moments; a failing test prints it.
_SEED = os.environ.get("BOOTSEER_TEST_SEED", "1")
# Reads as many MiB as each line says, and reports each. Slow, so that a line is not complete before
# the worker is killed.
_HASH = """
import hashlib, sys, time
digest = hashlib.sha256()
with open(sys.argv[1], "rb", buffering=0) as file:
    for line in sys.stdin:
        for _ in range(int(line)):
            digest.update(file.read(1 << 20)); time.sleep(0.01)
            sys.stdout.write("."); sys.stdout.flush()
    assert not file.read(1)
sys.stdout.write(digest.hexdigest())
"""
# Opens a file, and says after a line of input whether the file can still be read.
_HOLD = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
sys.stdout.write("x"); sys.stdout.flush(); sys.stdin.read(1)
try: os.pread(fd, 10, 0); sys.stdout.write("read")
except OSError: sys.stdout.write("failed")
"""


class Process:
    """Running `testbed.mounts.flat_server`."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "testbed.mounts.flat_server", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", self.process.communicate(timeout=_DEADLINE_S)

    def worker(self, *, other_than: int = 0) -> int:
        """Return the id of the process that serves under this supervisor."""
        pid, found = self.process.pid, [0]

        def find() -> bool:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found[0] = int(children[0]) if children else 0
            return found[0] not in (0, other_than)

        wait_for(find, "a worker", interval_s=0.01)
        return found[0]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=_DEADLINE_S)
        return self.process.returncode, out, err


@contextlib.contextmanager
def _process(mountpoint: Path, *arguments: str | Path) -> Iterator[Process]:
    with _started(mountpoint, *arguments) as process:
        process.await_ready()
        yield process


@contextlib.contextmanager
def _started(mountpoint: Path, *arguments: str | Path) -> Iterator[Process]:
    process = Process(*arguments)
    try:
        yield process
    except BaseException:
        # pytest shows the server's log with a failure.
        fuse_mount.clear_mount(mountpoint)
        process.process.kill()
        sys.stderr.write(process.end()[2])
        raise
    finally:
        fuse_mount.clear_mount(mountpoint)
        process.process.kill()
        process.process.wait(_DEADLINE_S)
        for pipe in (process.process.stdout, process.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "small").write_bytes(b"small")
    (path / "crash").write_bytes(b"crash")
    return path


def _write_large(source: Path) -> str:
    digest = hashlib.sha256()
    block = os.urandom(1 << 20)
    with (source / "large").open("wb") as file:
        for number in range(_FILE_BYTES >> 20):
            changed = number.to_bytes(8, "little") + block[8:]
            file.write(changed)
            digest.update(changed)
    return digest.hexdigest()


def _hold(path: Path) -> "subprocess.Popen[str]":
    """Start `_HOLD`, and return once it has opened the file."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.read(1) == "x"
    return holder


def _cat(path: Path) -> str:
    return fuse_mount.run(["cat", path]).stdout


@pytest.mark.parametrize("how", ["serve", "supervise"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts_and_exits_0(
    source: Path, mountpoint: Path, how: str, number: signal.Signals
) -> None:
    with _process(mountpoint, how, source, mountpoint, "cached") as server:
        assert _cat(mountpoint / "small") == "small"
        server.process.send_signal(number)
        code, out, err = server.end()
        assert (code, out) == (0, "ended\n"), err
        assert mount_table.find_mount(mountpoint) is None


@pytest.mark.parametrize("how", ["serve", "supervise"])
def test_unmounting_from_outside_ends_the_server(source: Path, mountpoint: Path, how: str) -> None:
    with _process(mountpoint, how, source, mountpoint, "cached") as server:
        unmount(mountpoint)
        code, out, err = server.end()
        assert (code, out) == (0, "ended\n"), err


@pytest.mark.parametrize("how", ["serve", "supervise"])
def test_a_signal_waits_for_open_files_only_so_long(
    source: Path, mountpoint: Path, how: str
) -> None:
    with _process(mountpoint, how, source, mountpoint, "direct_io", "0.3") as server:
        holder = _hold(mountpoint / "small")
        server.process.terminate()
        code, out, err = server.end()
        assert (code, out) == (0, "ended\n"), err
        assert holder.communicate("x", timeout=_DEADLINE_S)[0] == "failed"


def test_a_signal_waits_for_open_files_as_soon_as_requests_are_answered(
    source: Path, mountpoint: Path
) -> None:
    """Regression: until the worker had said that it serves, a signal killed it."""
    (source / "wait-once").touch()
    with _started(mountpoint, "supervise", source, mountpoint, "direct_io", "60") as server:
        wait_for(lambda: mount_table.find_mount(mountpoint) is not None, "the mount")
        holder = _hold(mountpoint / "small")
        server.process.terminate()
        wait_for(lambda: mount_table.find_mount(mountpoint) is None, "the end of the mount")
        assert holder.communicate("x", timeout=_DEADLINE_S)[0] == "read"
        code, out, err = server.end()
        assert (code, out) == (0, "ready\nended\n"), err


def test_a_signal_waits_for_open_files_though_workers_die(source: Path, mountpoint: Path) -> None:
    """Regression: a signal before the start of the next worker aborted the mount."""
    _require_resend()
    with _process(mountpoint, "supervise", source, mountpoint, "direct_io", "60") as server:
        holder = _hold(mountpoint / "small")
        first = server.worker()
        os.kill(first, signal.SIGKILL)
        # There is a pause before a second restart, and the signal is there when it begins.
        second = server.worker(other_than=first)
        server.process.send_signal(signal.SIGSTOP)
        pidfd = os.pidfd_open(second)
        os.kill(second, signal.SIGKILL)
        assert wait_readable([pidfd], _DEADLINE_S)
        os.close(pidfd)
        server.process.terminate()
        server.process.send_signal(signal.SIGCONT)
        wait_for(lambda: mount_table.find_mount(mountpoint) is None, "the end of the mount")
        assert holder.communicate("x", timeout=_DEADLINE_S)[0] == "read"
        code, out, err = server.end()
        assert (code, out) == (0, "ended\n"), err


def test_a_mount_that_fails_exits_with_a_reason(source: Path, tmp_path: Path) -> None:
    process = Process("supervise", source, tmp_path / "missing", "cached")
    code, _, err = process.end()
    assert code == 1
    assert "create it" in err


def test_a_worker_that_cannot_start_leaves_no_mount(tmp_path: Path, mountpoint: Path) -> None:
    process = Process("supervise", tmp_path / "missing", mountpoint, "cached")
    code, _, err = process.end()
    assert code == 1
    assert "failed to start" in err
    assert mount_table.find_mount(mountpoint) is None


def _require_resend() -> None:
    _require_linux(6, 9, "does not repeat requests")


def _require_kernel_deadline() -> None:
    _require_linux(6, 14, "does not give up requests")


def _require_linux(major: int, minor: int, lack: str) -> None:
    # Only the server sees the kernel's offer, so the version decides here.
    if tuple(int(number) for number in os.uname().release.split(".")[:2]) < (major, minor):
        raise MissingError(f"this kernel {lack} (Linux {major}.{minor} does)")


@pytest.mark.parametrize("mode", ["cached", "direct_io", "passthrough"])
def test_kill_9_of_the_worker_goes_unseen(source: Path, mountpoint: Path, mode: str) -> None:
    _require_resend()
    expected = _write_large(source)
    with _process(mountpoint, "supervise", source, mountpoint, mode) as server:
        reader = subprocess.Popen(
            [sys.executable, "-c", _HASH, mountpoint / "large"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdin is not None
        assert reader.stdout is not None
        worker = server.worker()
        part = (_FILE_BYTES >> 20) // _KILLS
        for _ in range(_KILLS):
            reader.stdin.write(f"{part}\n")
            reader.stdin.flush()
            assert reader.stdout.read(1) == "."
            os.kill(worker, signal.SIGKILL)
            worker = server.worker(other_than=worker)
            assert reader.stdout.read(part - 1) == "." * (part - 1)
        assert reader.communicate(timeout=_DEADLINE_S)[0] == expected
        # Opened by the new worker, with the old one's backing id if there is one.
        assert _cat(mountpoint / "small") == "small"
        server.process.terminate()
        code, out, err = server.end()
        assert (code, out) == (0, "ended\n"), err
        assert err.count("restarting") == _KILLS


@pytest.mark.parametrize("mode", ["direct_io", "passthrough"])
def test_no_request_is_lost_when_workers_die_at_any_moment(
    source: Path, mountpoint: Path, mode: str
) -> None:
    """Regression: requests failed with EIO if their worker died during a copy to a missing page.

    Also, opens were counted down twice if the resend came after the new worker's threads had
    started.
    """
    _require_resend()
    for name in "abc":
        (source / name).write_bytes(name.encode() * 100_000)
    code = """
import os, sys
sys.stdout.write("x"); sys.stdout.flush()
count = 0
while not os.path.exists(sys.argv[2]):
    name = "abc"[count % 3]
    with open(f"{sys.argv[1]}/{name}", "rb") as file:
        assert file.read() == name.encode() * 100_000
    count += 1
sys.stdout.write("whole")
"""
    stop = source.parent / "stop"
    with _process(mountpoint, "supervise-always", source, mountpoint, mode) as server:
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", code, mountpoint, stop], stdout=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        worker = server.worker()
        moments = random.Random(_SEED)
        sys.stdout.write(f"BOOTSEER_TEST_SEED={_SEED}\n")
        for _ in range(60):
            # The worker's age is the input.
            pause(moments.uniform(0, 0.021))
            os.kill(worker, signal.SIGKILL)
            worker = server.worker(other_than=worker)
        stop.touch()
        for reader in readers:
            assert reader.communicate(timeout=_DEADLINE_S)[0] == "xwhole"
        server.process.terminate()
        assert server.end()[0] == 0


def test_a_killed_worker_that_waits_for_a_page_that_it_was_to_bring_is_replaced(
    source: Path, mountpoint: Path
) -> None:
    """Such a process does not end before its successor has brought the page."""
    _require_kernel_deadline()
    (source / "stick-once").mkdir()
    with _process(mountpoint, "supervise", source, mountpoint, "cached") as server:
        reader = subprocess.Popen(["cat", mountpoint / "small"], stdout=subprocess.PIPE, text=True)
        worker = server.worker()
        _wait_until_stuck(source, worker)
        os.kill(worker, signal.SIGKILL)
        assert reader.communicate(timeout=_DEADLINE_S)[0] == "small"
        server.process.terminate()
        code, out, err = server.end()
        assert (code, out) == (0, "ended\n"), err
        assert "died (signal 9): restarting" in err


def _wait_until_stuck(source: Path, worker: int) -> None:
    # Before that, the worker may wait for a page of its own program.
    wait_for(lambda: not (source / "stick-once").exists(), "the read that sticks")
    wait_for(lambda: any("folio" in place for place in wait_channels(worker)), "the page")


def test_readers_end_when_all_that_serve_them_are_killed_while_a_page_is_stored(
    source: Path, mountpoint: Path
) -> None:
    """The kernel must give up their requests, since the worker does not end."""
    _require_kernel_deadline()
    (source / "stick-once").mkdir()
    with _process(mountpoint, "supervise", source, mountpoint, "cached", "5", "15") as server:
        command = ["cat", str(mountpoint / "small")]
        reader = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        worker = server.worker()
        _wait_until_stuck(source, worker)
        server.process.kill()
        os.kill(worker, signal.SIGKILL)
        # The read ends with an error, or with the stored bytes.
        reader.wait(_DEADLINE_S)
        wait_for(lambda: not Path(f"/proc/{worker}").exists())


def test_a_server_with_a_bug_ends_its_readers_and_itself(source: Path, mountpoint: Path) -> None:
    (source / "fail-once").touch()
    with _process(mountpoint, "serve", source, mountpoint, "cached") as server:
        assert fuse_mount.run(["cat", mountpoint / "small"]).returncode != 0
        code, out, err = server.end()
        assert (code, out) == (1, "")
        assert "a bug in the server" in err
        assert mount_table.find_mount(mountpoint) is None


def test_a_supervised_server_with_a_bug_is_replaced(source: Path, mountpoint: Path) -> None:
    _require_resend()
    (source / "fail-once").touch()
    with _process(mountpoint, "supervise", source, mountpoint, "cached") as server:
        assert _cat(mountpoint / "small") == "small"
        server.process.terminate()
        code, out, err = server.end()
        assert (code, out) == (0, "ended\n"), err
        assert "a bug in the server" in err
        assert "died (exit code 70): restarting" in err


def test_workers_that_keep_dying_end_in_an_error_and_no_hang(
    source: Path, mountpoint: Path
) -> None:
    with _process(mountpoint, "supervise", source, mountpoint, "direct_io") as server:
        done = fuse_mount.run(["cat", mountpoint / "crash"])
        assert done.returncode != 0
        code, _, err = server.end()
        assert code == 1
        assert "keep dying" in err
        assert mount_table.find_mount(mountpoint) is None


def test_the_worker_serves_on_when_the_supervisor_is_killed(source: Path, mountpoint: Path) -> None:
    with _process(mountpoint, "supervise", source, mountpoint, "cached") as server:
        worker = server.worker()
        server.process.kill()
        server.process.wait(_DEADLINE_S)
        assert _cat(mountpoint / "small") == "small"
        pidfd = os.pidfd_open(worker)
        try:
            unmount(mountpoint)
            assert wait_readable([pidfd], _DEADLINE_S), "the worker does not end"
        finally:
            os.close(pidfd)


def test_restarts_slow_down_and_end() -> None:
    policy = RestartPolicy(limit=3, window_s=10.0)
    assert policy.pause_s(0.0) == 0.0
    second, third = policy.pause_s(1.0), policy.pause_s(2.0)
    assert second is not None
    assert third is not None
    assert 0 < second < third
    assert policy.pause_s(3.0) is None
    assert policy.pause_s(30.0) == 0.0


def test_a_stopped_worker_is_told_to_continue(source: Path, mountpoint: Path) -> None:
    with _process(mountpoint, "supervise", source, mountpoint, "direct_io") as server:
        worker = server.worker()
        os.kill(worker, signal.SIGSTOP)
        assert _cat(mountpoint / "small") == "small"
        assert server.worker() == worker


def test_a_worker_that_stops_as_soon_as_it_serves_is_told_to_continue(
    source: Path, mountpoint: Path
) -> None:
    """Regression: until the first answer, a worker had a minute, as one that starts."""
    (source / "stop-once").touch()
    with _process(mountpoint, "supervise", source, mountpoint, "direct_io") as server:
        worker = server.worker()
        done = fuse_mount.run(["cat", mountpoint / "small"], deadline_s=_DEADLINE_S / 2)
        assert done.stdout == "small"
        assert server.worker() == worker


def test_a_frozen_worker_is_replaced(source: Path, mountpoint: Path) -> None:
    _require_resend()
    if not freezers():
        raise MissingError("this machine lets nobody freeze a cgroup")
    options = ("5", "600", "3")  # the last one: silent for so many seconds, it is replaced
    with _process(mountpoint, "supervise", source, mountpoint, "direct_io", *options) as server:
        for freezer in freezers():
            worker = server.worker()
            with frozen(worker, freezer=freezer):
                assert _cat(mountpoint / "small") == "small"
            assert server.worker(other_than=worker) != worker


def test_a_stopped_worker_ends_with_its_mount(source: Path, mountpoint: Path) -> None:
    # The worker is killed after the sum of the first and the last of these times.
    options = ("1", "600", "6", "1")
    with _process(mountpoint, "supervise", source, mountpoint, "cached", *options) as server:
        os.kill(server.worker(), signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        code, out, err = server.end()
        assert (code, out) == (0, "ended\n"), err
