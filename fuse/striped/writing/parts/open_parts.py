"""How many parts are written at once, by all files of a mount, and the memory that each one takes.

A storage's client keeps what its servers have not confirmed: HDFS's more than three stripe units
for each open part, which no budget of ours would see. So it is charged here: until the part is
known to be written without that client, and then one unit. Owns these counts. Thread-safe.
"""

import threading
from collections.abc import Callable

from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.writing.kept_units import KeptUnits
from bootseer.store.backend import Backend

# Of a part that is written well: one that is sent, one in its queue, and one that is being filled.
_UNITS_PER_PART = 3
# What a file should have even when many are written: one server alone makes it slow for ever.
_PARTS_WANTED = 2


class OpenParts:
    """Parts that are being written."""

    def __init__(self, backend: Backend, budget: MemoryBudget, kept: KeptUnits) -> None:
        self._writer_bytes = backend.writer_bytes
        self._part_bytes = self._writer_bytes
        """What the next part will take: as much as the one that was begun last."""
        self._budget = budget
        self._kept = kept
        # The rest is for units on their way: without any, no part would come to its end.
        self._charged_max = budget.limit_bytes // 2
        self._charged_bytes = 0
        self._open_count = 0
        self._file_count = 0
        self._lock = threading.Lock()

    def begin_file(self) -> None:
        """Counts one more file that is written; `end_file` must follow."""
        with self._lock:
            self._file_count += 1

    def end_file(self) -> None:
        """Counts one file less that is written."""
        with self._lock:
            self._file_count -= 1

    def begin(
        self,
        own_count: int,
        unit_bytes: int,
        patience_s: float,
        cancelled: Callable[[], bool],
        *,
        is_asked_for: bool = False,
    ) -> int | None:
        """Count one more part of a file that has `own_count` open; returns the bytes charged for
        it, which `end` gives back. None: there is no memory for more than the file has, or, where
        it `is_asked_for`, none at all.

        A file has its first part in any case: uncharged, where there are too many. Waits for
        memory that is used by others for now, and raises as `MemoryBudget.take`.
        """
        cost_bytes = (self._part_bytes or 3 * unit_bytes) + _UNITS_PER_PART * unit_bytes
        with self._lock:
            parts_max = self._budget.limit_bytes // cost_bytes
            share = parts_max // max(1, self._file_count)
            fits = self._charged_bytes + self._part_bytes <= self._charged_max
            if own_count >= _PARTS_WANTED and not is_asked_for:
                # A quarter stays for the files that come next.
                fits = self._charged_bytes + self._part_bytes <= self._charged_max * 3 // 4
                fits = fits and self._open_count < parts_max and own_count < share
            if own_count and not fits:
                return None
            charge_bytes = self._part_bytes if fits else 0
            self._open_count += 1
            self._charged_bytes += charge_bytes
        try:
            if charge_bytes:
                self._budget.take(charge_bytes, patience_s, cancelled)
        except BaseException:
            self._uncount(charge_bytes)
            raise
        self._kept.set_aside(charge_bytes)
        return charge_bytes

    def settle(self, charge_bytes: int, unit_bytes: int, *, is_buffered: bool) -> int:
        """What a part's writer takes is known; returns what is charged for it from now on.

        Never waits: what there is no memory for is uncharged.
        """
        needed_bytes = self._writer_bytes
        if not is_buffered:
            # Its thread and packets, and its share of the unit that the file is filling: eight
            # files at once were beyond the budget by 2 MiB for each part.
            needed_bytes = min(needed_bytes, unit_bytes)
        with self._lock:
            self._part_bytes = needed_bytes
            change_bytes = needed_bytes - charge_bytes
            if self._charged_bytes + change_bytes > self._charged_max:
                return charge_bytes
        if change_bytes > 0 and not self._budget.try_take(change_bytes):
            return charge_bytes
        with self._lock:
            self._charged_bytes += change_bytes
        self._kept.set_aside(change_bytes)
        if change_bytes < 0:
            self._budget.give(-change_bytes)
        return needed_bytes

    def end(self, charge_bytes: int) -> None:
        """A part has ended."""
        self._kept.set_aside(-charge_bytes)
        self._uncount(charge_bytes)
        if charge_bytes:
            self._budget.give(charge_bytes)

    def _uncount(self, charge_bytes: int) -> None:
        with self._lock:
            self._open_count -= 1
            self._charged_bytes -= charge_bytes
