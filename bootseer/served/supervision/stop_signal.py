"""SIGTERM and SIGINT as a descriptor that a server can wait for. Main thread only."""

import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """A descriptor that becomes readable when SIGTERM or SIGINT arrives.

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
        """Return the descriptor to select on."""
        return self._event

    def wake(self) -> None:
        """Make the descriptor readable, as a signal does."""
        if self._event >= 0:
            os.eventfd_write(self._event, 1)
