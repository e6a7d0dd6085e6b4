"""Warming while a command starts, and warming now: what `bootseer warm` calls.

Owns the rule that warming never costs a start more than a warning and a bounded wait. Main thread.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from bootseer.base.redact import public_url
from bootseer.errors import BootseerError, DeadlineError, NotFoundError
from bootseer.linux.locks import lock_file
from bootseer.linux.processes import ProcessId
from bootseer.prefetch.warm.plan import Plan
from bootseer.prefetch.warm.reader import Figures, read_ahead
from bootseer.prefetch.warm.record import WarmRecord, read_record
from bootseer.prefetch.warm.recording import ARM_S
from bootseer.prefetch.warm.request import WarmRequest
from bootseer.prefetch.warm.state import node_paths, read_state
from bootseer.served.processes import WARMER, start
from bootseer.served.ready_socket import add_ready_names, new_ready_name
from bootseer.store import open_store

_LOG_BYTES_MAX = 2**20


def start_warming(request: WarmRequest) -> str:
    """Start what records or reads ahead in the background, for this process and what it becomes: a
    program of ours, of which the background process may be a copy.

    Returns once the command may start, with a warning for people or "". Never raises for a failure
    of warming. `bootseer.ready()` of the command ends a recording: the environment says where.
    """
    request = replace(request, process=ProcessId.of(os.getpid()), ready_name=new_ready_name())
    try:
        warning = _start(request)
    except (BootseerError, OSError) as error:
        return f"{request.directory} is not warmed: {error}"
    add_ready_names(os.environ, request.ready_name)
    return warning


def _start(request: WarmRequest) -> str:
    paths = node_paths(Path(request.run_dir), request.identity, request.workload)
    try:
        os.close(lock_file(paths.lock, 0))
    except TimeoutError:
        # Another rank of this node does it. Not worth a process, nor a word.
        return ""
    with contextlib.suppress(OSError):
        if paths.log.stat().st_size > _LOG_BYTES_MAX:
            paths.log.unlink()
    with start(WARMER, Path(request.run_dir), identity=paths.log.stem, copy=True) as process:
        try:
            process.tell(request)
            process.wait(min(request.deadline_s, ARM_S) + 5.0)
        except DeadlineError:
            # What hangs would do so for as long as it is let.
            process.kill()
            raise
    return str(read_state(paths.state).get("warning", ""))


def known_record(request: WarmRequest) -> WarmRecord:
    """The record in the store. Raises: NotFoundError and others of `read_record`."""
    with open_store(request.store_url, deadline_s=request.deadline_s) as store:
        record = read_record(store, request.identity, request.workload)
    if record is None:
        raise NotFoundError(
            f"{public_url(request.store_url)} has no record of {request.directory} for the "
            f"workload {request.workload}; make one with `bootseer warm {request.directory} -- "
            "COMMAND`"
        )
    return record


def warm_now(request: WarmRequest, work: Plan, on_bytes: Callable[[int], None]) -> Figures:
    """Read the plan ahead, in this process."""
    return read_ahead(
        request.directory,
        work,
        thread_count=request.thread_count,
        deadline_s=request.read_deadline_s,
        on_bytes=on_bytes,
    )
