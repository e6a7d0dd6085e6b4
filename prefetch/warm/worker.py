"""Background process of `bootseer warm DIR -- COMMAND`, which records or reads ahead.

The process gets a `WarmRequest` (`served.processes`) and reports as soon as the command may start:
when the recording is prepared, or at once if there is a record to read. It ends with the command,
at the end of its work, or at a deadline. It holds the service's folder; other ranks of the node
find the folder held, and do nothing.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.base.documents import from_line, to_builtins
from bootseer.errors import BootseerError, CorruptError, UnknownFormatError, from_oserror
from bootseer.linux.private_files import write_private_file
from bootseer.linux.processes import ProcessId, wait_readable
from bootseer.prefetch.warm.plan import plan_read_ahead
from bootseer.prefetch.warm.reader import WarmFigures, read_ahead
from bootseer.prefetch.warm.record import (
    WarmRecord,
    delete_record,
    merge_records,
    publish_record,
    read_record,
)
from bootseer.prefetch.warm.recording import WarmRecording
from bootseer.prefetch.warm.request import NodePaths, WarmingBegun, WarmRequest
from bootseer.served.processes import WARMER, Report, serve
from bootseer.served.ready_socket import ReadySocket
from bootseer.served.service import (
    WARMING,
    ServiceState,
    hold_folder,
    new_service_dir,
    take_lock,
    write_state,
)
from bootseer.store import Store, open_store
from bootseer.timeline import stage

_log = logging.getLogger(__name__)

STALE_SHARE = 0.5
"""A record is removed if a larger share of its files has changed; the next start records anew."""

# Time at the end for saving a record, or for a thread that hangs in a file system.
_END_S = 120.0


class _Progress:
    """Progress of this process, in the service's folder and in the outcome's file. Never raises."""

    def __init__(self, paths: NodePaths, request: WarmRequest) -> None:
        self._paths = paths
        self._workload = request.workload
        self.warning = ""
        self._outcome: dict[str, Any] = {
            "directory": request.directory,
            "workload": request.workload,
            "pid": os.getpid(),
            "command_pid": request.process.pid if request.process else 0,
            "started_ns": time.time_ns(),
            "action": "",
        }
        self.state = ServiceState(
            id=paths.service.name,
            reference="",
            index_digest="",
            workload=request.workload,
            directory=request.directory,
            pid=os.getpid(),
            pid_started=ProcessId.of(os.getpid()).started,
            started_ns=self._outcome["started_ns"],
            purpose=WARMING,
            user=request.process,
        )

    def update(self, **changes: Any) -> None:
        """Replace parts of what `bootseer status` and `--show` tell."""
        self._outcome |= {**changes, "warning": self.warning}
        what = f"{self._workload} ({self._outcome['action']})"
        self.state = replace(self.state, reference=what, problem=self.warning)
        with contextlib.suppress(OSError, BootseerError):
            write_private_file(self._paths.outcome, json.dumps(self._outcome).encode("ascii"))
            write_state(self._paths.service, self.state)


def warm(request: WarmRequest, report: Report) -> None:
    """Record or read ahead as requested, then return. Raises: BootseerError, OSError."""
    paths = request.node_paths
    try:
        lock = take_lock(new_service_dir(Path(request.run_dir), paths.service.name))
    except TimeoutError:
        _log.info("another process of this node warms %s already", request.directory)
        report.ready(WarmingBegun())
        return
    state = _Progress(paths, request)
    state.update(action="looking")
    with (
        hold_folder(paths.service, state.state, lock),
        open_store(request.store_url, deadline_s=request.deadline_s) as store,
    ):
        known = _stored_record(store, request, state)
        if known is None or request.always_record:
            _record(store, request, report, state)
        else:
            _read(store, request, known, report, state)


def _stored_record(store: Store, request: WarmRequest, state: _Progress) -> WarmRecord | None:
    try:
        return read_record(store, request.identity, request.workload)
    except (CorruptError, UnknownFormatError) as error:
        sentence = f"the record of {request.directory} is ignored, and made anew: {error}"
        _log.warning("%s", sentence)
        state.warning = sentence
        return None


def _read(
    store: Store, request: WarmRequest, record: WarmRecord, report: Report, state: _Progress
) -> None:
    plan = plan_read_ahead(record, request.memory_bytes)
    state.warning = plan.memory_warning(request.directory)
    state.update(action="reading", planned_bytes=plan.planned_bytes)
    with _end_events(request) as (command_ended, _), stage("warm") as span:
        report.ready(WarmingBegun(state.warning))
        figures = read_ahead(
            request.directory,
            plan,
            thread_count=request.thread_count,
            deadline_s=request.read_deadline_s,
            stop=lambda: bool(wait_readable([command_ended], 0)),
        )
        span.set("bootseer.bytes", figures.read_bytes)
    state.update(action="read", cpu_s=round(time.process_time(), 3), **to_builtins(figures))
    _log.info("read %s ahead: %s", request.directory, figures)
    # If the directory is empty, its file system is not mounted here; other nodes use the record.
    if is_outdated(record, figures) and os.listdir(request.directory):
        _log.warning("most of the record of %s has changed: it is removed", request.directory)
        delete_record(store, request.identity, request.workload)


def is_outdated(record: WarmRecord, figures: WarmFigures) -> bool:
    """Return whether most of the recorded files were changed or removed. Pure."""
    return (
        figures.stale_bytes > STALE_SHARE * record.range_bytes
        or figures.stale_count > STALE_SHARE * len(record.files)
    )


def _record(store: Store, request: WarmRequest, report: Report, state: _Progress) -> None:
    recording = WarmRecording(request.directory, request.method)
    try:
        state.update(action="recording", method=recording.method)
        with _end_events(request) as events:
            report.ready(WarmingBegun(state.warning))
            recording.run(events, request.window_s)
        record = recording.finish(request.identity, request.workload)
    finally:
        recording.close()
    state.update(action="saving")
    if not record.files:
        _log.warning("no file was read below %s: no record is kept", request.directory)
        state.update(action="recorded", file_count=0, range_bytes=0)
        return
    # Added to the stored record, which another node may have published during this recording.
    with contextlib.suppress(CorruptError, UnknownFormatError):
        record = merge_records(read_record(store, request.identity, request.workload), record)
    publish_record(store, record)
    state.update(action="recorded", file_count=len(record.files), range_bytes=record.range_bytes)
    _log.info("recorded %d files of %s", len(record.files), request.directory)


@contextlib.contextmanager
def _end_events(request: WarmRequest) -> Iterator[tuple[int, int]]:
    """Yield descriptors that become readable when the command ends, and when it is ready."""
    with contextlib.ExitStack() as stack:
        process = request.process or ProcessId(0, "")
        try:
            command = process.open()
        except OSError as error:
            raise from_oserror(error, f"watch process {process.pid}") from error
        stack.callback(os.close, command)
        ready = ReadySocket(request.ready_name)
        stack.callback(ready.close)
        is_ready = os.eventfd(0, os.EFD_CLOEXEC)
        stack.callback(os.close, is_ready)
        closed, closer = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, closed)

        def listen() -> None:
            while closed not in wait_readable([ready.fileno(), closed], None):
                if ready.take():
                    os.eventfd_write(is_ready, 1)
                    return

        listener = threading.Thread(target=listen, name="ready", daemon=True)
        listener.start()
        stack.callback(listener.join)
        stack.callback(os.close, closer)
        yield command, is_ready


def _keep_deadline(request: WarmRequest) -> None:
    """Start a timer that ends this process at its deadline, even if a thread hangs."""
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
    """Run the background process."""
    code = serve(WARMER, _warm)
    logging.shutdown()
    # A normal exit would wait for threads, which may hang in a dead file system.
    os._exit(code)


if __name__ == "__main__":
    main()
