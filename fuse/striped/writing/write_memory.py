"""Memory of the files that a mount writes: stripe units, and the storage client's buffers.

A full stripe unit is charged to the mount's memory budget until the storage has stored its part.
Until then, a failed part may need the unit again, so the unit is *kept*:

    taken --the storage's writer has it--> kept --the part is stored--> released
                                             +--memory is short-----> read back if needed

The storage's client library has buffers of its own: that of HDFS holds more than three stripe units
for each open part. `begin_part` charges for these buffers.

Memory that cannot be dropped is limited to half of the budget. Otherwise parts that each wait for
their next unit could hold all of the memory. Thread-safe.
"""

import threading
from collections.abc import Callable

from bootseer.fuse.striped.memory import Droppable, Memory, Tier
from bootseer.store.backend import Piece

# Units in memory for each part that is written at full speed: one being sent, one in the part's
# queue, and one being filled.
_UNITS_PER_PART = 3
# A file gets at least this many parts even if many files are written, because a file on a single
# server would stay slow to read.
_PARTS_WANTED = 2


class Unit(Droppable):
    """Stripe unit of a part. The memory is charged to the budget while there are pieces."""

    def __init__(self, pieces: list[Piece], length: int, first_block: int, memory: Memory) -> None:
        self.pieces: list[Piece] | None = pieces
        """The bytes; None after the memory was returned."""
        self.length = length
        self.first_block = first_block
        """Number of the unit's first checksum block in its segment."""
        self._memory = memory

    def drop(self) -> None:
        self.pieces = None
        self._memory.give(self.length)


class Charge:
    """Memory charged for one open part: buffers of the storage's client library."""

    __slots__ = ("_memory", "_unit_bytes", "charged_bytes", "is_settled")

    def __init__(self, memory: "WriteMemory", unit_bytes: int, charged_bytes: int) -> None:
        self._memory = memory
        self._unit_bytes = unit_bytes
        self.charged_bytes = charged_bytes
        self.is_settled = not charged_bytes
        """Whether the charge is exact; until then it is an estimate."""

    def settle(self, *, is_buffered: bool) -> None:
        """Correct the charge after a writer took its first bytes. Never waits.

        `is_buffered`: `Writer.is_buffered`. If there is no memory for a larger charge, it stays.
        """
        self._memory.settle(self, self._unit_bytes, is_buffered=is_buffered)
        self.is_settled = True

    def end(self) -> None:
        """Return the memory, after the part was written. Call it once."""
        self._memory.end_part(self)


class WriteMemory:
    """Memory of all files that are being written in one mount."""

    def __init__(self, memory: Memory, writer_bytes: int) -> None:
        """`writer_bytes`: `Backend.writer_bytes`, the most that one open writer may hold."""
        self._memory = memory
        self._writer_bytes = writer_bytes
        self._part_bytes = writer_bytes
        """Estimated charge of the next part: the charge that was settled last."""
        self._half_bytes = memory.limit_bytes // 2
        self._charged_bytes = 0
        self._part_count = 0
        self._file_count = 0
        self._held_bytes = 0
        """Bytes of units that writers of the storage still refer to: dropping them is useless."""
        self._lock = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        """Size of the mount's whole memory budget."""
        return self._memory.limit_bytes

    # ---- files and their parts ----------------------------------------------------------------

    def begin_file(self) -> None:
        """Count a file that is being written, until `end_file`."""
        with self._lock:
            self._file_count += 1

    def end_file(self) -> None:
        """End the count of a file that is being written."""
        with self._lock:
            self._file_count -= 1

    def begin_part(
        self,
        own_count: int,
        unit_bytes: int,
        timeout_s: float,
        cancelled: Callable[[], bool],
        *,
        is_exact: bool = False,
    ) -> Charge | None:
        """Charge for one more part of a file that has `own_count` parts open.

        Return None if there is no memory for another part. The first part of a file is always
        granted, uncharged if there is no memory. Without `is_exact`, a part must leave room for
        other files. Block while the memory is in use, and raise as `Memory.charge`.
        """
        needed_bytes = (self._part_bytes or 3 * unit_bytes) + _UNITS_PER_PART * unit_bytes
        with self._lock:
            charged_bytes = self._charged_bytes + self._part_bytes
            fits = charged_bytes <= self._half_bytes
            if own_count >= _PARTS_WANTED and not is_exact:
                part_count_max = self._memory.limit_bytes // needed_bytes
                share = part_count_max // max(1, self._file_count)
                fits = (
                    # A quarter of it is left for files that are opened later.
                    charged_bytes <= self._half_bytes * 3 // 4
                    and self._part_count < part_count_max
                    and own_count < share
                )
            if own_count and not fits:
                return None
            charge = Charge(self, unit_bytes, self._part_bytes if fits else 0)
            self._part_count += 1
            self._charged_bytes += charge.charged_bytes
        if charge.charged_bytes:
            try:
                self._memory.charge(charge.charged_bytes, timeout_s, cancelled)
            except BaseException:
                self._uncount(charge.charged_bytes)
                raise
        return charge

    def settle(self, charge: Charge, unit_bytes: int, *, is_buffered: bool) -> None:
        """See `Charge.settle`."""
        needed_bytes = self._writer_bytes
        if not is_buffered:
            # For the part's thread, its packets, and its share of the unit that the file is
            # filling: without this, eight files at once exceeded the budget by 2 MiB per part.
            needed_bytes = min(needed_bytes, unit_bytes)
        with self._lock:
            self._part_bytes = needed_bytes
            change_bytes = needed_bytes - charge.charged_bytes
            if self._charged_bytes + change_bytes > self._half_bytes:
                return
        if change_bytes > 0 and not self._memory.try_charge(change_bytes):
            return
        with self._lock:
            self._charged_bytes += change_bytes
            charge.charged_bytes = needed_bytes
        if change_bytes < 0:
            self._memory.give(-change_bytes)

    def end_part(self, charge: Charge) -> None:
        """See `Charge.end`."""
        charged_bytes, charge.charged_bytes = charge.charged_bytes, 0
        self._uncount(charged_bytes)
        if charged_bytes:
            self._memory.give(charged_bytes)

    def _uncount(self, charged_bytes: int) -> None:
        with self._lock:
            self._part_count -= 1
            self._charged_bytes -= charged_bytes

    # ---- stripe units -------------------------------------------------------------------------

    def take_unit(
        self,
        pieces: list[Piece],
        length: int,
        first_block: int,
        timeout_s: float,
        cancelled: Callable[[], bool],
    ) -> Unit:
        """Charge `length` bytes and return the unit. Block and raise as `Memory.charge`."""
        self._memory.charge(length, timeout_s, cancelled)
        return Unit(pieces, length, first_block, self._memory)

    def hold(self, unit: Unit) -> bool:
        """Count a unit that the storage's writer still refers to; `end_hold` must follow.

        Return False if too much is held already. Then the unit counts as kept, although dropping
        it frees nothing yet.
        """
        with self._lock:
            # Held units and charges together may take at most 7/8 of the budget.
            rest_bytes = self._half_bytes * 7 // 4 - self._charged_bytes
            if self._held_bytes + unit.length > min(self._half_bytes, rest_bytes):
                return False
            self._held_bytes += unit.length
            return True

    def end_hold(self, count: int) -> None:
        """Note that storage writers do not refer to `count` held bytes any more."""
        with self._lock:
            self._held_bytes -= count

    def keep(self, unit: Unit) -> None:
        """Allow the memory of `unit` to be dropped when it is needed."""
        self._memory.offer(unit, Tier.KEPT)

    def take_back(self, unit: Unit) -> None:
        """Forbid dropping the memory of `unit`, unless it was dropped already."""
        self._memory.withdraw(unit)
        if unit.is_dropped:
            # Another thread may be about to drop it.
            unit.pieces = None

    def release(self, unit: Unit) -> None:
        """Return the memory of a unit that is not needed any more, if it still has any."""
        self.take_back(unit)
        if unit.pieces is not None:
            unit.pieces = None
            self._memory.give(unit.length)
