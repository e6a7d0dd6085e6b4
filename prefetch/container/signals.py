"""Waiting for a child while passing on to it the signals that we get. Main thread only."""

import contextlib
import os
import signal

FORWARDED = frozenset(
    (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
        signal.SIGCONT,
    )
)
_WAITED_FOR = FORWARDED | {signal.SIGCHLD}


def block() -> None:
    """Before the fork: no signal may get lost between it and `forward_until_exit`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)


def restore() -> None:
    """In the child, before it becomes another program: signals as a program expects them."""
    for number in (*FORWARDED, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)


def forward_until_exit(child: int) -> int:
    """Wait for `child`, reaping any other; returns its exit code, 128 + the signal it died of."""
    while True:
        info = signal.sigwaitinfo(_WAITED_FOR)
        if info.si_signo == signal.SIGCHLD:
            code = _reap(child)
            if code is not None:
                return code
        # Positive: from the kernel, which tells the terminal's whole foreground group itself.
        elif info.si_code <= 0 or info.si_signo == signal.SIGWINCH:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, info.si_signo)


def _reap(child: int) -> int | None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
