"""`sweep`: removes all mounts of a test, also those of dead or hanging servers."""

import contextlib
import os
import signal
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.linux import mount_table
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.served.overlays import overlays, unmount_overlay
from bootseer.served.service import live_mounts
from bootseer.settings.config import Settings
from testbed.mounts.fuse_mount import clear_mount

_PUBLISHED_S = 60.0


def sweep(top: Path, *nodes: Settings) -> None:
    """Unmount all overlays and FUSE mounts below the folder `top`; end these nodes' servers.

    Publishers are waited for, as they may still write to the store. Servers get SIGTERM.
    """
    for node in nodes:
        wait_published(node, _PUBLISHED_S)
    for cover in reversed(overlays()):
        if cover.path.is_relative_to(top):
            with contextlib.suppress(BootseerError):
                unmount_overlay(cover)
    for mount in reversed(mount_table.fuse_mounts()):
        if mount.path.is_relative_to(top):
            clear_mount(mount.path)
    for node in nodes:
        for _, state in live_mounts(node.run_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGTERM)
