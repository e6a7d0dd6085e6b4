"""Figures of a running mount: for `bootseer status DIR`, and for Prometheus.

Defines the status document, which the worker sends over the control socket. Figures for Prometheus
(docs/operations.md) are labelled with the folder's URL and a slot, because the mount point may
differ at each start. Any thread may gather figures; gathering never waits.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.base.documents import to_builtins
from bootseer.base.exposition import Family, render, single
from bootseer.base.redact import public_url, redact
from bootseer.errors import NotFoundError
from bootseer.fuse.striped.statistics import Statistics
from bootseer.linux.mount_table import absolute
from bootseer.served.figures_file import FiguresFile, file_name
from bootseer.served.service import Service, ServiceState, find_checkpoints

_ERRORS_KEPT = 10
_MESSAGE_CHARS_MAX = 500
# Time between the two readings from which the throughput is computed.
_RATE_S = 0.5


class RecentErrors(logging.Handler):
    """Log handler that keeps the last warnings and errors of this process. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[dict[str, Any]] = deque(maxlen=_ERRORS_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        message = redact(record.getMessage())[:_MESSAGE_CHARS_MAX]
        self._kept.append({"time_s": record.created, "message": message})

    def kept(self) -> list[dict[str, Any]]:
        """Return the kept messages with their times, the oldest first."""
        return list(self._kept)


class OpenFigures(Struct, frozen=True):
    """Counts of open files and requests at one moment."""

    files_open: int
    streams_active: int
    requests: int
    """Requests for files and names since the server's process began."""
    unfinished: tuple[str, ...]
    """Files that are being written, which no other node sees yet."""


def status_document(
    state: ServiceState,
    statistics: Statistics,
    opened: OpenFigures,
    memory: Mapping[str, int],
    errors: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the answer to the command "status"."""
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
    """Return the status of the mount on `directory`, with its current throughput.

    Raises: NotFoundError if this user has no mount there; UnavailableError, DeadlineError.
    """
    path = absolute(directory)
    known = find_checkpoints(run_dir, path)
    if known is None or not known.is_alive:
        raise NotFoundError(f"no checkpoint folder of this user is mounted on {path}")
    return _with_rates(known)


def _with_rates(known: Service) -> dict[str, Any]:
    before = known.ask("status")["statistics"]
    time.sleep(_RATE_S)
    answer = known.ask("status")
    after = answer["statistics"]
    # A successor process may have begun to count anew.
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


# ---- figures for Prometheus ------------------------------------------------------------------

_ROUND_S = 15.0
"""Pause between two writes: the default scrape interval of Prometheus."""
_PREFIX = "bootseer_checkpoint_"
_COUNTERS = {
    "served_bytes": ("served_bytes", "Bytes handed to readers."),
    "fetched_bytes": ("fetched_bytes", "Bytes read from the storage and verified."),
    "fetch_count": ("fetches", "Reads of the storage."),
    "read_retry_count": ("fetch_retries", "Reads that failed and were asked for again."),
    "corrupt_count": ("corrupt_fetches", "Reads whose bytes did not match their checksum."),
    "late_count": (
        "late_fetches",
        "Reads that were asked for a second time while the first was under way.",
    ),
    "stuck_count": ("fetch_timeouts", "Reads that were given up at their deadline."),
    "written_bytes": ("written_bytes", "Bytes acknowledged by the storage."),
    "write_count": ("writes", "Writes to the storage."),
    "write_retry_count": ("write_retries", "Writes that failed and were repeated."),
    "published_count": ("published_files", "Files that became visible to others."),
}
"""Name and description of a counter, by field of `Statistics`."""


class MountFigures(Struct, frozen=True):
    """Figures of a mount at one moment."""

    statistics: Statistics
    opened: OpenFigures
    memory: Mapping[str, int]
    started_s: float
    is_mounted: bool


def render_mount(figures: MountFigures, url: str, slot: int) -> str:
    """Return the content of the file for Prometheus."""
    return render(_families(figures), (("url", public_url(url)), ("slot", str(slot))))


def _families(figures: MountFigures) -> Iterator[Family]:
    memory, opened = figures.memory, figures.opened
    for name, text, value in (
        ("mounted", "1 while the folder is mounted, 0 after its end.", figures.is_mounted),
        ("start_time_seconds", "Time of the mount, in seconds since 1970.", figures.started_s),
        ("memory_limit_bytes", "Memory that the mount may use.", memory["limit_bytes"]),
        ("memory_used_bytes", "Memory that the mount uses.", memory["used_bytes"]),
        ("open_files", "Files that are open.", opened.files_open),
        ("unfinished_files", "Files that are being written.", len(opened.unfinished)),
    ):
        yield single(_PREFIX + name, "gauge", text, value)
    for field, (name, text) in _COUNTERS.items():
        yield single(f"{_PREFIX}{name}_total", "counter", text, getattr(figures.statistics, field))


class FiguresWriter:
    """Thread that writes the figures of one mount from its start until it is closed."""

    def __init__(self, metrics_dir: Path, url: str, gather: Callable[[bool], MountFigures]) -> None:
        """`gather(is_mounted)` returns the current figures."""
        self._file = FiguresFile(metrics_dir)
        self._url = url
        self._name = file_name("checkpoint", public_url(url))
        self._gather = gather
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="figures", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._write(True)
            self._stopping.wait(_ROUND_S)

    def _write(self, is_mounted: bool) -> None:
        # `FiguresFile.write` never raises, so that this thread lives as long as the mount.
        self._file.write(
            self._name, lambda slot: render_mount(self._gather(is_mounted), self._url, slot)
        )

    def close(self) -> None:
        """Write the last figures and free the slot."""
        self._stopping.set()
        self._thread.join(_ROUND_S)
        self._write(False)
        self._file.close()
