"""Stop signals before the command runs: they end the start and every process that it has begun.

This module alone decides what SIGTERM, SIGINT and SIGHUP do to a start. A set-up runs in processes
of its own, to which nobody else passes the signal; and the first process of a container has no
default action for any signal, so without a handler it would ignore them. Main thread only.
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
# Python ignores these signals, and exec passes ignored signals on to the command.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
# Time for a process to end by the signal before it is killed.
_GRACE_S = 3.0


class StartStoppedError(BaseException):
    """A stop signal ended the start. A BaseException, so that no handler takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


class StopSignals:
    """Context in which the first stop signal raises `StartStoppedError`; later signals do nothing.

    Before the exception is raised, the processes that this one has started in its own session get
    the same signal, and have ended or are killed.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopSignals":
        for number in STOPS:
            # `nohup`, and a shell for its background jobs, ignore signals on purpose: keep that.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._stop)
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._stopped:
            return
        self._stopped = True
        # Before the exception is raised: children of a process that has ended cannot be found, and
        # `subprocess.run` kills its child as soon as an exception passes.
        _end_descendants(number)
        raise StartStoppedError(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _end_descendants(number: int) -> None:
    """Send the signal to all descendants, wait for their end, and kill those that still run."""
    signalled_group = _group_signalled_by_terminal(number)
    processes: list[tuple[int, int]] = []
    for pid in _freeze(os.getpid()):
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            processes.append((pid, process))
            if signalled_group is None or os.getpgid(pid) != signalled_group:
                signal.pidfd_send_signal(process, number)
            signal.pidfd_send_signal(process, signal.SIGCONT)
    deadline_s = time.monotonic() + _GRACE_S
    for pid, process in processes:
        left_s = max(0.0, deadline_s - time.monotonic())
        # While the pidfd is not readable the process lives, so that its pid names no other process.
        if not wait_readable([process], left_s):
            _kill_tree(pid)
        os.close(process)


def _group_signalled_by_terminal(number: int) -> int | None:
    """Return the process group to which Ctrl-C in a terminal has sent SIGINT already, or None.

    Such a group must not get it again: many programs abort at once on a second SIGINT.
    """
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
    """Stop all descendants of a process, so that none forks unseen. Return their pids."""
    found: set[int] = set()
    while new := set(session_descendants(pid)) - found:
        found |= new
        for one in new:
            with contextlib.suppress(OSError):
                process = ProcessId.of(one)
                # The process may have ended since, and its pid may belong to a stranger now.
                if int((stat_fields(one) or ["", "0"])[1]) in {pid, *found}:
                    process.kill(signal.SIGSTOP)
    return found


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
    for one in (pid, *_freeze(pid)):
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGKILL)


def hand_over() -> None:
    """Reset signals to their defaults for exec, except those that were ignored already."""
    for number in (*STOPS, *_IGNORED_BY_PYTHON):
        if number in _IGNORED_BY_PYTHON or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def end_by(number: int) -> NoReturn:
    """End this process by the signal, so that its parent sees the signal as the cause."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    # The first process of a PID namespace gets here: its own signal cannot end it.
    raise SystemExit(128 + number)


def session_descendants(pid: int) -> list[int]:
    """Return the descendants of a process in its session. Servers have sessions of their own."""
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
    """Yield (pid, parent pid, session) of every process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace")
                # Format: pid (name) state parent group session ...; the name may contain ")".
                fields = text.rpartition(")")[2].split()
                yield int(name), int(fields[1]), int(fields[3])
            except (OSError, ValueError, IndexError):
                continue
