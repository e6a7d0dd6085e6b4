"""The figures of a mounted checkpoint folder for Prometheus (docs/operations.md).

Its labels are the folder's URL and a slot: where it is mounted may be new at each start.
`render_mount` is pure; a `FiguresWriter` has one thread that writes now and then.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from bootseer.base.exposition import Family, one, render
from bootseer.base.redact import public_url
from bootseer.fuse.striped.mounted.life.status import OpenFigures
from bootseer.fuse.striped.statistics import Statistics
from bootseer.served.figures_file import FiguresFile, file_name

_ROUND_S = 15.0
"""As often as Prometheus scrapes by default."""
_PREFIX = "bootseer_checkpoint_"
_COUNTS = {
    "served_bytes": "Bytes handed to readers.",
    "fetched_bytes": "Bytes read from the storage and verified.",
    "fetch_count": "Reads of the storage.",
    "read_retry_count": "Reads that failed and were asked for again.",
    "corrupt_count": "Reads whose bytes did not match their checksum.",
    "late_count": "Reads that were asked for a second time while the first was under way.",
    "stuck_count": "Reads that were given up at their deadline.",
    "written_bytes": "Bytes acknowledged by the storage.",
    "write_count": "Writes to the storage.",
    "write_retry_count": "Writes that failed and were repeated.",
    "published_count": "Files that became visible to others.",
}
_NAMES = {
    "fetch_count": "fetches",
    "read_retry_count": "fetch_retries",
    "corrupt_count": "corrupt_fetches",
    "late_count": "late_fetches",
    "stuck_count": "fetch_timeouts",
    "write_count": "writes",
    "write_retry_count": "write_retries",
    "published_count": "published_files",
}


class Look(Struct, frozen=True):
    """What is known of a mount at one moment."""

    statistics: Statistics
    opened: OpenFigures
    memory: Mapping[str, int]
    started_s: float
    is_mounted: bool


def render_mount(look: Look, url: str, slot: int) -> str:
    """The whole file."""
    return render(_families(look), (("url", public_url(url)), ("slot", str(slot))))


def _families(look: Look) -> Iterator[Family]:
    for name, text, value in (
        ("mounted", "1 while the folder is mounted, 0 after its end.", look.is_mounted),
        ("start_time_seconds", "When it was mounted, in seconds since the epoch.", look.started_s),
        ("memory_limit_bytes", "What the mount may hold in memory.", look.memory["limit_bytes"]),
        ("memory_used_bytes", "What the mount holds in memory.", look.memory["used_bytes"]),
        ("open_files", "Files that are open.", look.opened.files_open),
        ("unfinished_files", "Files that are being written.", len(look.opened.unfinished)),
    ):
        yield one(_PREFIX + name, "gauge", text, value)
    for field, text in _COUNTS.items():
        name = f"{_PREFIX}{_NAMES.get(field, field)}_total"
        yield one(name, "counter", text, getattr(look.statistics, field))


class FiguresWriter:
    """Writes the figures of one mount from its start until it is closed."""

    def __init__(self, metrics_dir: Path, url: str, look: Callable[[bool], Look]) -> None:
        """`look` is asked with whether it is mounted."""
        self._file = FiguresFile(metrics_dir)
        self._url = url
        self._name = file_name("checkpoint", public_url(url))
        self._look = look
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="figures", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._write(True)
            self._stopping.wait(_ROUND_S)

    def _write(self, is_mounted: bool) -> None:
        # Looked at by what never raises: this thread writes for as long as the mount lives.
        self._file.write(
            self._name, lambda slot: render_mount(self._look(is_mounted), self._url, slot)
        )

    def close(self) -> None:
        """Write the last ones, and let another mount have the slot."""
        self._stopping.set()
        self._thread.join(_ROUND_S)
        self._write(False)
        self._file.close()
