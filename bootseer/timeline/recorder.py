"""Writes a timeline: appends a line when a stage starts and a line when it ends.

A line is one write(2) to a file opened with O_APPEND, so threads and processes of one rank share
a file. A line that was cut costs no other one. Nothing here raises: a timeline that cannot be
written must not cost a training run. The file is named to child
processes by `BOOTSEER_TIMELINE`, the parent span by `TRACEPARENT`.
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
from bootseer.served.ready_socket import tell_ready
from bootseer.timeline.figures import difference, sample
from bootseer.timeline.otlp import (
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
"""Which Python process below the launcher this is, or the nearest one above it."""
LAUNCHED_VARIABLE = "BOOTSEER_LAUNCHED"
"""PID:NANOSECONDS of the launcher at the end of its work, where the command takes its place."""
COLLECTOR_MODULE = "_bootseer_collect"
"""In processes that are watched (bootseer.profile.collect): what watches them."""
# torchrun starts failed workers again in place: in a timeline that was begun before.
_RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Span:
    """One running stage; a context manager. Threads may hold different spans at once."""

    def __init__(self, timeline: "Timeline | None", stage: Stage, earlier_ns: int = 0) -> None:
        """`earlier_ns`: how long ago it has begun."""
        self._timeline = timeline
        self._stage = stage
        self._attributes: dict[str, Value] = dict(stage.attributes)
        self._started_ns = time.monotonic_ns() - earlier_ns
        self.figures = sample() if timeline is not None else {}
        """What the kernel had counted at the begin, and then at the end."""
        self._ended = False

    @property
    def traceparent(self) -> str:
        """The W3C header that makes other spans children of this one."""
        return f"00-{self._stage.trace_id}-{self._stage.span_id}-01"

    def set(self, key: str, value: Value) -> None:
        """Attach a figure, for example `bootseer.bytes`. Never a secret."""
        self._attributes[key] = value

    def end(self, *, error: BaseException | None = None) -> float:
        """Write the end; returns the duration in seconds by the monotonic clock. Idempotent."""
        duration_ns = time.monotonic_ns() - self._started_ns
        if self._timeline is not None and not self._ended:
            before, self.figures = self.figures, sample()
            # The wall clock may be stepped during a start; the duration is the monotonic one.
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
        """A new file for one start of `job` on this node, private to the user.

        `part` names what another program than the rank's own notes, beside whose file it lies.
        A `TRACEPARENT` in the environment wins over the trace id derived from job, submission and
        attempt.
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
                # From here on by its path: nobody else can put another one there.
                os.close(os.open(name, _APPEND, 0o600, dir_fd=folder))
            finally:
                os.close(folder)
        except OSError as error:
            timeline.warn(error)
        return timeline

    @property
    def is_written(self) -> bool:
        """Whether all that was appended so far is in the file."""
        return not self._warned

    def span(
        self, name: str, attributes: Mapping[str, Value] | None = None, *, since_ns: int = 0
    ) -> Span:
        """Begin a stage now, or have begun it then (since 1970)."""
        now_ns = time.time_ns()
        earlier_ns = max(0, now_ns - (since_ns or now_ns))
        begun = {**(attributes or {}), "bootseer.monotonic_ns": time.monotonic_ns() - earlier_ns}
        stage = self._stage(name, now_ns - earlier_ns, begun)
        self.append(encode_start(stage))
        return Span(self, stage, earlier_ns)

    def note(
        self,
        name: str,
        start_ns: int,
        duration_ns: int,
        attributes: Mapping[str, Value] = MappingProxyType({}),
    ) -> None:
        """Write a stage that is over. `start_ns`: since 1970."""
        stage = self._stage(name, start_ns, attributes)
        self.append(encode_end(stage._replace(end_ns=start_ns + duration_ns)))

    def event(self, name: str, body: str) -> None:
        """Write what happened now, in words that other programs read."""
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
        """The same file, with more said of who writes."""
        return self._like(self._parent_id, {**self._resource, **attributes})

    def below(self, span: Span) -> "Timeline":
        """The same file, with new stages as children of `span`."""
        _, parent_id = parse_traceparent(span.traceparent) or ("", "")
        return self._like(parent_id, self._resource)

    def _like(self, parent_id: str, resource: Mapping[str, Value]) -> "Timeline":
        other = Timeline(self.path, trace_id=self._trace_id, parent_id=parent_id, resource=resource)
        # One warning is enough for a file that cannot be written.
        other._warned = self._warned
        return other

    def append(self, line: bytes) -> None:
        """Write one line. Never raises."""
        try:
            # Opened per line: spans are few, and no descriptor may leak into the training job.
            descriptor = os.open(self.path, _APPEND, 0o600)
            try:
                # What a full disk, or a killed writer, has left of a line must not take ours along.
                if _ends_amid_a_line(descriptor):
                    line = b"\n" + line
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, "a line was cut, as a full disk does it")
            finally:
                os.close(descriptor)
        except OSError as error:
            self.warn(error)

    def warn(self, error: OSError) -> None:
        """Say once that this start has no timeline."""
        with self._lock:
            if not self._warned:
                self._warned = True
                _log.warning("no timeline for this start: cannot write %s: %s", self.path, error)


def _number(*variables: str) -> int:
    """The number that the first of these variables has which is set; 0 where that is none."""
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
        resource["bootseer.restart"] = _number(_RESTART_VARIABLE)
    return resource


def program_name() -> str:
    """What this process runs, as its users know it."""
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
    """The timeline that the environment names, or None."""
    global _inherited
    name = os.environ.get(FILE_VARIABLE)
    if not name:
        return None
    # A child by fork has the file of its parent, and is another process.
    key = (name, os.environ.get(PROCESS_VARIABLE, ""))
    if _inherited is None or _inherited[0] != key:
        job = os.environ.get("BOOTSEER_JOB", "default")
        submission = os.environ.get("BOOTSEER_SUBMISSION", "")
        attempt = _number("BOOTSEER_ATTEMPT")
        node = os.environ.get("BOOTSEER_NODE") or os.uname().nodename
        resource = _resource(job, submission, attempt, node, _number("RANK", "BOOTSEER_RANK"))
        if os.environ.get(LAUNCHED_VARIABLE):
            # The job itself, and no server of ours: whether it is watched or too quick for that.
            resource[ROLE] = program_name()
        trace_id, parent_id = parse_traceparent(os.environ.get("TRACEPARENT", "")) or (
            trace_id_of(job, attempt, submission),
            "",
        )
        timeline = Timeline(Path(name), trace_id=trace_id, parent_id=parent_id, resource=resource)
        _inherited = (key, timeline)
    return _inherited[1]


def stage(name: str, attributes: Mapping[str, Value] | None = None) -> Span:
    """`with bootseer.stage("load data"): ...` puts a stage of your own on the timeline.

    Does nothing outside `bootseer run`.
    """
    timeline = current()
    if timeline is None:
        return Span(None, Stage(name, "0" * 32, "0" * 16, "", 0, None))
    return timeline.span(name, attributes)


def ready() -> None:
    """Say that the start is over: the first training step is about to run.

    Ends the recording of what this start touched. Call it once per process; without it the
    recording ends by itself after a while.
    """
    collector = sys.modules.get(COLLECTOR_MODULE)
    if collector is not None:
        collector.over()
    timeline = current()
    if timeline is not None:
        timeline.span(READY).end()
    tell_ready()


def _ends_amid_a_line(descriptor: int) -> bool:
    """Whether the file ends with a line that nobody goes on writing."""
    size = -1
    for _ in range(3):
        before, size = size, os.fstat(descriptor).st_size
        if not size or os.pread(descriptor, 1, size - 1) == b"\n":
            return False
        if size != before:
            time.sleep(0.002)  # another process may be in the middle of it
    return True
