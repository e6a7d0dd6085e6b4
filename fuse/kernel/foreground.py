"""Serving in the foreground of a process: until unmounted, or until SIGTERM or SIGINT.

Alone handles signals. Main thread only.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import Server
from bootseer.linux.processes import wait_readable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Turns SIGTERM and SIGINT into a descriptor that becomes readable.

    A handler may interrupt code that holds any lock, so it takes none: it writes to an eventfd.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopSignal":
        for number in STOP_SIGNALS:
            # What a shell ignores for its background jobs stays ignored.
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        event, self._event = self._event, -1
        os.close(event)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.wake()

    def fileno(self) -> int:
        """The descriptor to select on."""
        return self._event

    def wake(self) -> None:
        """End `wait`, now or as soon as it is called."""
        if self._event >= 0:
            os.eventfd_write(self._event, 1)

    def wait(self) -> None:
        """Until a signal or `wake`: the one wait without a deadline, for the life of a mount."""
        wait_readable([self._event], None)


def serve(
    operations: Operations,
    mountpoint: Path,
    options: MountOptions,
    *,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Mount and serve in the foreground until unmounted, SIGTERM or SIGINT. Main thread only.

    A signal detaches the mount, waits `shutdown_s` for open files to be closed and aborts the
    rest. `on_ready` is called once the mount works.

    Raises:
        BootseerError: the mount failed, or a server thread did (UnavailableError).
    """
    with StopSignal() as stop:
        server = Server(operations, mountpoint, options, on_end=stop.wake)
        server.mount()
        try:
            if on_ready is not None:
                on_ready()
            stop.wait()
        finally:
            server.unmount()
