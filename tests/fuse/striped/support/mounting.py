"""Mounts of a checkpoint tree with a server process of their own."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.fuse.striped.mounted.mount import (
    MountedCheckpoints,
    mount_checkpoints,
    mount_spec,
)
from bootseer.linux.processes import start_time
from bootseer.served.service import read_state
from bootseer.settings.config import Settings, load_config
from testbed.mounts.fuse_mount import clear_mount, run

MIB = 2**20
BIG = 40 * MIB + 12_345


def settings_in(folder: Path) -> Settings:
    environ = {
        "HOME": str(folder),
        "BOOTSEER_RUN_DIR": str(folder / "run"),
        "BOOTSEER_MEMORY": "128MiB",
        "BOOTSEER_DEADLINE": "20",
    }
    return load_config(environ=environ).settings


@contextlib.contextmanager
def checkpoints(
    folder: Path, mountpoint: Path, url: str, **options: object
) -> Iterator[MountedCheckpoints]:
    """Mount a tree; it is unmounted, and its server ended, at the end of the block in any case."""
    made = mount_checkpoints(mount_spec(settings_in(folder), url, mountpoint, **options))
    try:
        yield made
    finally:
        state = read_state(made.state_dir)
        with contextlib.suppress(BootseerError):
            made.close(2.0)
        clear_mount(mountpoint)
        if state is not None and start_time(state.pid) == state.pid_started:
            os.kill(state.pid, signal.SIGKILL)


def shell(command: str, **paths: Path) -> str:
    """Run a shell command that must succeed, and return its output."""
    text = command.format(**{name: shlex.quote(str(path)) for name, path in paths.items()})
    done = run(["bash", "-euo", "pipefail", "-c", text])
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(60)
    if process.stdout is not None:
        process.stdout.close()
