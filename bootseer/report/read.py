"""Reads all timelines of a start into its graph, in several processes.

A process is a copy of this one that writes what it found into a pipe: it waits where nobody reads,
so what is not wanted yet takes no memory, and it ends where the reader has.
"""

import contextlib
import fcntl
import functools
import gc
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Generic, NamedTuple, TypeVar, cast

from bootseer.errors import BootseerError
from bootseer.linux.processes import kill_child, may_fork
from bootseer.report.graph import StartGraph, tracks_of
from bootseer.report.others.placing import Placement
from bootseer.report.sources import StartFiles

_log = logging.getLogger(__name__)
_NODES_A_PART = 128
# Of 4 million stages the graph takes a gigabyte. No start has many more.
_STAGES_MAX = 12_000_000


def read_graph(
    files: StartFiles, process_count: int | None = None, others: Placement | None = None
) -> StartGraph:
    """The graph of a start, the same for any number of processes; `others` has what other programs
    know of it. Raises: BootseerError."""
    graph = StartGraph()
    parts = files.parts(_NODES_A_PART)
    if not files.are_here:
        process_count = 1
    # Seconds since 1970 as doubles would be off by microseconds.
    first = next((stages for part in parts for stages in part.nodes() if stages), None)
    if first is None:
        return graph
    read = functools.partial(_read_part, first[0].start_ns, others)
    for number, part in enumerate(in_order(read, parts, process_count)):
        graph.merge(part)
        if graph.stage_count > _STAGES_MAX and number + 1 < len(parts):
            _log.warning(
                "warning: only %d of the nodes are reported: the start has more than %d million "
                "stages",
                len(graph.nodes),
                _STAGES_MAX // 1_000_000,
            )
            break
    for stages in others.never_began(graph.nodes, first[0]) if others else ():
        for track in tracks_of(stages, first[0].start_ns):
            graph.add(track)
    return graph


def read_events(files: StartFiles, event: str) -> Iterator[str]:
    """The bodies of the events of this name. Raises: BootseerError."""
    parts = files.parts(_NODES_A_PART)
    for found in in_order(lambda part: part.events(event), parts, None if files.are_here else 1):
        yield from found


def _read_part(origin_ns: int, others: Placement | None, part: StartFiles) -> StartGraph:
    graph = StartGraph()
    for stages in part.nodes():
        graph.add_node([*stages, *others.of(stages)] if others else stages, origin_ns)
    return graph


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
