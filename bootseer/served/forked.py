"""A process that goes on from this one's memory as if it had been started as `python -m MODULE`.

An interpreter of its own would load once more what this one has: half of what a server takes until
it can serve. Alone owns what such a process must let go of. Only for a program of ours at its
beginning, before it has threads: a library must not copy the process that uses it.
"""

import contextlib
import importlib
import logging
import math
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

from bootseer.base.patience import PATIENCE
from bootseer.linux.processes import close_descriptors, stat_fields, wait_ended

_FAILED = 70  # EX_SOFTWARE of sysexits.h
# Of /proc/self/stat, behind the name: arg_start and arg_end of proc_pid_stat(5).
_ARGUMENTS = slice(45, 47)


class Forked:
    """What `subprocess.Popen` is to a process that was executed: as much of it as is needed."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = stdin
        self.returncode: int | None = None

    def kill(self) -> None:
        """Nothing where it was waited for already."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not wait_ended(self.pid, timeout):
                raise subprocess.TimeoutExpired([], timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def may_fork() -> bool:
    """Tell whether no other thread can hold a lock that the copy would wait for."""
    return len(os.listdir("/proc/self/task")) == 1


def fork_into(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], sink: int, kept: int
) -> Forked:
    """Let a copy of this process call `main` of `module` in a session of its own.

    It has `sink` for its output, a pipe as its input, `kept`, and no other descriptor of ours.
    Raises: OSError.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(theirs)
        os.close(ours)
        raise
    if pid == 0:
        _become(module, arguments, environment, (theirs, sink, sink), kept)
    os.close(theirs)
    return Forked(pid, os.fdopen(ours, "wb"))


def _become(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    standard: Sequence[int],
    kept: int,
) -> NoReturn:
    code = _FAILED
    try:
        os.setsid()
        os.chdir("/")
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
        close_descriptors(kept)
        _forget_handlers()
        os.environ.clear()
        os.environ.update(environment)
        PATIENCE.limit(math.inf)
        command = ["python", "-m", module, *arguments]
        try:
            _show_as(command)
        except OSError:
            # A tool that ends processes by their command line would take it for ours.
            os.set_inheritable(kept, True)
            os.execve(sys.executable, command, environment)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, closefd=False)  # noqa: SIM115
            for number, mode in enumerate(("r", "w", "w"))
        )
        sys.argv[:] = [module, *arguments]
        code = importlib.import_module(module).main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else _FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: everything above this frame belongs to the process that was copied.
        os._exit(code)


def _forget_handlers() -> None:
    """Set the handlers of signals and of logs to those of a new interpreter."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)


def _show_as(command: Sequence[str]) -> None:
    """Have `ps` show this command. Raises: OSError where the kernel does not let us."""
    fields = stat_fields("self")
    start, end = (int(field) for field in fields[_ARGUMENTS])
    if start == 0:
        raise PermissionError
    words = "\0".join(command).encode()[: end - start - 1]
    memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(memory, words.ljust(end - start, b"\0"), start)
    finally:
        os.close(memory)
