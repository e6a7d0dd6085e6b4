"""Heartbeat of a worker: its supervisor sends questions through a pipe, its main thread answers.

Only this module decides how long a silence may be. The questions do not go through the mount, so
the supervisor cannot hang with it. A worker that waits for a slow store answers; one that is
stopped (SIGSTOP), frozen with its cgroup, or whose interpreter hangs does not. Silence is counted
in checks, not by the clock: no check runs while the machine is suspended, or while all processes
are frozen.

Two processes, with one thread in each: made before the fork, then `start_answering` and
`answer_until` in the worker, `start_asking` and `check` in the supervisor.
"""

import os
import time

from bootseer.linux.processes import wait_readable

CHECK_S = 2.0
"""Time between two checks of a worker; readers may wait that long for one that was killed."""
_CHECKS_MIN = 8
"""Number of checks in the shortest silence that has consequences."""
_LATE_S = 1.0
"""If a check is later than this, the supervisor was not running, and maybe the worker neither."""
_SILENCE_S = (5.0, 15.0)
_DEADLINE_SHARE = 0.25
_ASK, _ANSWER, _END = b"?", b"!", b"."
_READ_BYTES = 64


def silence_for(deadline_s: float) -> float:
    """Return the allowed silence for a request's deadline. Pure.

    Most of the deadline is left to the worker's successor; a busy machine may keep a worker waiting
    for a processor for less than the minimum.
    """
    low_s, high_s = _SILENCE_S
    return min(max(_DEADLINE_SHARE * deadline_s, low_s), high_s)


class Heartbeat:
    """Pipes between a supervisor and one worker."""

    def __init__(self, start_s: float, silence_s: float) -> None:
        """Allow `start_s` of silence before the first answer, and `silence_s` after it."""
        self.check_s = min(CHECK_S, silence_s / _CHECKS_MIN)
        self._start_s = start_s
        self._silence_s = silence_s
        self._has_begun = self._is_ending = False
        self._silent_checks = 0
        self._checked_s = time.monotonic()
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        self._questions, self._ask_fd = os.pipe2(flags)
        self._answers, self._answer_fd = os.pipe2(flags)

    # ---- the supervisor ---------------------------------------------------------------------

    def start_asking(self) -> None:
        """Send the first question. Call once, in the supervisor, after the fork."""
        for fd in (self._questions, self._answer_fd):
            os.close(fd)
        self._send(self._ask_fd, _ASK)

    def check(self) -> float:
        """Return the silence as a share of the allowed time. Call about every `check_s`."""
        now_s = time.monotonic()
        late_s, self._checked_s = now_s - self._checked_s - self.check_s, now_s
        said = self._receive(self._answers)
        self._has_begun = self._has_begun or bool(said)
        # There is no limit for a worker that is unmounting.
        self._is_ending = self._is_ending or _END in said
        if said or self._is_ending or late_s > _LATE_S:
            self._silent_checks = 0
        else:
            self._silent_checks += 1
        self._send(self._ask_fd, _ASK)
        allowed_s = self._silence_s if self._has_begun else self._start_s
        return self._silent_checks * self.check_s / allowed_s

    def close(self) -> None:
        """Close the supervisor's ends, when the worker has ended or is abandoned."""
        for fd in (self._ask_fd, self._answers):
            os.close(fd)

    # ---- the worker -------------------------------------------------------------------------

    def start_answering(self) -> None:
        """Send the first answer, which ends the time for a start. Call once, in the worker.

        Before anybody hears that the worker serves: a worker that is stopped after that, and has
        not answered yet, would be waited for as one that starts.
        """
        for fd in (self._ask_fd, self._answers):
            os.close(fd)
        self._send(self._answer_fd, _ANSWER)

    def answer_until(self, stop: int) -> None:
        """Answer questions until the descriptor `stop` is readable. Call once, in the worker.

        The life of a mount, and the one wait without a deadline. Goes on without a supervisor, too.
        """
        watched = [stop, self._questions]
        while stop not in (readable := wait_readable(watched, None)):
            if readable and not self._receive(self._questions):
                watched = [stop]
            self._send(self._answer_fd, _ANSWER)
        self._send(self._answer_fd, _END)

    @staticmethod
    def _send(fd: int, what: bytes) -> None:
        # The pipe may be full, or closed; other code notices the end of the other process.
        try:
            os.write(fd, what)
        except (BlockingIOError, BrokenPipeError):
            pass

    @staticmethod
    def _receive(fd: int) -> bytes:
        try:
            return os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return b""
