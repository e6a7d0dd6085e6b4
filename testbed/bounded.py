"""Runs what reads hostile bytes in a child process of bounded memory and CPU time."""

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
    """Call it in a forked child; True if it returned, False if it raised one of `refusals`.

    Fails the test where it raised anything else, or took more than `memory_bytes` beyond what this
    process has, or more than `cpu_s` of CPU time.
    """
    code = _code_of(call, refusals, memory_bytes, cpu_s)
    assert code in (OK, REFUSED), (
        f"it was ended by signal {-code}: it took more than {cpu_s} s of CPU time"
        if code < 0
        else "it failed with something else than it may, or for want of memory; see stderr"
    )
    return code == OK


def ended_well(call: Callable[[], object], *, memory_bytes: int, cpu_s: int) -> bool:
    """Call it as `run_bounded` does; False where that would fail the test."""
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
            # What the parent has dropped stays: a client that is collected waits for its threads.
            gc.freeze()
            # A child that waits takes no CPU time: let it show for what, and end.
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
