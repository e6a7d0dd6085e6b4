"""Runs a function on hostile bytes in a child process with bounded memory and CPU time."""

import faulthandler
import gc
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

OK, REFUSED, BROKEN = 0, 3, 4
_WALL_S = 200.0


def run_bounded(
    call: Callable[[], object],
    refusals: tuple[type[Exception], ...] = (),
    *,
    memory_bytes: int = 2**28,
    cpu_s: int = 5,
) -> bool:
    """Run `call` in a forked child; return False if it raised one of `refusals`, else True.

    Fail the test if `call` raised another exception, allocated more than `memory_bytes` beyond this
    process's memory, or used more than `cpu_s` of CPU time.
    """
    code = _code_of(call, refusals, memory_bytes, cpu_s)
    assert code in (OK, REFUSED), (
        f"the child was killed by signal {-code}: it used more than {cpu_s} s of CPU time"
        if code < 0
        else "the child raised an exception that is not allowed, or ran out of memory; see stderr"
    )
    return code == OK


def succeeds_bounded(call: Callable[[], object], *, memory_bytes: int, cpu_s: int) -> bool:
    """Return whether `call` returns in a child with the limits of `run_bounded`."""
    return _code_of(call, (), memory_bytes, cpu_s) == OK


def _code_of(
    call: Callable[[], object],
    refusals: tuple[type[Exception], ...],
    memory_bytes: int,
    cpu_s: int,
) -> int:
    pid = os.fork()
    if not pid:
        status = BROKEN
        try:
            # Keep what the parent has dropped: a client that is garbage-collected waits for its
            # threads.
            gc.freeze()
            # A child that waits uses no CPU time, so RLIMIT_CPU does not end it: print its stack,
            # and exit.
            faulthandler.dump_traceback_later(_WALL_S, exit=True)
            _limit(memory_bytes, cpu_s)
            status = _status_of(call, refusals)
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended)


def _limit(memory_bytes: int, cpu_s: int) -> None:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    size = int(fields[0]) * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + cpu_s + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _status_of(call: Callable[[], object], refusals: tuple[type[Exception], ...]) -> int:
    try:
        call()
    except refusals:
        return REFUSED
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        return BROKEN
    return OK
