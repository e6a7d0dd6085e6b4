"""What the tests of mounted snapshots share: waiting for their ends, and seeing that none stays."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.fuse.kernel.mounting import mounts
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.served.covers import covers, uncover
from bootseer.served.folders import MountState, live_mounts
from bootseer.settings.config import Settings

WAIT_S = 60.0


def servers(settings: Settings) -> list[MountState]:
    """Of the mounts of a node, the oldest first."""
    return [state for _, state in live_mounts(settings.run_dir)]


def wait_gone(settings: Settings) -> None:
    """Until nothing of a node is mounted or being published, and nothing of it is left.

    Skips the rest where another program of this machine has copied the mounts into a namespace of
    its own: they live on there.
    """
    end = time.monotonic() + WAIT_S
    while left := servers(settings):
        if time.monotonic() > end:
            if any(_is_elsewhere(state.id) for state in left):
                pytest.skip("another mount namespace on this machine has a copy of the mounts")
            pytest.fail(f"the server of {left[0].reference} does not end")
        time.sleep(0.05)
    assert wait_published(settings, WAIT_S)
    scratch = settings.cache_dir / "containers"
    assert not scratch.exists() or list(scratch.iterdir()) == []


def _is_elsewhere(identity: str) -> bool:
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            if identity.encode() in table.read_bytes():
                return True
    return False


def end_everything(top: Path, *nodes: Settings) -> None:
    """Take off every cover below `top`, and end every server of these nodes."""
    for cover in reversed(covers()):
        if cover.path.is_relative_to(top):
            with contextlib.suppress(BootseerError):
                uncover(cover)
    for mount in mounts.find_mounts("bootseer-image"):
        if mount.path.is_relative_to(top):
            mounts.abort_connection(mount.device_minor, mount.path)
            with contextlib.suppress(BootseerError):
                mounts.detach(mount.path, lazy=True)
    for node in nodes:
        wait_published(node, WAIT_S)
        for state in servers(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGTERM)
