"""Serves a file system in this process, without the product's supervision.

A failed server thread aborts the connection, since no process replaces this one.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from bootseer.errors import BootseerError, UnavailableError
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import FuseServer, attach
from bootseer.linux.processes import wait_readable
from bootseer.served.supervision.supervisor import StopSignal


def start_server(
    operations: Operations,
    mountpoint: Path,
    options: MountOptions,
    on_end: Callable[[], None] | None = None,
) -> FuseServer:
    """Mount, and serve from threads of this process. Raises: BootseerError."""
    attached = attach(mountpoint, options)

    def end() -> None:
        if server.failure is not None:
            server.abort()
        if on_end is not None:
            on_end()

    server = FuseServer(operations, attached, options, on_end=end)
    try:
        server.start(resend=False)
    except BaseException:
        with contextlib.suppress(BootseerError):
            server.detach()
        server.abort()
        os.close(attached.device)
        raise
    return server


def stop_server(server: FuseServer) -> None:
    """Unmount and release everything. Raises: UnavailableError if a server thread failed."""
    server.unmount()
    if server.failure is not None:
        raise UnavailableError(f"serving failed: {server.failure!r}") from server.failure


def serve(
    operations: Operations,
    mountpoint: Path,
    options: MountOptions,
    *,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Mount and serve until unmounted, SIGTERM or SIGINT. Main thread only. Raises: BootseerError.

    `on_ready` is called once the mount works.
    """
    with StopSignal() as stop:
        server = start_server(operations, mountpoint, options, stop.wake)
        try:
            if on_ready is not None:
                on_ready()
            wait_readable([stop.fileno()], None)
        finally:
            stop_server(server)
