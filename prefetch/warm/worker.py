"""The process in the background of `bootseer warm DIR -- COMMAND`: records, or reads ahead.

It is told a `WarmRequest` (`served.processes`). It reports once the command may start: when
everything is prepared for recording, or at once when there is a record to read. It ends by itself:
with the command, at the end of its work, or at a deadline. Owns the rule when to record, and what
is made of a record that cannot be used.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bootseer.base.documents import from_line, to_builtins
from bootseer.errors import CorruptError, UnknownFormatError, from_oserror
from bootseer.linux.locks import lock_file
from bootseer.linux.processes import ProcessId, wait_readable
from bootseer.prefetch.warm.reader import Figures, read_ahead
from bootseer.prefetch.warm.record import (
    WarmRecord,
    delete_record,
    merge,
    publish_record,
    read_record,
)
from bootseer.prefetch.warm.recording import Recording
from bootseer.prefetch.warm.request import WarmRequest, planned, shortage
from bootseer.prefetch.warm.state import NodePaths, node_paths, write_state
from bootseer.served.processes import WARMER, Report, serve
from bootseer.served.ready_socket import ReadySocket
from bootseer.store import Store, open_store
from bootseer.timeline import stage

_log = logging.getLogger(__name__)

STALE_SHARE = 0.5
"""A record of which more has changed is of another tree: it is removed, the next start records."""

# What saving a record, or a thread that hangs in a file system, may take at the end.
_END_S = 120.0


class _Node:
    """Tells this node what is being done."""

    def __init__(self, paths: NodePaths, request: WarmRequest) -> None:
        self._path = paths.state
        self._state: dict[str, Any] = {
            "directory": request.directory,
            "workload": request.workload,
            "pid": os.getpid(),
            "command_pid": request.process.pid if request.process else 0,
            "started_ns": time.time_ns(),
            "action": "",
            "warning": "",
        }

    def say(self, **changes: Any) -> None:
        self._state |= changes
        write_state(self._path, self._state)


def warm(request: WarmRequest, report: Report) -> None:
    """Do what the request wants, then return. Raises: BootseerError, OSError."""
    paths = node_paths(Path(request.run_dir), request.identity, request.workload)
    try:
        lock = lock_file(paths.lock, 0)
    except TimeoutError:
        _log.info("another process of this node warms %s already", request.directory)
        report.ready()
        return
    try:
        node = _Node(paths, request)
        node.say(action="looking")
        with open_store(request.store_url, deadline_s=request.deadline_s) as store:
            known = _known_record(store, request, node)
            if known is None or request.always_record:
                _record(store, request, report, node)
            else:
                _read(store, request, known, report, node)
    finally:
        os.close(lock)


def _known_record(store: Store, request: WarmRequest, node: _Node) -> WarmRecord | None:
    try:
        return read_record(store, request.identity, request.workload)
    except (CorruptError, UnknownFormatError) as error:
        sentence = f"the record of {request.directory} is ignored, and made anew: {error}"
        _log.warning("%s", sentence)
        node.say(warning=sentence)
        return None


def _read(
    store: Store, request: WarmRequest, record: WarmRecord, report: Report, node: _Node
) -> None:
    work = planned(request, record)
    warning = shortage(request, work)
    node.say(action="reading", warning=warning, planned_bytes=work.planned_bytes)
    with _ends(request) as ends, stage("warm") as span:
        report.ready()
        figures = read_ahead(
            request.directory,
            work,
            thread_count=request.thread_count,
            deadline_s=request.read_deadline_s,
            stop=lambda: bool(wait_readable(ends[:1], 0)),
        )
        span.set("bootseer.bytes", figures.read_bytes)
    node.say(action="read", cpu_s=round(time.process_time(), 3), **to_builtins(figures))
    _log.info("read %s ahead: %s", request.directory, figures)
    # An empty directory is a file system that is not mounted here: the record is for those where
    # it is.
    if is_outdated(record, figures) and os.listdir(request.directory):
        _log.warning("most of the record of %s has changed: it is removed", request.directory)
        delete_record(store, request.identity, request.workload)


def is_outdated(record: WarmRecord, figures: Figures) -> bool:
    """Whether most of what the record names is not there any more. Pure."""
    return (
        figures.stale_bytes > STALE_SHARE * record.range_bytes
        or figures.stale_count > STALE_SHARE * len(record.files)
    )


def _record(store: Store, request: WarmRequest, report: Report, node: _Node) -> None:
    recording = Recording(request.directory, request.method)
    try:
        node.say(action="recording", method=recording.method)
        with _ends(request) as ends:
            report.ready()
            recording.run(ends, request.window_s)
        record = recording.finish(request.identity, request.workload)
    finally:
        recording.close()
    node.say(action="saving")
    if not record.files:
        _log.warning("nothing was touched below %s: no record is kept", request.directory)
        node.say(action="recorded", file_count=0, range_bytes=0)
        return
    # Another node may have published meanwhile; a start that is recorded again adds to the others.
    with contextlib.suppress(CorruptError, UnknownFormatError):
        record = merge(read_record(store, request.identity, request.workload), record)
    publish_record(store, record)
    node.say(action="recorded", file_count=len(record.files), range_bytes=record.range_bytes)
    _log.info("recorded %d files of %s", len(record.files), request.directory)


@contextlib.contextmanager
def _ends(request: WarmRequest) -> Iterator[list[int]]:
    """Descriptors that become readable at the command's end, and when it says that it is ready."""
    with contextlib.ExitStack() as stack:
        process = request.process or ProcessId(0, "")
        try:
            command = process.open()
        except OSError as error:
            raise from_oserror(error, f"watch process {process.pid}") from error
        stack.callback(os.close, command)
        ready = ReadySocket(request.ready_name)
        stack.callback(ready.close)
        said = os.eventfd(0, os.EFD_CLOEXEC)
        stack.callback(os.close, said)
        over, end = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, over)

        def listen() -> None:
            while over not in wait_readable([ready.fileno(), over], None):
                if ready.take():
                    os.eventfd_write(said, 1)
                    return

        listener = threading.Thread(target=listen, name="ready", daemon=True)
        listener.start()
        stack.callback(listener.join)
        stack.callback(os.close, end)
        yield [command, said]


def _keep_deadline(request: WarmRequest) -> None:
    """End this process whatever hangs: nothing of it may outlive its deadline."""
    limit_s = max(request.window_s, request.read_deadline_s) + request.deadline_s + _END_S

    def end() -> None:
        _log.error("ended: still not done after %g s", limit_s)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()


def _warm(line: bytes, report: Report) -> None:
    request = from_line(line, WarmRequest)
    _keep_deadline(request)
    warm(request, report)


def main() -> None:
    """Entry point of the process."""
    code = serve(WARMER, _warm)
    logging.shutdown()
    # Not by way of the interpreter's end: a thread may hang in a dead file system.
    os._exit(code)


if __name__ == "__main__":
    main()
