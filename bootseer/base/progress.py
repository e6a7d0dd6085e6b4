"""A progress bar for work that takes more than a second: bytes, rate, time left.

Draws on stderr, only on a terminal; silent in a log. Thread-safe.
"""

import sys
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# Shorter work would only flash.
_SILENT_S = 1.0


class Progress:
    """`with Progress("packing", total_bytes) as p: p.advance(n)`; total None: unknown."""

    def __init__(self, label: str, total_bytes: int | None = None) -> None:
        self._label = label
        self._total = total_bytes
        self._done = 0
        self._started_s = time.monotonic()
        self._enabled = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def advance(self, count_bytes: int) -> None:
        """Add `count_bytes` to what is done."""
        if not self._enabled:
            return
        with self._lock:
            self._done += count_bytes
            if self._bar is None:
                if time.monotonic() - self._started_s < _SILENT_S:
                    return
                self._open()
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=self._done)

    def _open(self) -> None:
        # Imported late: rich costs more than most commands take.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._label, total=self._total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
