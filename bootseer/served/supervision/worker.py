"""Worker processes of a supervisor: restart policy, main function, stop signals and exit codes."""

import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from bootseer.errors import BootseerError
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import Attached, Server
from bootseer.linux.processes import wait_for_exit
from bootseer.served.processes import Report
from bootseer.served.supervision.heartbeat import Heartbeat

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Factory = Callable[[Attached], Operations]
"""Makes the operations of one worker; called in the worker."""

_WORKER_FAILED = 70  # EX_SOFTWARE of sysexits.h
_STUCK_S = 1.0
"""Time for a killed process to end, unless a thread of it waits in the kernel."""


class StopSignal:
    """Descriptor that becomes readable on SIGTERM or SIGINT. Main thread only.

    The handler writes to an eventfd and takes no lock, since it may interrupt code that holds one.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopSignal":
        for number in STOP_SIGNALS:
            # A shell ignores SIGINT for its background jobs: keep that.
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
        """Return the descriptor to wait for."""
        return self._event

    def wake(self) -> None:
        """Make the descriptor readable, as a signal does."""
        if self._event >= 0:
            os.eventfd_write(self._event, 1)


class RestartPolicy:
    """Limit on worker deaths: at most `limit` in `window_s`, with growing pauses."""

    def __init__(self, limit: int = 5, window_s: float = 10.0) -> None:
        self._limit = limit
        self._window_s = window_s
        self._deaths: deque[float] = deque()

    def pause_s(self, now_s: float) -> float | None:
        """Record a death at `now_s`. Return the pause before a restart; None: no restart."""
        while self._deaths and now_s - self._deaths[0] > self._window_s:
            self._deaths.popleft()
        self._deaths.append(now_s)
        count = len(self._deaths)
        if count > self._limit:
            return None
        # A single crash costs nothing; a worker that dies at its start does not spin.
        return 0.0 if count == 1 else min(0.05 * 2.0 ** (count - 2), 1.0)


def run_worker(
    factory: Factory,
    options: MountOptions,
    attached: Attached,
    report: Report | None,
    tell: int,
    resend: bool,
    heartbeat: Heartbeat,
) -> NoReturn:
    """Serve the mount in this forked process, and exit."""
    code = _WORKER_FAILED
    try:
        with StopSignal() as stop:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            operations = _made(factory, attached, report)
            server = Server(operations, attached, options, on_end=stop.wake)
            server.start(resend=resend)
            # After a restart nobody reads the pipe.
            try:
                os.write(tell, b"1")
            except BrokenPipeError:
                pass
            os.close(tell)
            heartbeat.answer_until(stop.fileno())
            if server.failure is None:
                server.unmount()
                code = 0
    except BaseException:
        log.critical("the process that serves %s failed", attached.path, exc_info=True)
    finally:
        logging.shutdown()
        # Not sys.exit: everything above this frame belongs to the supervisor.
        os._exit(code)


def _made(factory: Factory, attached: Attached, report: Report | None) -> Operations:
    try:
        return factory(attached)
    except (BootseerError, OSError) as error:
        if report is not None:
            report.failed(error)
        raise
    finally:
        if report is not None:
            # Close this process's copy: the supervisor reports when a worker serves.
            report.close()


# ---- the end ----


def wait_and_reap(pid: int, timeout_s: float) -> bool:
    """Return whether a process ends within `timeout_s`; reap it if so."""
    if not wait_for_exit(pid, timeout_s):
        return False
    reap(pid)
    return True


def exit_code(worker: int) -> int | None:
    """Return a worker's exit code; None if it was killed and is stuck (see `reap_ended`)."""
    return reap(worker) if wait_for_exit(worker, _STUCK_S) else None


def reap_ended(pids: set[int]) -> None:
    """Remove the processes that have ended from `pids`, and reap them. Never waits."""
    for pid in tuple(pids):
        if os.waitpid(pid, os.WNOHANG)[0]:
            pids.remove(pid)


def reap(pid: int) -> int:
    """Reap a process that has ended. Return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
