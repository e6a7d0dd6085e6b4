"""Mounted snapshots for tests: waiting for their ends, and checking that none is left."""

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from bootseer.prefetch.publish.publishing import wait_published
from bootseer.served.service import ServiceState, live_mounts
from bootseer.settings.config import Settings
from testbed.waiting import wait_for

WAIT_S = 60.0
_FICLONE = 0x40049409


def can_reflink(directory: Path) -> bool:
    """Return whether files of the file system of `directory` can share their blocks (FICLONE)."""
    with (
        tempfile.TemporaryFile(dir=directory) as one,
        tempfile.TemporaryFile(dir=directory) as other,
    ):
        one.write(b"x" * 4096)
        one.flush()
        try:
            fcntl.ioctl(other, _FICLONE, one.fileno())
        except OSError:
            return False
    return True


def servers(settings: Settings) -> list[ServiceState]:
    """Return the state of the mounts of a node, the oldest first."""
    return [state for _, state in live_mounts(settings.run_dir)]


def wait_gone(settings: Settings) -> None:
    """Wait until the node has no server, publisher or container folder left.

    The mounts of a test run are its own (`pytest_configure`). A process that keeps a copy of them
    in another mount namespace was left by the test.
    """
    try:
        wait_for(lambda: not servers(settings), "the end of all servers", timeout_s=WAIT_S)
    except AssertionError:
        left = {state.reference: _processes_with(state.id) for state in servers(settings)}
        raise AssertionError(
            f"servers do not end, and these processes have copies of their mounts: {left}"
        ) from None
    assert wait_published(settings, WAIT_S)
    scratch = settings.cache_dir / "containers"
    wait_for(lambda: not scratch.exists() or not any(scratch.iterdir()), "the end of its scratch")


def _processes_with(identity: str) -> list[str]:
    """Return the processes of other mount namespaces that have a copy of a mount."""
    found = []
    own = os.readlink("/proc/self/ns/mnt")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = os.readlink(folder / "ns/mnt") == own
            if not is_ours and identity.encode() in (folder / "mountinfo").read_bytes():
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append(f"{folder.name} {words.decode(errors='replace')}")
    return found
