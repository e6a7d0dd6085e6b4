"""A child process for one piece of work: its exit code, and what it raises, reach the parent.

Main thread only; forks.
"""

import os
import signal
import sys
from collections.abc import Callable

from bootseer.base.documents import from_line, to_line
from bootseer.base.json_errors import Failure, error_of, failure_of
from bootseer.linux import namespaces
from bootseer.linux.processes import kill_child
from bootseer.prefetch.container import signals

_REPORT_BYTES_MAX = 1 << 16


def run_in_child(work: Callable[[], int]) -> int:
    """Call `work` in a child process; the exit code is what it returns, or that of the program that
    it becomes.

    Signals that this process gets meanwhile are passed on to the child, which dies with it.
    Raises: what `work` raised.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signals.block()
    try:
        pid, report = _start(work)
        code = signals.forward_until_exit(pid)
        _raise_child_error(report)
        return code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def try_in_child(work: Callable[[], object]) -> None:
    """Let `work` become a program in a child process that ends before the program's first
    instruction: whether the kernel would run it is known then, and nothing has happened.

    Raises: what `work` raised.
    """

    def traced() -> int:
        # execve(2): a traced process stops when it has become the program.
        namespaces.be_traced()
        work()
        return 0

    pid, report = _start(traced)
    _, status = os.waitpid(pid, 0)
    if os.WIFSTOPPED(status):
        kill_child(pid)
    _raise_child_error(report)


def _start(work: Callable[[], int]) -> tuple[int, int]:
    """The child's number, and the end of a pipe that says what went wrong in it."""
    parent = os.getpid()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        os.close(read_fd)
        _child(work, parent, write_fd)
    os.close(write_fd)
    return pid, read_fd


def _raise_child_error(read_fd: int) -> None:
    with os.fdopen(read_fd, "rb") as pipe:
        report = pipe.read(_REPORT_BYTES_MAX)
    if report:
        raise error_of(from_line(report, Failure))


def _child(work: Callable[[], int], parent: int, report_fd: int) -> None:
    """Never returns."""
    code = 1
    try:
        namespaces.die_with_parent(parent)
        code = work()
    except BaseException as error:
        os.write(report_fd, to_line(failure_of(error, "the run")).encode("ascii"))
    finally:
        os._exit(code)
