"""Writes one segment: units in, parts out, in parallel, within the mount's memory.

Owns which unit goes to which part, and the temporary folder of its generation; each part has a
thread of its own (`part_writer`). `send`, `seal` and `finish` are for one thread; `abort` may be
called from any. When a part cannot be written the segment fails: nothing of it becomes visible, and
its folder is removed when the last thread has let go.
"""

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from bootseer.errors import DeadlineError, InvalidInputError
from bootseer.fuse.striped.layout import Part, Segment, pack_checksums
from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.names.stored import new_generation
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.view import generation_folder
from bootseer.fuse.striped.writing.kept_units import KeptUnits, Unit
from bootseer.fuse.striped.writing.parts.open_parts import OpenParts
from bootseer.fuse.striped.writing.parts.part_writer import PartWriter
from bootseer.fuse.striped.writing.parts.parts_watch import PartsWatch
from bootseer.fuse.striped.writing.parts.placement import Placement
from bootseer.fuse.striped.writing.parts.unit_assignment import UnitAssignment
from bootseer.store.backend import Backend, Piece

Result = TypeVar("Result")


class SegmentWriter:
    """A segment in the making."""

    def __init__(
        self,
        backend: Backend,
        directory: str,
        kept: KeptUnits,
        open_parts: OpenParts,
        placement: Placement,
        budget: MemoryBudget,
        counters: Counters,
        assignment: UnitAssignment,
        patience_s: float,
        follows: "SegmentWriter | None" = None,
    ) -> None:
        """`follows`: a sealed segment of the same file."""
        self.generation = new_generation()
        self.size_bytes = 0
        self.unit_bytes = assignment.unit_bytes
        self.block_bytes = assignment.block_bytes
        self.backend = backend
        self.folder = generation_folder(directory, self.generation)
        self.budget = budget
        self.kept = kept
        self.placement = placement
        self.counters = counters
        # Runs become an ordinary file, which others read.
        self.has_checksums = assignment.run_units is None
        self._assignment = assignment
        self._writers_max = assignment.writers_max
        self._open_parts = open_parts
        self._follows = follows
        self._parts: list[PartWriter] = []
        self.patience_s = patience_s
        self._watch = PartsWatch(self._parts, self.folder, backend.url, patience_s)
        self._stored_on: list[tuple[str, ...]] = []
        self._sealed = False

    @property
    def is_full(self) -> bool:
        """Whether the next unit must go to another segment."""
        return self.size_bytes >= self._assignment.limit_bytes(
            self.placement.block_bytes, self._writers_max
        )

    def send(self, pieces: list[Piece], length: int, cancelled: Callable[[], bool]) -> None:
        """Hand over the next unit; full, but for the last one of the segment.

        Waits while the mount's memory is used up. Raises what a part failed with, DeadlineError,
        InterruptedError.
        """
        self.check()
        self._with_memory(
            lambda: self.budget.take(length, self.patience_s, lambda: cancelled() or self.failed)
        )
        unit = Unit(pieces, length, self.size_bytes // self.block_bytes)
        try:
            part = self._part_of_next(cancelled)
        except BaseException:
            self.kept.release(unit)
            raise
        self.size_bytes += length
        part.queue.put(unit)
        if self._assignment.ends_part(self.size_bytes):
            part.queue.put(None)

    def seal(self) -> None:
        """No more units will come."""
        with self._watch.changed:
            if self._sealed:
                return
            self._sealed = True
        for part in self._parts:
            # A part that has its end already has no use for another one.
            part.queue.put(None)

    def finish(self) -> Segment:
        """Finishes all parts, and returns the segment for the layout."""
        self.finish_parts()
        checksums: dict[int, int] = {}
        for part in self._parts:
            checksums.update(part.checksums)
        return Segment(
            self.generation,
            self.size_bytes,
            self.unit_bytes,
            self.block_bytes,
            tuple(Part(part.name, part.size_bytes) for part in self._parts),
            pack_checksums([checksums[block] for block in range(len(checksums))]),
        )

    def finish_parts(self) -> list[str]:
        """Close every part; returns their paths, in order, when all bytes are durable.

        Raises what a part failed with, or DeadlineError when nothing moved for the deadline.
        """
        self.seal()
        self._watch.wait_for_all()
        self.check()
        return [f"{self.folder}/{part.name}" for part in self._parts]

    def abort(self, wait_s: float = 0.0) -> None:
        """Give up: nothing of the segment stays, as soon as its threads come to it.

        Waits for them at most `wait_s`.
        """
        self.fail(InterruptedError("given up"))
        for part in self._parts:
            # A part that is stuck in a dead server must not keep the mount's memory.
            part.empty_queue()
        self.seal()
        with self._watch.changed:
            if self._watch.have_all_ended:
                self._remove_folder()
        deadline = time.monotonic() + wait_s
        for part in self._parts:
            part.done.wait(max(0.0, deadline - time.monotonic()))

    def check(self) -> None:
        """Raise what a part failed with."""
        if self.failed:
            self.seal()
        self._watch.check()

    # ---- for the part threads -------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether nothing of the segment will be visible."""
        return self._watch.failed

    def note_progress(self) -> None:
        self._watch.note_progress()

    def note_outage(self, error: BaseException) -> None:
        self._watch.note_outage(error)

    def fail(self, error: BaseException) -> None:
        self._watch.fail(error)

    def part_begun(self, part: PartWriter, *, is_buffered: bool) -> None:
        part.charge_bytes = self._open_parts.settle(
            part.charge_bytes, self.unit_bytes, is_buffered=is_buffered
        )
        self._watch.note_begun(part)

    def part_stored(self, servers: tuple[str, ...]) -> None:
        with self._watch.changed:  # a short one may end before others are placed
            self._stored_on.append(servers)

    def part_ended(self, part: PartWriter) -> None:
        self._open_parts.end(part.charge_bytes)
        watch = self._watch
        with watch.changed:
            watch.ended_count += 1
            watch.changed.notify_all()
            if self._sealed and watch.have_all_ended:
                while self._stored_on:
                    self.placement.release(self._stored_on.pop())
                if self.failed:
                    self._remove_folder()

    # ---- inside ---------------------------------------------------------------------------

    def _part_of_next(self, cancelled: Callable[[], bool]) -> PartWriter:
        """The part that the next unit belongs to; begins it where the unit is its first."""
        number = self.size_bytes // self.unit_bytes
        is_round_robin = self._assignment.run_units is None
        if is_round_robin and len(self._parts) == number < self._writers_max:
            charge_bytes = self._charge(number, cancelled)
            if charge_bytes is not None:
                return self._begin_part(charge_bytes)
            # No memory for another one: units are dealt to those that there are.
            if self._assignment.is_asked_for:
                raise InvalidInputError(
                    f"{self.budget.limit_bytes} bytes of memory are too few to write "
                    f"{self._writers_max} parts at once to {self.backend.url}: give more "
                    "(BOOTSEER_MEMORY), or ask for fewer parts"
                )
            self._writers_max = number
        index = self._assignment.part_of(number, self._writers_max)
        if index == len(self._parts):
            return self._begin_part(self._wait_for_a_place(cancelled))
        return self._parts[index]

    def _begin_part(self, charge_bytes: int) -> PartWriter:
        index = len(self._parts)
        source = f"part {index % self._assignment.writers_max:02x}"
        try:
            part = PartWriter(self, f"{index:02x}", source, charge_bytes)
        except BaseException:
            self._open_parts.end(charge_bytes)
            raise
        self._parts.append(part)
        return part

    def _with_memory(self, take: Callable[[], Result]) -> Result:
        """What `take` returns, which waits for memory; where that ends, so does the segment."""
        try:
            return take()
        except InterruptedError:
            self.check()
            raise
        except DeadlineError as error:
            self.fail(error)
            raise

    def _charge(self, own_count: int, cancelled: Callable[[], bool]) -> int | None:
        """As `OpenParts.begin`; the parts of the segment before are waited for where they take the
        memory that this one needs."""
        while True:
            charge_bytes = self._with_memory(
                lambda: self._open_parts.begin(
                    own_count,
                    self.unit_bytes,
                    self.patience_s,
                    lambda: cancelled() or self.failed,
                    is_asked_for=self._assignment.is_asked_for,
                )
            )
            if charge_bytes is not None:
                return charge_bytes
            if self._watch.wait_for_a_beginning(cancelled):
                self.check()
                continue
            if self._follows is None:
                return None
            if not self._follows.wait_for_an_end(cancelled):
                self._follows = None

    def wait_for_an_end(self, cancelled: Callable[[], bool]) -> bool:
        """Wait until one more part has ended; False if all have. Raises as `finish_parts`."""
        has_waited = self._watch.wait_for_an_end(cancelled)
        self.check()
        return has_waited

    def _wait_for_a_place(self, cancelled: Callable[[], bool]) -> int:
        """Wait until the next of the parts that are written at once may begin; its charge."""
        watch = self._watch
        watch.note_progress()
        while True:
            own_count = watch.open_count
            if own_count < self._writers_max:
                charge_bytes = self._charge(own_count, cancelled)
                if charge_bytes is not None:
                    return charge_bytes
            with watch.changed:
                if watch.open_count == own_count:
                    watch.wait_for_change(cancelled)
            self.check()

    def _remove_folder(self) -> None:
        # What cannot be removed now is garbage that fsck names; the writer's error matters more.
        with contextlib.suppress(Exception):
            self.backend.delete(self.folder, recursive=True)
