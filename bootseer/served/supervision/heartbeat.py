"""Whether a worker still runs: its supervisor asks through a pipe, its main thread answers.

Alone decides how long a silence is. The question never goes through the mount, so who asks cannot
hang with it. A worker that waits for a slow store answers; one that is stopped (SIGSTOP), frozen
with its cgroup, or whose interpreter hangs does not. Silence is counted in looks and not by the
clock: while the machine is suspended, or all processes are frozen together, no look is taken.

Two processes, one thread in each: made before the fork, then `answer_until` there and `look` here.
"""

import os
import time

from bootseer.linux.processes import wait_readable

LOOK_S = 2.0
"""Between two looks at a worker: so long may readers wait for one that was killed and is stuck."""
_LOOKS = 8
"""The number of looks in the shortest silence that is acted upon."""
_LATE_S = 1.0
"""A supervisor that looks so much later than meant was not running, and perhaps the worker was not
either."""
_SILENCE_S = (5.0, 15.0)
_DEADLINE_SHARE = 0.25
_ASK, _ANSWER, _END = b"?", b"!", b"."
_READ_BYTES = 64


def silence_for(deadline_s: float) -> float:
    """What a worker may be silent for, so that most of a request's deadline is left to its
    successor; no less than a busy machine may keep it waiting for a processor. Pure."""
    low_s, high_s = _SILENCE_S
    return min(max(_DEADLINE_SHARE * deadline_s, low_s), high_s)


class Heartbeat:
    """The pipes between a supervisor and one worker."""

    def __init__(self, start_s: float, silence_s: float) -> None:
        """`start_s`: what a worker may take until it answers for the first time; `silence_s`: what
        it may take later."""
        self.look_s = min(LOOK_S, silence_s / _LOOKS)
        self._start_s = start_s
        self._silence_s = silence_s
        self._has_begun = self._is_ending = False
        self._silent_looks = 0
        self._looked_s = time.monotonic()
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        self._questions, self._ask_fd = os.pipe2(flags)
        self._answers, self._answer_fd = os.pipe2(flags)

    # ---- the supervisor ---------------------------------------------------------------------

    def keep_asking(self) -> None:
        """Once, in the supervisor, after the fork."""
        for fd in (self._questions, self._answer_fd):
            os.close(fd)
        self._send(self._ask_fd, _ASK)

    def look(self) -> float:
        """The share of what it may take that the worker has been silent for: 1 is too long. To be
        called about every `look_s`. Never waits."""
        now_s = time.monotonic()
        late_s, self._looked_s = now_s - self._looked_s - self.look_s, now_s
        said = self._receive(self._answers)
        self._has_begun = self._has_begun or bool(said)
        # How long it takes to unmount is its own affair.
        self._is_ending = self._is_ending or _END in said
        if said or self._is_ending or late_s > _LATE_S:
            self._silent_looks = 0
        else:
            self._silent_looks += 1
        self._send(self._ask_fd, _ASK)
        allowed_s = self._silence_s if self._has_begun else self._start_s
        return self._silent_looks * self.look_s / allowed_s

    def close(self) -> None:
        """Close the supervisor's ends, when the worker has ended or is left to itself."""
        for fd in (self._ask_fd, self._answers):
            os.close(fd)

    # ---- the worker -------------------------------------------------------------------------

    def answer_until(self, stop: int) -> None:
        """Once, in the worker: answer until the descriptor `stop` is readable, also when there is
        no supervisor any more. This is the life of a mount: the one wait without a deadline."""
        for fd in (self._ask_fd, self._answers):
            os.close(fd)
        self._send(self._answer_fd, _ANSWER)
        watched = [stop, self._questions]
        while stop not in (readable := wait_readable(watched, None)):
            if readable and not self._receive(self._questions):
                watched = [stop]
            self._send(self._answer_fd, _ANSWER)
        self._send(self._answer_fd, _END)

    @staticmethod
    def _send(fd: int, what: bytes) -> None:
        # Full, because nobody reads; or the other side is gone, which others notice.
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
