"""Signals before the command runs: they end the start and what it began, as they would the job.

Alone decides what SIGTERM, SIGINT and SIGHUP do to a start. A set-up runs in processes of its own,
which nobody else would tell; and the first process of a container, which has no default for any
signal, would otherwise not even end. Main thread only.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bootseer.linux.processes import ProcessId, stat_fields, wait_readable

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Python ignores these from its start on, and exec would hand that on.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
# After it, what a signal has not ended is killed.
_GRACE_S = 3.0


class StoppedError(BaseException):
    """A signal wants the start to end. No `Exception`, so that nothing takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


class StopSignals:
    """While entered, the first stop signal raises `StoppedError`; later ones change nothing.

    The processes that this one has started in its own session get the same signal, and have ended,
    or are killed, when it is raised.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopSignals":
        for number in STOPS:
            # What `nohup`, or a shell for its background jobs, has set is not ours to change.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._stop)
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._stopped:
            return
        self._stopped = True
        # Before anything is raised: once a parent is gone, its children cannot be found, and who
        # waits for a child (`subprocess.run`) kills it at once.
        _end_descendants(number)
        raise StoppedError(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _end_descendants(number: int) -> None:
    """Sends all descendants the signal, waits, and kills those that are left."""
    told = _told_by_terminal(number)
    processes: list[tuple[int, int]] = []
    for pid in _freeze(os.getpid()):
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            processes.append((pid, process))
            if told is None or os.getpgid(pid) != told:
                signal.pidfd_send_signal(process, number)
            signal.pidfd_send_signal(process, signal.SIGCONT)
    deadline_s = time.monotonic() + _GRACE_S
    for pid, process in processes:
        left_s = max(0.0, deadline_s - time.monotonic())
        # Until it is readable it has not been reaped, so that its number is still its own.
        if not wait_readable([process], left_s):
            _kill_tree(pid)
        os.close(process)


def _told_by_terminal(number: int) -> int | None:
    """The process group that a terminal has given the signal already, by Ctrl-C, as it has us: many
    programs take a second one for impatience."""
    if number != signal.SIGINT:
        return None
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        group = os.tcgetpgrp(terminal)
    except OSError:
        return None
    finally:
        os.close(terminal)
    return group if group == os.getpgrp() else None


def _freeze(pid: int) -> set[int]:
    """Stops and returns the descendants of a process, so that none makes a child unseen."""
    found: set[int] = set()
    while new := set(session_descendants(pid)) - found:
        found |= new
        for one in new:
            with contextlib.suppress(OSError):
                process = ProcessId.of(one)
                # Since it was seen it may have ended, and its id be that of a stranger.
                if int((stat_fields(one) or ["", "0"])[1]) in {pid, *found}:
                    process.kill(signal.SIGSTOP)
    return found


def _kill_tree(pid: int) -> None:
    """SIGKILL for a process and all that it has started, also what it starts meanwhile."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
    for one in (pid, *_freeze(pid)):
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGKILL)


def hand_over() -> None:
    """Just before exec: signals as a program expects them, but for what was ignored already."""
    for number in (*STOPS, *_IGNORED_BY_PYTHON):
        if number in _IGNORED_BY_PYTHON or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def end_by(number: int) -> NoReturn:
    """End as a process does that the signal ends, so that the parent sees why."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    # Still here: the first process of a PID namespace cannot be ended by its own signal.
    raise SystemExit(128 + number)


def session_descendants(pid: int) -> list[int]:
    """The descendants of a process that are in its session; servers have sessions of their own."""
    parents: dict[int, list[int]] = {}
    try:
        session = os.getsid(pid)
    except ProcessLookupError:
        return []
    for child, parent, child_session in _processes():
        if child_session == session:
            parents.setdefault(parent, []).append(child)
    found: list[int] = []
    pending = [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


def _processes() -> Iterator[tuple[int, int, int]]:
    """(process, parent, session) of every process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace")
                # pid (name) state parent group session ...; the name may hold anything.
                fields = text.rpartition(")")[2].split()
                yield int(name), int(fields[1]), int(fields[3])
            except (OSError, ValueError, IndexError):
                continue
