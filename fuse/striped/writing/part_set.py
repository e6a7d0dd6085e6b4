"""Parallel writing of the parts of one file.

A large file is cut into stripe units of a few MiB. A `PartSet` assigns the units to parts, each of
which is a stored file with its own thread (`part.PartWriter`), and waits until the storage has
confirmed all parts. The parts of one segment of the layout form a `Round`.

    OPEN --finish--> SEALED --every part is stored--> STORED
      +-----------------+--- a part fails, or abort --> FAILED --last thread ends--> REMOVED

A part fails for good only after it was written again several times (see `part`). Then the whole
file fails: `check`, `send` and `finish` raise the first error, no part becomes visible, and the
last part's thread deletes the folders.

Thread safety: one thread calls `send` and `finish`. Any thread may call `abort` and `check`. One
condition guards the state; no call to the storage is made under it.
"""

import contextlib
import enum
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from msgspec import Struct

from bootseer.errors import BootseerError, DeadlineError, InvalidInputError, UnavailableError
from bootseer.fuse.striped.layout import MAX_BLOCK_COUNT, PartFile, Segment, pack_checksums
from bootseer.fuse.striped.names.striped_tree import StripedTree
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.view import generation_folder, new_generation
from bootseer.fuse.striped.writing.part import PartWriter
from bootseer.fuse.striped.writing.write_memory import Charge, WriteMemory
from bootseer.store.backend import Backend, FileGroup, Piece

Result = TypeVar("Result")
_POLL_S = 0.2


class WriterResources(Struct, frozen=True, eq=False):
    """Shared objects that each `FileWriter` of a storage uses."""

    backend: Backend
    tree: StripedTree
    """Publishes the files."""
    memory: WriteMemory
    counters: Counters


class UnitAssignment(Struct, frozen=True):
    """The rule that assigns stripe units to parts.

    With `run_units=None`, consecutive units go to consecutive parts (striped files). Otherwise each
    part takes `run_units` consecutive units and is closed when it has them (plain files, objects).
    Pure.
    """

    unit_bytes: int
    block_bytes: int
    """Number of bytes that one checksum covers."""
    width: int
    """Number of parts that are written at once, if there is enough memory for them."""
    is_exact: bool = False
    """Whether the user asked for this width. If so, a write fails rather than use fewer parts."""
    run_units: int | None = None
    is_striped: bool = True
    """Whether the parts become a segment of a layout, which has their checksums; otherwise they
    become an ordinary file."""
    parts_max: int | None = None
    """Number of runs after which a round is full; None: there is no limit."""

    def ends_run(self, size_bytes: int) -> bool:
        """Return whether the last part of a round of `size_bytes` has all of its units."""
        run = self.run_units
        return run is not None and size_bytes % (run * self.unit_bytes) == 0

    def round_max_bytes(self, storage_block_bytes: int, width: int) -> float:
        """Return the size at which a round with `width` parts is full.

        `storage_block_bytes`: block size of the storage; 0 if the storage has no blocks, or does
        not tell their size.
        """
        if self.run_units is not None:
            if self.parts_max is None:
                return float("inf")
            return self.parts_max * self.run_units * self.unit_bytes
        limit = MAX_BLOCK_COUNT * self.block_bytes // self.unit_bytes * self.unit_bytes
        if storage_block_bytes:
            # A part of one block stays on the server that was chosen for it, and its HDFS client
            # never has to begin a second block.
            units = max(1, storage_block_bytes // self.unit_bytes)
            limit = min(limit, units * self.unit_bytes * width)
        return limit


class Round:
    """A group of parts that becomes one segment of a striped file, or the runs of a plain file."""

    def __init__(self, directory: str, width: int, files: FileGroup) -> None:
        self.generation = new_generation()
        self.folder = generation_folder(directory, self.generation)
        self.size_bytes = 0
        self.width = width
        """Number of parts among which consecutive units alternate."""
        self.parts: list[PartWriter] = []
        self.open_count = 0
        """Number of parts whose threads use the storage."""
        self.files = files
        """File group of a striped file, whose parts are all open at once."""

    def paths(self) -> list[str]:
        """Return the paths of the parts, in order. Call it after `PartSet.finish`."""
        return [f"{self.folder}/{part.name}" for part in self.parts]

    def segment(self, assignment: UnitAssignment) -> Segment:
        """Return the layout entry of this round. Call it after `PartSet.finish`."""
        checksums: dict[int, int] = {}
        for part in self.parts:
            checksums.update(part.checksums)
        width = len(self.parts)
        unit_count = -(-self.size_bytes // assignment.unit_bytes)
        return Segment(
            self.generation,
            self.size_bytes,
            assignment.unit_bytes,
            assignment.block_bytes,
            tuple(PartFile(part.name, part.size_bytes) for part in self.parts),
            pack_checksums([checksums[block] for block in range(len(checksums))]),
            b"".join(self.parts[n % width].digests[n // width] for n in range(unit_count)),
        )


class PartSetState(enum.Enum):
    """State of a set of parts; see the diagram above."""

    OPEN = enum.auto()
    SEALED = enum.auto()
    STORED = enum.auto()
    FAILED = enum.auto()
    REMOVED = enum.auto()


class PartSet:
    """The parts of one file, from its first unit until all parts are stored."""

    def __init__(
        self, shared: WriterResources, path: str, assignment: UnitAssignment, deadline_s: float
    ) -> None:
        """`path`: the file. `deadline_s`: longest time without progress."""
        self.shared = shared
        self.assignment = assignment
        self.deadline_s = deadline_s
        self.has_checksums = assignment.is_striped
        """Whether readers check the parts by our checksums."""
        self.state = PartSetState.OPEN
        self._directory = path.rpartition("/")[0]
        self._rounds: list[Round] = []
        self._changed = threading.Condition()
        self._event_count = 0
        """Count of events: a part has settled its charge, ended or failed."""
        self._error: BaseException | None = None
        self._outage: BaseException | None = None
        """Latest failure of the storage; None if it has taken bytes since."""
        self._progress_s = time.monotonic()
        shared.memory.begin_file()

    # ---- for the thread that writes -----------------------------------------------------------

    def send(self, pieces: list[Piece], length: int, cancelled: Callable[[], bool]) -> None:
        """Queue the next stripe unit. Only the last unit before `finish` may be short.

        Block while the memory budget is used up. Raise DeadlineError if no part makes progress for
        `deadline_s`, InterruptedError if `cancelled()` returns true, or the error of a failed part.
        """
        self.check()
        assignment, memory = self.assignment, self.shared.memory
        part_round = self._round_of_next()
        unit = self._with_memory(
            lambda: memory.take_unit(
                pieces,
                length,
                part_round.size_bytes // assignment.block_bytes,
                self.deadline_s,
                lambda: cancelled() or self.has_failed,
            )
        )
        try:
            part = self._part_of_next(part_round, cancelled)
        except BaseException:
            memory.release(unit)
            raise
        part_round.size_bytes += length
        part.queue.put(unit)
        if self.has_failed:
            # The part's thread may have ended before.
            part.discard_queue()
        elif assignment.ends_run(part_round.size_bytes):
            part.queue.put(None)

    def finish(self) -> list[Round]:
        """Close all parts, wait until their bytes are durable, and return the rounds in order.

        Raise DeadlineError if no part makes progress for `deadline_s`, or the error of a failed
        part.
        """
        with self._changed:
            if self.state is PartSetState.OPEN:
                self.state = PartSetState.SEALED
                self._end_round()
            self.note_progress()
            while self._open_count() and not self.has_failed:
                self._changed.wait(_POLL_S)
                if self._is_late():
                    self.fail(self._deadline_error())
            if not self.has_failed:
                self.state = PartSetState.STORED
                self.shared.memory.end_file()
        self.check()
        return self._rounds

    def abort(self, wait_s: float = 0.0) -> None:
        """Discard the file. Wait at most `wait_s` seconds for threads that are inside a write."""
        self.fail(InterruptedError("the file was given up"))
        end_s = time.monotonic() + wait_s
        for each in self._rounds:
            for part in each.parts:
                part.ended.wait(max(0.0, end_s - time.monotonic()))

    def check(self) -> None:
        """Raise the error of the first part that failed, if there is one."""
        error = self._error
        if error is None:
            return
        if isinstance(error, BootseerError | OSError):
            raise error
        raise UnavailableError(
            f"cannot write {self._directory or '/'}: {type(error).__name__}: {error}"
        ) from error

    @property
    def has_failed(self) -> bool:
        """Whether the file will not become visible."""
        return self._error is not None

    # ---- for the parts' threads ---------------------------------------------------------------

    def note_progress(self) -> None:
        """Restart the deadline after the storage took bytes."""
        self._outage = None
        self._progress_s = time.monotonic()

    def note_outage(self, error: BaseException) -> None:
        """Note the error after which a part is written again."""
        self._outage = error

    def note_event(self) -> None:
        """Wake the thread that waits for parts, after a part has settled its charge or ended."""
        with self._changed:
            self._event_count += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Discard the file because of `error`, unless it is stored or has failed already."""
        with self._changed:
            if self.has_failed or self.state is PartSetState.STORED:
                return
            self._error = error
            self.state = PartSetState.FAILED
            self.shared.memory.end_file()
            for each in self._rounds:
                for part in each.parts:
                    # A part that is stuck in a dead server must not keep the mount's memory.
                    part.discard_queue()
            self.note_event()
            must_remove = not self._open_count()
        if must_remove:
            self._remove_folders()

    def part_ended(self, part: PartWriter) -> None:
        """Note that the thread of `part` does not use the storage any more."""
        part_round = part.round
        with self._changed:
            part_round.open_count -= 1
            is_last = self.state is not PartSetState.OPEN or part_round is not self._rounds[-1]
            if part.files is not part_round.files or (is_last and not part_round.open_count):
                part.files.end()
            self.note_event()
            must_remove = self.state is PartSetState.FAILED and not self._open_count()
        if must_remove:
            self._remove_folders()

    # ---- which part takes the next unit -------------------------------------------------------

    def _round_of_next(self) -> Round:
        """Return the round of the next unit; begin a new round if the last one is full."""
        if self._rounds:
            part_round = self._rounds[-1]
            block_bytes = part_round.files.block_bytes
            if part_round.size_bytes < self.assignment.round_max_bytes(
                block_bytes, part_round.width
            ):
                return part_round
        with self._changed:
            self._end_round()
            self._rounds.append(
                Round(self._directory, self.assignment.width, self.shared.backend.group())
            )
            return self._rounds[-1]

    def _end_round(self) -> None:
        """Send the end mark to the parts of the last round, which ignore a second mark."""
        for part in self._rounds[-1].parts if self._rounds else ():
            part.queue.put(None)

    def _part_of_next(self, part_round: Round, cancelled: Callable[[], bool]) -> PartWriter:
        """Return the part that takes the next unit; begin it if the unit is its first."""
        number = part_round.size_bytes // self.assignment.unit_bytes
        run = self.assignment.run_units
        if run is not None:
            if number // run == len(part_round.parts):
                self._begin_part(part_round, self._wait_for_a_place(part_round, cancelled))
            return part_round.parts[number // run]
        if len(part_round.parts) == number < part_round.width:
            charge = self._charge(part_round, number, cancelled)
            if charge is not None:
                self._begin_part(part_round, charge)
            elif self.assignment.is_exact:
                raise InvalidInputError(
                    f"{self.shared.memory.limit_bytes} bytes of memory are too few to write "
                    f"{part_round.width} parts at once to {self.shared.backend.url}: give more "
                    "(BOOTSEER_MEMORY), or ask for fewer parts"
                )
            else:
                part_round.width = number
        return part_round.parts[number % part_round.width]

    def _begin_part(self, part_round: Round, charge: Charge) -> None:
        index = len(part_round.parts)
        source = f"part {index % self.assignment.width:02x}"
        # Runs begin one by one, so each gets a file group of its own.
        files = (
            part_round.files if self.assignment.run_units is None else self.shared.backend.group()
        )
        part = PartWriter(self, part_round, files, f"{index:02x}", source, charge)
        try:
            with self._changed:
                self.check()
                part.start()
                part_round.parts.append(part)
                part_round.open_count += 1
        except BaseException:
            charge.end()
            raise

    def _charge(
        self, part_round: Round, own_count: int, cancelled: Callable[[], bool]
    ) -> Charge | None:
        """Charge for one more part of `part_round`; return None if there is no memory for it.

        Block while other parts of this file may still reduce their charges or end.
        """
        self.note_progress()
        while True:
            seen_count = self._event_count
            charge = self._with_memory(
                lambda: self.shared.memory.begin_part(
                    own_count,
                    self.assignment.unit_bytes,
                    self.deadline_s,
                    lambda: cancelled() or self.has_failed,
                    is_exact=self.assignment.is_exact,
                )
            )
            if charge is not None:
                return charge
            with self._changed:
                is_settled = all(
                    part.charge.is_settled or part.ended.is_set() for part in part_round.parts
                )
                if is_settled and self._open_count() == part_round.open_count:
                    return None
                self._wait(partial(self._has_event_since, seen_count), cancelled)

    def _wait_for_a_place(self, part_round: Round, cancelled: Callable[[], bool]) -> Charge:
        """Wait until one more part may be written; return its charge."""
        self.note_progress()
        while True:
            with self._changed:
                self._wait(partial(self._is_below, part_round, part_round.width), cancelled)
                own_count = part_round.open_count
            charge = self._charge(part_round, own_count, cancelled)
            if charge is not None:
                return charge
            with self._changed:
                self._wait(partial(self._is_below, part_round, own_count), cancelled)

    # ---- waiting ------------------------------------------------------------------------------

    def _wait(self, until: Callable[[], bool], cancelled: Callable[[], bool]) -> None:
        """Wait until `until()` returns True; `_changed` is held. Raise as `send`."""
        while not until():
            self.check()
            self._changed.wait(_POLL_S)
            if cancelled():
                raise InterruptedError
            if self._is_late():
                raise self._deadline_error()

    def _has_event_since(self, event_count: int) -> bool:
        return self._event_count > event_count

    def _is_below(self, part_round: Round, open_count: int) -> bool:
        return part_round.open_count < open_count

    def _with_memory(self, take: Callable[[], Result]) -> Result:
        """Call `take`, which waits for memory; if its deadline passes, the file fails."""
        try:
            return take()
        except InterruptedError:
            self.check()
            raise
        except DeadlineError as error:
            self.fail(error)
            raise

    def _is_late(self) -> bool:
        return time.monotonic() - self._progress_s > self.deadline_s

    def _deadline_error(self) -> BaseException:
        last = self._rounds[-1]
        name = last.parts[-1].name if last.parts else ""
        return self._outage or DeadlineError(
            f"cannot write {last.folder}/{name}: no answer from {self.shared.backend.url} within "
            f"{self.deadline_s:.0f} s"
        )

    def _open_count(self) -> int:
        return sum(each.open_count for each in self._rounds)

    def _remove_folders(self) -> None:
        for each in self._rounds:
            # A folder that stays is garbage, which fsck finds; the writer's error matters more.
            with contextlib.suppress(Exception):
                self.shared.backend.delete(each.folder, recursive=True)
        self.state = PartSetState.REMOVED
