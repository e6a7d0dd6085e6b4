"""Workers of a supervisor: how often one may die, its life, and how its end is noticed."""

import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from bootseer.errors import BootseerError
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import Attached, Server
from bootseer.linux.processes import wait_ended
from bootseer.served.processes import Report
from bootseer.served.supervision.heartbeat import Heartbeat
from bootseer.served.supervision.stop_signal import STOP_SIGNALS, StopSignal

log = logging.getLogger(__name__)

Factory = Callable[[Attached], Operations]
"""Makes the operations of one worker, in it."""

_WORKER_FAILED = 70  # EX_SOFTWARE of sysexits.h
_STUCK_S = 1.0
"""The time in which the threads of a killed process end that do not wait for the kernel."""


class RestartPolicy:
    """How often a worker may die: at most `limit` times in `window_s`, with growing pauses."""

    def __init__(self, limit: int = 5, window_s: float = 10.0) -> None:
        self._limit = limit
        self._window_s = window_s
        self._deaths: deque[float] = deque()

    def pause_s(self, now_s: float) -> float | None:
        """Note a death at `now_s`; how long to wait before the next worker, None: give up."""
        while self._deaths and now_s - self._deaths[0] > self._window_s:
            self._deaths.popleft()
        self._deaths.append(now_s)
        count = len(self._deaths)
        if count > self._limit:
            return None
        # A single crash costs nothing; a worker that dies at its start does not spin.
        return 0.0 if count == 1 else min(0.05 * 2.0 ** (count - 2), 1.0)


def work(
    factory: Factory,
    options: MountOptions,
    attached: Attached,
    report: Report | None,
    tell: int,
    resend: bool,
    heartbeat: Heartbeat,
) -> NoReturn:
    """The worker's life, from the fork to its exit."""
    code = _WORKER_FAILED
    try:
        with StopSignal() as stop:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            operations = _made(factory, attached, report)
            server = Server(operations, attached, options, on_end=stop.wake)
            server.start(resend=resend)
            # After a restart no process listens.
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
            # Ours is a copy: the supervisor reports when a worker serves.
            report.close()


# ---- the end ----


def ends_within(pid: int, timeout_s: float) -> bool:
    """Whether it ended in time; then it is reaped."""
    if not wait_ended(pid, timeout_s):
        return False
    reap(pid)
    return True


def code_of(worker: int) -> int | None:
    """How a worker ended; None for one that was killed and is stuck, or frozen with its cgroup. It
    ends later: see `reap_ended`."""
    return reap(worker) if wait_ended(worker, _STUCK_S) else None


def reap_ended(pids: set[int]) -> None:
    """Take those out that have ended meanwhile. Never waits."""
    for pid in tuple(pids):
        if os.waitpid(pid, os.WNOHANG)[0]:
            pids.remove(pid)


def reap(pid: int) -> int:
    """The exit code of a process that has ended, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def died_of(code: int) -> str:
    """The exit code in words."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
