"""Calls a function for many things in several processes, and hands on the results in order.

A process is a copy of this one that writes what it found into a pipe: it waits where nobody reads,
so what is not wanted yet takes no memory, and it ends where the reader has.
"""

import contextlib
import fcntl
import gc
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Generic, NamedTuple, TypeVar, cast

from bootseer.errors import BootseerError
from bootseer.linux.processes import kill_child, may_fork

T = TypeVar("T")
R = TypeVar("R")

_PIPE_BYTES = 1024 * 1024
_LENGTH_BYTES = 8


class _Answer(NamedTuple, Generic[R]):
    result: R | None
    error: Exception | None = None


def in_order(
    function: Callable[[T], R], things: Sequence[T], process_count: int | None = None
) -> Iterator[R]:
    """`function` of each thing. In so many processes (default: as many as there are processors);
    in this one where that is one, or where it has threads and cannot be copied.

    Raises: what `function` raises; BootseerError where a process was killed.
    """
    count = min(process_count or len(os.sched_getaffinity(0)), len(things))
    if count < 2 or not may_fork():
        yield from map(function, things)
        return
    pids: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end, pids)
        pipes: list[BinaryIO] = []
        for number in range(count):
            ours, theirs = os.pipe2(os.O_CLOEXEC)
            with os.fdopen(theirs, "wb", buffering=0) as sink:
                with contextlib.suppress(OSError):
                    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                pipes.append(stack.enter_context(os.fdopen(ours, "rb")))
                pid = os.fork()
                if pid == 0:
                    # Else it would hold its own pipe open, and those of the others.
                    for pipe in pipes:
                        pipe.close()
                    _answer(function, things[number::count], sink)
                pids.append(pid)
        for number in range(len(things)):
            answer: _Answer[R] = _read(pipes[number % count])
            if answer.error is not None:
                raise answer.error
            yield cast(R, answer.result)


def _answer(function: Callable[[T], R], things: Sequence[T], sink: BinaryIO) -> None:
    code = 1
    try:
        # It makes millions of objects, none in a circle, and is soon over.
        gc.disable()
        for thing in things:
            try:
                answer = _Answer(function(thing))
            except Exception as error:
                answer = _Answer(None, error)
            data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
            for part in (len(data).to_bytes(_LENGTH_BYTES), memoryview(data)):
                while part:
                    part = part[sink.write(part) :]
        code = 0
    finally:
        # All above this frame belongs to the process that was copied.
        os._exit(code)


def _read(pipe: BinaryIO) -> _Answer[R]:
    length = int.from_bytes(pipe.read(_LENGTH_BYTES))
    data = pipe.read(length)
    if not length or len(data) < length:
        raise BootseerError(
            "a process that this one had started was killed, perhaps for want of memory; try again "
            "where there is more"
        )
    found: _Answer[R] = pickle.loads(data)
    return found


def _end(pids: Sequence[int]) -> None:
    for pid in pids:
        kill_child(pid)
