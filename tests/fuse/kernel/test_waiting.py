"""Bounded waiting: interrupts, deadlines, aborts, failing threads, unmounting under load."""

import errno
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.fuse.kernel.dispatch import Dispatcher
from bootseer.fuse.kernel.operations import (
    ROOT_NODE,
    Attributes,
    Buffer,
    Caller,
    NodeEntry,
    Opened,
    Operations,
)
from bootseer.fuse.kernel.unmount import unmount
from bootseer.linux import mount_table
from testbed.mounts import fuse_mount

pytestmark = pytest.mark.needs("fuse")

_DEADLINE_S = 60.0
_READ = """
import errno, os, sys
try:
    sys.stdout.write(str(len(os.read(os.open(sys.argv[1], os.O_RDONLY), 4096))))
except OSError as error:
    sys.stdout.write(errno.errorcode[error.errno])
"""


class Slow(Operations):
    """File system in which every name is a file, with slow and failing reads.

    Reads of "stuck" wait for `release_reads` only, those of "patient" for an interrupt, too;
    "broken" fails in an unexpected way.
    """

    names = (b"fast", b"stuck", b"patient", b"broken", b"panic", b"toolong")

    def __init__(self) -> None:
        self.reading = threading.Semaphore(0)
        self.release_reads = threading.Event()
        self.interrupted = threading.Event()
        self.late = threading.Semaphore(0)

    def _attributes(self, node: int) -> Attributes:
        mode = 0o040755 if node == ROOT_NODE else 0o100644
        return Attributes(node, mode, 4096)

    def lookup(self, caller: Caller, parent: int, name: bytes) -> NodeEntry:
        if name not in self.names:
            return NodeEntry(None)
        return NodeEntry(self._attributes(self.names.index(name) + 2), 100, 100)

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        return self._attributes(node), 100

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        return Opened(direct_io=True)

    def read(self, caller: Caller, node: int, handle: int, offset: int, length: int) -> Buffer:
        name = self.names[node - 2]
        if name == b"broken":
            raise ZeroDivisionError("a bug")
        if name == b"panic":
            # Exception of a panic in a Rust extension.
            raise BaseException("panic")
        if name == b"toolong":
            return bytes(length + 1)
        if name != b"fast":
            self.reading.release()
            self._wait(caller, patient=name == b"patient")
        return bytes(length)

    def _wait(self, caller: Caller, *, patient: bool) -> None:
        for _ in range(int(_DEADLINE_S * 100)):
            if self.release_reads.wait(0.01):
                self.late.release()
                return
            if patient and caller.is_interrupted:
                self.interrupted.set()
                raise InterruptedError(errno.EINTR, "interrupted")
        raise TimeoutError(errno.ETIMEDOUT, "the test forgot to release this read")


@pytest.fixture
def slow() -> Iterator[Slow]:
    operations = Slow()
    yield operations
    operations.release_reads.set()


def _start_reader(path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", _READ, path], stdout=subprocess.PIPE, text=True)


def _said(reader: "subprocess.Popen[str]") -> str:
    return reader.communicate(timeout=_DEADLINE_S)[0]


def _read(path: Path) -> str:
    return fuse_mount.check_python(_READ, path)


def test_a_killed_reader_dies_though_its_read_waits(slow: Slow, mountpoint: Path) -> None:
    with fuse_mount.mounted(slow, mountpoint):
        reader = _start_reader(mountpoint / "patient")
        assert slow.reading.acquire(timeout=_DEADLINE_S)
        reader.kill()
        assert reader.wait(_DEADLINE_S) == -signal.SIGKILL
        assert slow.interrupted.is_set()
        _said(reader)
        assert _read(mountpoint / "fast") == "4096"


def test_interrupts_are_forgotten_with_their_request(slow: Slow, mountpoint: Path) -> None:
    with fuse_mount.mounted(slow, mountpoint) as server:
        readers = [_start_reader(mountpoint / "patient") for _ in range(6)]
        for _ in readers:
            assert slow.reading.acquire(timeout=_DEADLINE_S)
        for reader in readers:
            reader.kill()
        for reader in readers:
            assert reader.wait(_DEADLINE_S) == -signal.SIGKILL
            _said(reader)
        assert _read(mountpoint / "fast") == "4096"
        assert server._session is not None
        assert server._session._interrupts == set()


@pytest.mark.needs("mount", "fuse")
def test_abort_frees_a_stuck_reader(slow: Slow, mountpoint: Path) -> None:
    with fuse_mount.mounted(slow, mountpoint) as server:
        reader = _start_reader(mountpoint / "stuck")
        assert slow.reading.acquire(timeout=_DEADLINE_S)
        assert fuse_mount.abort(mountpoint)
        assert _said(reader) in {"ECONNABORTED", "ENOTCONN"}
        assert server.wait(_DEADLINE_S)
        slow.release_reads.set()
    assert mount_table.find_mount(mountpoint) is None


def test_unmount_by_path_works_while_a_read_is_stuck(slow: Slow, mountpoint: Path) -> None:
    with fuse_mount.mounted(slow, mountpoint):
        reader = _start_reader(mountpoint / "stuck")
        assert slow.reading.acquire(timeout=_DEADLINE_S)
        unmount(mountpoint, timeout_s=0.1)
        assert _said(reader) in {"ECONNABORTED", "ENOTCONN"}
        slow.release_reads.set()


def test_the_watchdog_answers_once_and_drops_the_late_answer(slow: Slow, mountpoint: Path) -> None:
    # A busy machine does not delay a request that is answered at once for so long.
    options = fuse_mount.short_options(request_deadline_s=4.0, threads=1)
    with fuse_mount.mounted(slow, mountpoint, options) as server:
        for _ in range(2):
            assert _read(mountpoint / "stuck") == "ETIMEDOUT"
        # The only thread was stuck twice, and other threads took its place.
        assert _read(mountpoint / "fast") == "4096"
        slow.release_reads.set()
        for _ in range(2):
            assert slow.late.acquire(timeout=_DEADLINE_S)
        assert _read(mountpoint / "fast") == "4096"
        assert server.failure is None


def test_the_connection_is_aborted_when_nobody_is_left_to_answer(
    slow: Slow, mountpoint: Path
) -> None:
    options = fuse_mount.short_options(request_deadline_s=0.5, threads=1)
    with fuse_mount.mounted(slow, mountpoint, options) as server:
        said = [_read(mountpoint / "stuck") for _ in range(8)]
        assert said[0] == "ETIMEDOUT"
        assert server.wait(_DEADLINE_S)
        slow.release_reads.set()
        assert "do not end" in str(server.failure)
        server.failure = None
    assert mount_table.find_mount(mountpoint) is None


@pytest.mark.parametrize("is_aborted", [False, True])
def test_only_an_unmount_says_that_all_files_are_closed(
    slow: Slow, mountpoint: Path, monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    told: list[str] = []
    monkeypatch.setattr(slow, "all_closed", lambda: told.append("all closed"))
    with fuse_mount.mounted(slow, mountpoint) as server:
        assert _read(mountpoint / "fast") == "4096"
        if is_aborted:
            assert server.abort()
        else:
            server.detach()
        assert server.wait(_DEADLINE_S)
    assert told == ([] if is_aborted else ["all closed"])


@pytest.mark.parametrize("name", ["broken", "panic", "toolong"])
def test_a_bug_in_an_operation_is_eio_and_logged_once(
    slow: Slow, mountpoint: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with fuse_mount.mounted(slow, mountpoint):
        for _ in range(3):
            assert _read(mountpoint / name) == "EIO"
        assert _read(mountpoint / "fast") == "4096"
    unexpected = [r for r in caplog.records if "failed unexpectedly" in r.message]
    assert len(unexpected) == 1
    assert unexpected[0].exc_info is not None


def test_a_failing_server_thread_aborts_the_connection(
    slow: Slow,
    mountpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fuse_mount.mounted(slow, mountpoint) as server:
        reader = _start_reader(mountpoint / "stuck")
        assert slow.reading.acquire(timeout=_DEADLINE_S)

        def fail(*arguments: object) -> None:
            raise RuntimeError("a bug in the server")

        monkeypatch.setattr(Dispatcher, "answer", fail)
        code = "import os, sys\ntry: os.stat(sys.argv[1])\nexcept OSError: pass"
        fuse_mount.check_python(code, mountpoint / "other")
        assert _said(reader) in {"ECONNABORTED", "ENOTCONN"}
        assert server.wait(_DEADLINE_S)
        slow.release_reads.set()
        assert "a bug in the server" in str(server.failure)
        server.failure = None
    assert "a FUSE server thread failed" in caplog.text
    assert mount_table.find_mount(mountpoint) is None


def test_unmount_under_load_ends_every_reader(slow: Slow, mountpoint: Path) -> None:
    loop = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
sys.stdout.write("x"); sys.stdout.flush()
try:
    while True: os.pread(fd, 4096, 0)
except OSError: sys.stdout.write("ended")
"""
    # The readers take all processors for that long.
    options = fuse_mount.short_options(shutdown_s=0.5)
    with fuse_mount.mounted(slow, mountpoint, options) as server:
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", loop, mountpoint / "fast"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.read(1) == "x"
        server.unmount()
        for reader in readers:
            assert _said(reader) == "ended"
