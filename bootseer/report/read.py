"""Reading of a start's timelines into a `StartGraph`, in several forked processes.

Each worker writes its results to a pipe and blocks while the pipe is full, so unread results take
no memory; it is killed when the reader stops.
"""

import contextlib
import fcntl
import functools
import gc
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Generic, NamedTuple, TypeVar, cast

from bootseer.errors import BootseerError
from bootseer.linux.processes import kill_child, may_fork
from bootseer.linux.scripts import python_environment
from bootseer.report.decoding import ImportRow, decode, decode_imports, longest_imports
from bootseer.report.graph import StartGraph, tracks_of
from bootseer.report.others.placing import ForeignStages
from bootseer.report.sources import StartFiles

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)
_NODES_A_PART = 128
# A graph of 4 million stages takes a gigabyte. No start has many more.
_STAGES_MAX = 12_000_000


class ReadStart(NamedTuple):
    """Graph of a start, and the slow imports of one process."""

    graph: StartGraph
    imports: Sequence[ImportRow]
    """Imports of the process that spent most time in them; empty if they were not asked for."""


def read_graph(files: StartFiles, process_count: int | None = None) -> StartGraph:
    """Read a start into a graph.

    Args:
        files: The start's timelines.
        process_count: Processes to use; the graph does not depend on it. Default: one per
            processor.

    Raises: BootseerError.
    """
    return read_start_of(files, process_count).graph


def read_start_of(
    files: StartFiles,
    process_count: int | None = None,
    others: ForeignStages | None = None,
    *,
    has_imports: bool = False,
) -> ReadStart:
    """Read a start as `read_graph` does; with `has_imports`, also its slow imports.

    `others`: stages that other programs noted, which are added to the nodes that they belong to.
    """
    graph = StartGraph()
    imports: Sequence[ImportRow] = []
    parts = files.parts(_NODES_A_PART)
    # Seconds since 1970 as doubles would be off by microseconds.
    first = next((stages for part in parts for stages in part.nodes() if stages), None)
    if first is None:
        return ReadStart(graph, imports)
    read = functools.partial(_read_part, first[0].start_ns, others, has_imports)
    for number, part in enumerate(_of_parts(read, files, parts, process_count)):
        graph.merge(part.graph)
        imports = longest_imports([imports, part.imports])
        if graph.stage_count > _STAGES_MAX and number + 1 < len(parts):
            _log.warning(
                "warning: only %d of the nodes are reported: the start has more than %d million "
                "stages",
                len(graph.nodes),
                _STAGES_MAX // 1_000_000,
            )
            break
    for stages in others.pending_pods(graph.nodes, first[0]) if others else ():
        for track in tracks_of(stages, first[0].start_ns):
            graph.add(track)
    return ReadStart(graph, imports)


def _read_part(
    origin_ns: int, others: ForeignStages | None, has_imports: bool, part: StartFiles
) -> ReadStart:
    graph = StartGraph()
    imports: Sequence[ImportRow] = []
    for timelines in part.timelines():
        stages = [stage for data in timelines for stage in decode(data, has_clock=False)]
        graph.add_node([*stages, *others.for_node(stages)] if others else stages, origin_ns)
        if has_imports:
            imports = longest_imports([imports, *map(decode_imports, timelines)])
    return ReadStart(graph, imports)


_PIPE_BYTES = 1024 * 1024
_LENGTH_BYTES = 8


def _of_parts(
    function: Callable[[StartFiles], R],
    files: StartFiles,
    parts: Sequence[StartFiles],
    process_count: int | None = None,
) -> Iterator[R]:
    """Yield `function(part)` for each part; a pickled function, if files are in a store."""
    count = min(process_count or len(os.sched_getaffinity(0)), len(parts))
    if files.are_local or count < 2:
        yield from in_order(function, parts, count)
        return
    # A store's client may have threads, with which this process cannot be forked: new processes get
    # what this one fetches, one part at a time.
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_new_worker()) for _ in range(count)]
        for worker, part in zip(workers, parts, strict=False):
            _send(worker, function, part.fetched())
        for number in range(len(parts)):
            worker = workers[number % count]
            ahead = [part.fetched() for part in parts[number + count : number + count + 1]]
            answer: _WorkerResult[R] = _next_result(cast(BinaryIO, worker.stdout))
            for part in ahead:
                _send(worker, function, part)
            yield _result_of(answer)


@contextlib.contextmanager
def _new_worker() -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=python_environment(), stdin=pipe, stdout=pipe) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def _send(worker: "subprocess.Popen[bytes]", function: Callable[[T], R], thing: T) -> None:
    try:
        _write(cast(BinaryIO, worker.stdin), (function, thing))
    except BrokenPipeError as error:
        raise BootseerError(_KILLED) from error


def serve() -> None:
    """Answer the calls that the parent process sends to standard input, until it is closed."""
    gc.disable()
    while length := int.from_bytes(sys.stdin.buffer.read(_LENGTH_BYTES)):
        function, thing = pickle.loads(sys.stdin.buffer.read(length))
        _write(sys.stdout.buffer, _call(function, thing))


_KILLED = (
    "a process that reads timelines was killed, perhaps for lack of memory; try again on a machine "
    "with more"
)


class _WorkerResult(NamedTuple, Generic[R]):
    result: R | None
    error: Exception | None = None


def in_order(
    function: Callable[[T], R], things: Sequence[T], process_count: int | None = None
) -> Iterator[R]:
    """Yield `function(thing)` for each thing, computed in forked processes.

    `process_count` defaults to the number of processors. With one, or if this process has threads
    and cannot be forked, the calls are made here.

    Raises: any exception of `function`; BootseerError if a process was killed.
    """
    count = min(process_count or len(os.sched_getaffinity(0)), len(things))
    if count < 2 or not may_fork():
        yield from map(function, things)
        return
    with contextlib.ExitStack() as stack:
        pipes: list[BinaryIO] = []
        for number in range(count):
            worker = _forked(function, things[number::count], pipes)
            pipes.append(stack.enter_context(worker))
        for number in range(len(things)):
            answer: _WorkerResult[R] = _next_result(pipes[number % count])
            yield _result_of(answer)


@contextlib.contextmanager
def in_background(function: Callable[[], R]) -> Iterator[Callable[[], R]]:
    """Call `function` in a forked process; the value is a function that waits for its result.

    The call is made here, at once, with one processor or if this process has threads.
    """
    if len(os.sched_getaffinity(0)) < 2 or not may_fork():
        result = function()
        yield lambda: result
        return
    with _forked(lambda _: function(), [None]) as pipe:
        yield lambda: _result_of(_next_result(pipe))


@contextlib.contextmanager
def _forked(
    function: Callable[[T], R], things: Sequence[T], others: Sequence[BinaryIO] = ()
) -> Iterator[BinaryIO]:
    """Compute `function(thing)` for each thing in a forked process; yield the pipe of the results.

    `others`: pipes of the workers before. The process is killed at the end.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(ours, "rb") as pipe:
        with os.fdopen(theirs, "wb", buffering=0) as sink:
            with contextlib.suppress(OSError):
                fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            pid = os.fork()
            if pid == 0:
                # An inherited read end would keep the pipe open after the reader's death.
                for one in (*others, pipe):
                    one.close()
                _work(function, things, sink)
        try:
            yield pipe
        finally:
            kill_child(pid)


def _work(function: Callable[[T], R], things: Sequence[T], sink: BinaryIO) -> None:
    code = 1
    try:
        # The worker makes millions of objects, none in a cycle, and ends soon.
        gc.disable()
        for thing in things:
            _write(sink, _call(function, thing))
        code = 0
    finally:
        # The frames above belong to the parent and must not run here.
        os._exit(code)


def _call(function: Callable[[T], R], thing: T) -> _WorkerResult[R]:
    try:
        return _WorkerResult(function(thing))
    except Exception as error:
        return _WorkerResult(None, error)


def _result_of(answer: _WorkerResult[R]) -> R:
    if answer.error is not None:
        raise answer.error
    return cast(R, answer.result)


def _write(sink: BinaryIO, value: object) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    for part in (len(data).to_bytes(_LENGTH_BYTES), memoryview(data)):
        while part:
            part = part[sink.write(part) :]
    sink.flush()


def _next_result(pipe: BinaryIO) -> _WorkerResult[R]:
    length = int.from_bytes(pipe.read(_LENGTH_BYTES))
    data = pipe.read(length)
    if not length or len(data) < length:
        raise BootseerError(_KILLED)
    found: _WorkerResult[R] = pickle.loads(data)
    return found
