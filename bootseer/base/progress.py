"""Progress bar with bytes, rate and remaining time, for work that takes more than a second.

It is drawn on stderr, and only if stderr is a terminal. Thread-safe.
"""

import sys
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# The bar of shorter work would only flash.
_SILENT_S = 1.0


class ProgressBar:
    """Progress bar of one task: `with ProgressBar("packing", total_bytes) as p: p.advance(n)`."""

    def __init__(self, label: str, total_bytes: int | None = None) -> None:
        """Prepare the bar without drawing it; `total_bytes` is None if unknown."""
        self._label = label
        self._total = total_bytes
        self._done = 0
        self._started_s = time.monotonic()
        self._enabled = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def advance(self, count_bytes: int) -> None:
        """Report that `count_bytes` more are done."""
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
        # Imported late: importing rich takes longer than most commands.
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
