"""What `bootseer checkpoint mount --status` tells of a running mount.

Owns the form of that document, on both sides of the control socket. Gathering is one quick look
that waits for nothing; it may run in any thread.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.base.documents import to_builtins
from bootseer.base.redact import redact
from bootseer.errors import NotFoundError
from bootseer.fuse.striped.statistics import Statistics
from bootseer.linux.mount_table import absolute
from bootseer.served.folders import MountState
from bootseer.served.status import Known, find_known, known_mounts

_ERRORS_KEPT = 10
_MESSAGE_CHARS_MAX = 500
# Between the two looks whose difference is the throughput of this moment.
_RATE_S = 0.5


class RecentErrors(logging.Handler):
    """The last warnings and errors of this process, to be shown. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[dict[str, Any]] = deque(maxlen=_ERRORS_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        message = redact(record.getMessage())[:_MESSAGE_CHARS_MAX]
        self._kept.append({"time_s": record.created, "message": message})

    def kept(self) -> list[dict[str, Any]]:
        """Oldest first."""
        return list(self._kept)


class OpenFigures(Struct, frozen=True):
    """What is open in a mount at this moment."""

    files_open: int
    streams_active: int
    requests: int
    """Requests for files and names since the server's process began."""
    unfinished: tuple[str, ...]
    """Files that are being written: no other node sees them yet."""


def status_document(
    state: MountState,
    statistics: Statistics,
    opened: OpenFigures,
    memory: Mapping[str, int],
    errors: list[dict[str, Any]],
) -> dict[str, Any]:
    """The answer to "status"."""
    return {
        "url": state.reference,
        "directory": state.directory,
        "pid": state.pid,
        "worker_pid": state.worker_pid,
        "uptime_s": max(0.0, time.time() - state.started_ns / 1e9),
        **to_builtins(opened),
        "memory": dict(memory),
        "statistics": to_builtins(statistics),
        "errors": errors,
    }


def mount_status(run_dir: Path, directory: Path) -> dict[str, Any]:
    """The status of the mount on `directory`, with its throughput of this moment.

    Raises: NotFoundError where none of this user's is there; UnavailableError, DeadlineError.
    """
    path = absolute(directory)
    known = find_known(run_dir, path)
    if known is None or not known.is_running:
        raise NotFoundError(f"no checkpoint folder of this user is mounted on {path}")
    return _with_rates(known)


def all_statuses(run_dir: Path) -> list[dict[str, Any]]:
    """The status of every running mount of this user; one that does not answer is shown as that."""
    found = []
    for known in known_mounts(run_dir):
        if not known.is_running:
            continue
        try:
            found.append(_with_rates(known))
        except OSError as error:
            url, directory = known.state.reference, known.state.directory
            found.append({"url": url, "directory": directory, "problem": str(error)})
    return found


def _with_rates(known: Known) -> dict[str, Any]:
    before = known.ask("status")["statistics"]
    time.sleep(_RATE_S)
    answer = known.ask("status")
    after = answer["statistics"]
    # Another process may serve now, whose counts began anew.
    elapsed_s = max(after["uptime_s"] - before["uptime_s"], _RATE_S)
    answer["throughput"] = {
        f"{name}_bytes_per_s": max(0.0, (after[key] - before[key]) / elapsed_s)
        for name, key in (
            ("served", "served_bytes"),
            ("fetched", "fetched_bytes"),
            ("written", "written_bytes"),
        )
    }
    return answer
