"""Writer of a timeline: appends one line when a stage begins and one when it ends.

A line is one write(2) to a file opened with O_APPEND, so that threads and processes of one rank can
share the file; a line that was cut does not damage others. No function raises, since a timeline
that cannot be written must not cost a training run. Child processes get the file's path by
`BOOTSEER_TIMELINE` and the parent span by `TRACEPARENT`.
"""

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from bootseer.base.redact import redact
from bootseer.linux.private_files import open_private_directory
from bootseer.linux.processes import boot_id
from bootseer.served.ready_socket import send_ready
from bootseer.timeline.kernel_figures import difference, sample
from bootseer.timeline.otlp import (
    MONOTONIC,
    PROCESS,
    READY,
    ROLE,
    Stage,
    Value,
    encode_end,
    encode_event,
    encode_start,
    parse_traceparent,
    trace_id_of,
)

_log = logging.getLogger(__name__)
FILE_VARIABLE = "BOOTSEER_TIMELINE"
PROCESS_VARIABLE = "BOOTSEER_PROCESS"
"""Variable with the id of the recorded Python process, which child processes inherit."""
LAUNCHED_VARIABLE = "BOOTSEER_LAUNCHED"
"""Variable with PID:NANOSECONDS of the launcher at the moment when it becomes the command."""
COLLECTOR_MODULE = "_bootseer_collect"
"""Name in `sys.modules` of `bootseer.profile.collect.imports`, in processes that it records."""
# torchrun restarts failed workers, which then write to the timeline of the first ones.
_RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Span:
    """A stage that has begun; a context manager. Threads may hold different spans at once."""

    def __init__(self, timeline: "Timeline | None", stage: Stage, started_ns: int) -> None:
        """Begin the stage at `started_ns` of the monotonic clock."""
        self._timeline = timeline
        self._stage = stage
        self._attributes: dict[str, Value] = dict(stage.attributes)
        self._started_ns = started_ns
        self.figures = sample() if timeline is not None else {}
        """Kernel counters at the begin; after `end`, those at the end."""
        self._ended = False

    @property
    def traceparent(self) -> str:
        """The W3C header that makes other spans children of this one."""
        return f"00-{self._stage.trace_id}-{self._stage.span_id}-01"

    def set(self, key: str, value: Value) -> None:
        """Set an attribute, for example `bootseer.bytes`. Must not be a secret."""
        self._attributes[key] = value

    def end(self, *, error: BaseException | None = None) -> float:
        """Write the end; return the duration in seconds by the monotonic clock. Idempotent."""
        duration_ns = time.monotonic_ns() - self._started_ns
        if self._timeline is not None and not self._ended:
            before, self.figures = self.figures, sample()
            # By the monotonic clock, since the wall clock may be set during a start.
            finished = self._stage._replace(
                end_ns=self._stage.start_ns + duration_ns,
                failed=error is not None,
                message=redact(f"{type(error).__name__}: {error}") if error is not None else "",
                attributes={**self._attributes, **difference(before, self.figures)},
            )
            self._timeline.append(encode_end(finished))
        self._ended = True
        return duration_ns / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error=error)


class Timeline:
    """The timeline file of one node and rank."""

    def __init__(
        self, path: Path, *, trace_id: str, parent_id: str, resource: Mapping[str, Value]
    ) -> None:
        self.path = path
        self._trace_id = trace_id
        self._parent_id = parent_id
        self._resource = dict(resource)
        self._lock = threading.Lock()
        self._warned = False

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        job: str,
        submission: str,
        attempt: int,
        node: str,
        rank: int,
        part: str = "",
    ) -> "Timeline":
        """Make a new file for one start of `job` on this node, private to the user.

        `part` names another program that writes a file of its own beside the rank's. A
        `TRACEPARENT` in the environment takes precedence over the trace id made from job,
        submission and attempt.
        """
        outer = parse_traceparent(os.environ.get("TRACEPARENT", ""))
        trace_id, parent_id = outer or (trace_id_of(job, attempt, submission), "")
        resource = _resource(job, submission, attempt, node, rank)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        writer = f"{rank}.{part}" if part else f"{rank}"
        name = f"{stamp}-{os.getpid()}-{node}-{writer}.jsonl"
        path = directory / job / str(attempt) / submission / name
        timeline = cls(path, trace_id=trace_id, parent_id=parent_id, resource=resource)
        try:
            names = [name for name in (job, str(attempt), submission) if name]
            folder = open_private_directory(directory, names)
            try:
                # Later opens may use the path: nobody else can replace the file in this folder.
                os.close(os.open(name, _APPEND, 0o600, dir_fd=folder))
            finally:
                os.close(folder)
        except OSError as error:
            timeline.warn(error)
        return timeline

    @property
    def is_written(self) -> bool:
        """Whether every line so far was written."""
        return not self._warned

    def span(
        self, name: str, attributes: Mapping[str, Value] | None = None, *, since_ns: int = 0
    ) -> Span:
        """Begin a stage now, or at `since_ns` (ns since 1970)."""
        now_ns = time.time_ns()
        earlier_ns = max(0, now_ns - (since_ns or now_ns))
        # Before the begin is written, which takes a busy machine a tenth of a second at times.
        started_ns = time.monotonic_ns() - earlier_ns
        begun = {**(attributes or {}), MONOTONIC: started_ns}
        stage = self._stage(name, now_ns - earlier_ns, begun)
        self.append(encode_start(stage))
        return Span(self, stage, started_ns)

    def note(
        self,
        name: str,
        start_ns: int,
        duration_ns: int,
        attributes: Mapping[str, Value] = MappingProxyType({}),
    ) -> None:
        """Write a stage that has ended. `start_ns` is in ns since 1970."""
        stage = self._stage(name, start_ns, attributes)
        self.append(encode_end(stage._replace(end_ns=start_ns + duration_ns)))

    def event(self, name: str, body: str) -> None:
        """Write an event that happened now; `body` is read by other programs."""
        self.append(encode_event(name, self._stage(name, time.time_ns(), {}), body))

    def _stage(self, name: str, start_ns: int, attributes: Mapping[str, Value]) -> Stage:
        return Stage(
            name=name,
            trace_id=self._trace_id,
            span_id=os.urandom(8).hex(),
            parent_id=self._parent_id,
            start_ns=start_ns,
            end_ns=None,
            attributes=attributes,
            resource=self._resource,
        )

    def with_resource(self, attributes: Mapping[str, Value]) -> "Timeline":
        """Return a timeline on the same file whose lines have more resource attributes."""
        return self._like(self._parent_id, {**self._resource, **attributes})

    def below(self, span: Span) -> "Timeline":
        """Return a timeline on the same file whose new stages are children of `span`."""
        _, parent_id = parse_traceparent(span.traceparent) or ("", "")
        return self._like(parent_id, self._resource)

    def _like(self, parent_id: str, resource: Mapping[str, Value]) -> "Timeline":
        other = Timeline(self.path, trace_id=self._trace_id, parent_id=parent_id, resource=resource)
        # Warn once for a file that cannot be written.
        other._warned = self._warned
        return other

    def append(self, line: bytes) -> None:
        """Write one line. Never raises."""
        try:
            # Opened for each line: lines are few, and the job must not inherit a descriptor.
            descriptor = os.open(self.path, _APPEND, 0o600)
            try:
                # A full disk or a killed writer may have left a part of a line: end that first.
                if _has_partial_last_line(descriptor):
                    line = b"\n" + line
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, "a line was cut; the disk may be full")
            finally:
                os.close(descriptor)
        except OSError as error:
            self.warn(error)

    def warn(self, error: OSError) -> None:
        """Log once that this start has no timeline."""
        with self._lock:
            if not self._warned:
                self._warned = True
                _log.warning("no timeline for this start: cannot write %s: %s", self.path, error)


def _number_in_environment(*variables: str) -> int:
    text = next((os.environ[name] for name in variables if os.environ.get(name)), "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _resource(job: str, submission: str, attempt: int, node: str, rank: int) -> dict[str, Value]:
    resource: dict[str, Value] = {
        "service.name": "bootseer",
        "bootseer.job": job,
        "bootseer.attempt": attempt,
        "host.name": node,
        "bootseer.rank": rank,
        "bootseer.boot_id": boot_id(),
    }
    if submission:
        resource["bootseer.submission"] = submission
    if os.environ.get(PROCESS_VARIABLE):
        resource[PROCESS] = os.environ[PROCESS_VARIABLE]
    if os.environ.get(_RESTART_VARIABLE):
        resource["bootseer.restart"] = _number_in_environment(_RESTART_VARIABLE)
    return resource


def program_name() -> str:
    """Return the name of this process's program, as its users know it."""
    words = sys.orig_argv[1:]
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            return words[place + 1].rpartition(".")[2]
        if word == "-c":
            code = words[place + 1] if place + 1 < len(words) else ""
            return "multiprocessing" if "multiprocessing" in code else "python -c"
        if not word.startswith("-"):
            return os.path.basename(word)
    return "python"


_inherited: tuple[tuple[str, str], Timeline] | None = None


def current() -> Timeline | None:
    """Return the timeline that the environment names, or None."""
    global _inherited
    name = os.environ.get(FILE_VARIABLE)
    if not name:
        return None
    # A forked child inherits `_inherited`, but has a process id variable of its own.
    key = (name, os.environ.get(PROCESS_VARIABLE, ""))
    if _inherited is None or _inherited[0] != key:
        job = os.environ.get("BOOTSEER_JOB", "default")
        submission = os.environ.get("BOOTSEER_SUBMISSION", "")
        attempt = _number_in_environment("BOOTSEER_ATTEMPT")
        node = os.environ.get("BOOTSEER_NODE") or os.uname().nodename
        resource = _resource(
            job, submission, attempt, node, _number_in_environment("RANK", "BOOTSEER_RANK")
        )
        if os.environ.get(LAUNCHED_VARIABLE):
            # Set only in the job's processes, not in Bootseer's servers.
            resource[ROLE] = program_name()
        trace_id, parent_id = parse_traceparent(os.environ.get("TRACEPARENT", "")) or (
            trace_id_of(job, attempt, submission),
            "",
        )
        timeline = Timeline(Path(name), trace_id=trace_id, parent_id=parent_id, resource=resource)
        _inherited = (key, timeline)
    return _inherited[1]


def stage(name: str, attributes: Mapping[str, Value] | None = None) -> Span:
    """Begin a stage: `with bootseer.stage("load data"): ...` records the block on the timeline.

    Does nothing outside `bootseer run`.
    """
    timeline = current()
    if timeline is None:
        return Span(None, Stage(name, "0" * 32, "0" * 16, "", 0, None), time.monotonic_ns())
    return timeline.span(name, attributes)


def ready() -> None:
    """Record the end of the start: the first training step is about to run.

    Ends the recording of the start. Call it once per process; without it the recording ends by
    itself after some time.
    """
    collector = sys.modules.get(COLLECTOR_MODULE)
    if collector is not None:
        collector.stop()
    timeline = current()
    if timeline is not None:
        timeline.span(READY).end()
    send_ready()


def _has_partial_last_line(descriptor: int) -> bool:
    """Return whether the file ends with an incomplete line that no process is writing."""
    size = -1
    for _ in range(3):
        before, size = size, os.fstat(descriptor).st_size
        if not size or os.pread(descriptor, 1, size - 1) == b"\n":
            return False
        if size != before:
            time.sleep(0.002)  # another process may be writing the line
    return True
