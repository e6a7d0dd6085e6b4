"""Helpers for tests that mount FUSE: everything has a deadline, and nothing stays mounted.

A process that waits for a FUSE reply cannot be killed, so file operations under test run in child
processes. At the end of a test its mount is aborted and detached in any case.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import FuseServer
from bootseer.fuse.kernel.unmount import abort_connection, detach
from bootseer.linux import mount_table
from testbed.mounts.serving import start_server, stop_server
from testbed.needs import require
from testbed.paths import REPOSITORY

SUBTYPE = "bootseer-test"
COMMAND_DEADLINE_S = 120.0
_REAP_S = 5.0

# Killed processes that still wait for a hanging mount; they end when it is aborted. Without a
# reference here, their collection would warn of a running child in a later test.
_left_behind: list["subprocess.Popen[str]"] = []


def abort(path: Path) -> bool:
    """Abort the connection of the FUSE mount on `path`; return False if there is no mount."""
    mount = mount_table.find_mount(path)
    return mount is not None and abort_connection(mount.device_minor, mount.path)


def clear_mount(path: Path) -> None:
    """Abort and detach all FUSE mounts on `path`, and wait for killed processes that used them."""
    while (mount := mount_table.find_mount(path)) is not None:
        abort_connection(mount.device_minor, mount.path)
        try:
            detach(mount.path, lazy=True)
        except BootseerError:
            break
    for process in list(_left_behind):
        # The process may wait for another mount.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
            _left_behind.remove(process)


def run(
    command: Sequence[str | Path], *, deadline_s: float = COMMAND_DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run a command that may touch a mount, for at most `deadline_s`.

    A command that cannot be killed at the deadline is left behind until its mount is aborted.
    Raises: subprocess.TimeoutExpired.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "LC_ALL": "C"},
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        _left_behind.append(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_python(
    code: str, *arguments: str | Path, deadline_s: float = COMMAND_DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child process; its arguments are in sys.argv[1:]."""
    return run([sys.executable, "-c", code, *arguments], deadline_s=deadline_s)


def check_python(code: str, *arguments: str | Path, deadline_s: float = COMMAND_DEADLINE_S) -> str:
    """Run Python code that must succeed in a child process; return its stdout."""
    done = run_python(code, *arguments, deadline_s=deadline_s)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def short_options(**changes: object) -> MountOptions:
    """Return options for a test mount: the subtype of tests, and short deadlines."""
    chosen: dict[str, object] = {"subtype": SUBTYPE, "shutdown_s": 5.0, **changes}
    return MountOptions(**chosen)  # type: ignore[arg-type]


@contextlib.contextmanager
def mounted(
    operations: Operations, mountpoint: Path, options: MountOptions | None = None
) -> Iterator[FuseServer]:
    """Serve `operations` on `mountpoint` (created if missing) from threads of this process.

    The mount is always gone at the end of the block. Touch it from child processes only.
    """
    require("fuse")
    mountpoint.mkdir(parents=True, exist_ok=True)
    try:
        server = start_server(operations, mountpoint, options or short_options())
        yield server
        stop_server(server)
    finally:
        clear_mount(mountpoint)
