"""Writes one part: units in, one whole stored file out, past the failure of the storage.

Owns the thread of the part. When writing fails in a way that another server may not repeat, the
part is written again under a new name: from units that are still kept, and from what the failed
file durably holds, checked by the block checksums. A storage that takes nothing is waited for.
Thread-safe as said at each method.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import xxhash

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.writing.kept_units import KeptUnits, Unit
from bootseer.fuse.striped.writing.parts.placement import Placement
from bootseer.store.backend import KEEP_ALIVE_S, Backend, Piece, Writer
from bootseer.transfer.policy import UNTIL_DEADLINE, Attempts

_log = logging.getLogger(__name__)

_POLL_S = 0.2

# So many files may fail that had taken some of a part: two servers may die under one save. Those
# that failed before cost nothing, and are begun until the deadline.
_BEGUN_MAX = 4
# No other server would answer differently, or the caller's patience is used up already.
_FINAL = (
    AlreadyExistsError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    PermissionDeniedError,
    UnsupportedError,
)


class PartGroup(Protocol):
    """A segment in the making."""

    backend: Backend
    folder: str
    budget: MemoryBudget
    kept: KeptUnits
    placement: Placement
    counters: Counters
    unit_bytes: int
    block_bytes: int
    has_checksums: bool
    """Whether the readers of the parts check them by those that the segment has."""
    patience_s: float
    """How long the storage may be gone."""

    @property
    def failed(self) -> bool:
        """Whether nothing of it will be visible."""
        ...

    def note_progress(self) -> None:
        """Something moved: the deadline begins anew."""

    def note_outage(self, error: BaseException) -> None:
        """A part failed, and is going to be written again."""

    def fail(self, error: BaseException) -> None:
        """Nothing of the segment will be visible."""

    def part_begun(self, part: "PartWriter", *, is_buffered: bool) -> None:
        """Called by the part's thread when the first unit is in its file, which a client of the
        storage holds for us where it `is_buffered`; again with each other file."""

    def part_stored(self, servers: tuple[str, ...]) -> None:
        """A part is on these servers, which count as taken until all of them have ended."""

    def part_ended(self, part: "PartWriter") -> None:
        """Called once, by the part's thread, after its last use of the storage."""


class PartWriter:
    """One part: a queue of units, a thread, and a stored file."""

    def __init__(self, group: PartGroup, label: str, source: str, charge_bytes: int = 0) -> None:
        """`source` is what the part's bytes are counted under."""
        self.charge_bytes = charge_bytes
        """What the group has charged for it."""
        self.is_begun = False
        """Whether the group knows what it takes."""
        self.name = label
        """The name of the stored file; another one after a failure."""
        self.size_bytes = 0
        self.checksums: dict[int, int] = {}
        self.queue: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self.done = threading.Event()
        self._group = group
        self._label = label
        self._source = source
        self._writer: Writer | None = None
        self._servers: tuple[str, ...] = ()
        """The servers that take the file; counted in the group's placement."""
        self._units: list[Unit] = []
        self._sent_count = 0
        """How many of the units are in the file that is being written now."""
        self._recent: deque[Unit] = deque()
        """Units that the storage's writer itself may still hold: giving them up frees nothing."""
        self._recent_bytes = 0
        self._failed_names: list[str] = []
        self._unsettled: dict[str, Writer] = {}
        """The writers of those files whose end the storage has not made readable yet, by name."""
        self._begun_count = 1
        """Files that have taken something, the last one counted in any case."""
        self._outage: Attempts | None = None
        """The attempts since the storage has taken nothing."""
        self._cause: BaseException | None = None
        threading.Thread(target=self._run, name=f"stripe-part-{label}", daemon=True).start()

    def empty_queue(self) -> None:
        """Give back the memory of what was not begun. For the thread that sends."""
        with contextlib.suppress(queue.Empty):
            while (unit := self.queue.get_nowait()) is not None:
                self._group.kept.release(unit)
            # That was the end mark: the part's thread still needs it.
            self.queue.put(None)

    # ---- the part's thread ----------------------------------------------------------------

    def _run(self) -> None:
        group = self._group
        at_end = False
        try:
            while (unit := self._next()) is not None:
                if group.failed:
                    group.kept.release(unit)
                    continue
                self._units.append(unit)
                self._checksum(unit)
                self.size_bytes += unit.length
                self._until_done(self._send)
            at_end = True
            if self._units and not group.failed:
                self._until_done(self._close)
                self._remove_failed()
        except BaseException as error:
            # hdfs-native panics with exceptions that are no `Exception`.
            group.fail(error)
            while not at_end and (rest := self.queue.get()) is not None:
                group.kept.release(rest)
        finally:
            if self._writer is not None:
                self._writer.abort()
            self._leave_servers()
            self._forget_recent()
            for unit in self._units:
                group.kept.release(unit)
            group.part_ended(self)
            self.done.set()

    def _next(self) -> Unit | None:
        """The next unit, or None at the end; the storage is kept from forgetting us meanwhile."""
        while True:
            try:
                return self.queue.get(timeout=KEEP_ALIVE_S)
            except queue.Empty:
                if self._writer is not None and not self._group.failed:
                    self._until_done(self._writer.keep_alive)

    def _until_done(self, step: Callable[[], None]) -> None:
        """Make `step`, with another file where one fails. Raises what the last one failed with."""
        while True:
            try:
                step()
            except BaseException as error:
                pause_s = self._pause_s(error)
                if pause_s is None:
                    raise
                _log.warning(
                    "writing part %s of %s again, after: %s", self._label, self._group.folder, error
                )
                self._cause = error
                self._group.note_outage(error)
                self._begin_again()
            else:
                self._outage = None
                return
            self._wait(pause_s)

    def _pause_s(self, error: BaseException) -> float | None:
        """How long to wait before the part is begun again after `error`; None: it failed."""
        if self._group.failed or isinstance(error, _FINAL):
            return None
        if self._sent_count:
            if self._begun_count >= _BEGUN_MAX:
                return None
            self._begun_count += 1
            self._outage = None
        if self._outage is None:
            self._outage = Attempts(UNTIL_DEADLINE, self._group.patience_s)
        # hdfs-native panics with exceptions of its own; whatever it was, it may pass.
        return self._outage.pause_s(UnavailableError(str(error)))

    def _wait(self, pause_s: float) -> None:
        end_s = time.monotonic() + pause_s
        while not self._group.failed and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))

    def _begin_again(self) -> None:
        group = self._group
        writer, self._writer = self._writer, None
        self._leave_servers()
        self._forget_recent()
        for unit in self._units:
            group.kept.take(unit)
        if writer is not None:
            if not any(unit.pieces is None for unit in self._units):
                writer.abort()
            elif not writer.abandon():
                self._unsettled[self.name] = writer
        group.counters.add(write_retry_count=1)
        self._failed_names.append(self.name)
        self.name = f"{self._label}.{len(self._failed_names)}"
        self._sent_count = 0

    def _send(self) -> None:
        """Write all that is not in the file yet."""
        group = self._group
        while self._sent_count < len(self._units):
            unit = self._units[self._sent_count]
            # Looked at once: another thread may give the unit up at any time.
            pieces = unit.pieces or self._recall(unit)
            writer = self._writer or self._create()
            start_ns = time.monotonic_ns()
            writer.write_all(pieces, group.note_progress)
            busy_ns = time.monotonic_ns() - start_ns
            group.counters.add(written_bytes=unit.length, write_count=1, write_busy_ns=busy_ns)
            group.counters.add_for(self._source, written_bytes=unit.length, write_count=1)
            if not self._sent_count:
                self._settle(writer)
                group.part_begun(self, is_buffered=writer.is_buffered)
            self._sent_count += 1
            self._note_sent(unit, writer.held_bytes)

    def _create(self) -> Writer:
        """Begin the file, on a server that has not more of them than others."""
        group = self._group
        path = f"{group.folder}/{self.name}"
        self._writer = writer = group.backend.create(path)
        if group.has_checksums and not self._failed_names:
            writer.expect_checksums()
        if group.backend.traits.can_place:
            self._servers = group.placement.choose(
                writer.place, is_one_rack=group.backend.is_one_rack
            )
        return writer

    def _settle(self, writer: Writer) -> None:
        """Look where the file has come to lie: a server may be dead unnoticed."""
        group = self._group
        backend, path = group.backend, f"{group.folder}/{self.name}"
        if not backend.traits.can_place:
            return
        if not group.placement.block_bytes:
            group.placement.block_bytes = backend.stat(path).block_bytes
        if self._servers:
            self._servers = group.placement.settle(self._servers, writer.servers())

    def _leave_servers(self) -> None:
        self._group.placement.release(self._servers)
        self._servers = ()

    def _close(self) -> None:
        self._send()
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        if self._group.has_checksums:
            servers, self._servers = self._servers, ()
            self._group.part_stored(servers)
        self._group.note_progress()

    def _note_sent(self, unit: Unit, held_bytes: int) -> None:
        kept = self._group.kept
        if unit.pieces is None:
            return
        if not held_bytes or not kept.hold(unit.length):
            kept.keep(unit)
            return
        self._recent.append(unit)
        self._recent_bytes += unit.length
        while self._recent_bytes - self._recent[0].length >= held_bytes:
            oldest = self._recent.popleft()
            self._recent_bytes -= oldest.length
            kept.let_go(oldest.length)
            kept.keep(oldest)

    def _forget_recent(self) -> None:
        self._group.kept.let_go(self._recent_bytes)
        self._recent.clear()
        self._recent_bytes = 0

    def _recall(self, unit: Unit) -> list[Piece]:
        """The content of a unit that was given up, from a file that failed later."""
        group = self._group
        offset = self._sent_count * group.unit_bytes
        for name in reversed(self._failed_names):
            if name in self._unsettled and self._unsettled[name].abandon():
                del self._unsettled[name]
            with contextlib.suppress(BootseerError):
                data = group.backend.read(f"{group.folder}/{name}", offset, unit.length)
                if len(data) == unit.length and all(
                    self.checksums[block] == digest
                    for block, digest in block_checksums(
                        [data], unit.first_block, group.block_bytes
                    )
                ):
                    group.note_progress()
                    return [data]
        # What it had taken can be read from no other server: its failure is the file's.
        assert self._cause is not None
        raise self._cause

    def _remove_failed(self) -> None:
        for name in self._failed_names:
            # What stays goes with the folder, when the file is replaced or removed.
            with contextlib.suppress(BootseerError):
                self._group.backend.delete(f"{self._group.folder}/{name}")

    def _checksum(self, unit: Unit) -> None:
        assert unit.pieces is not None
        self.checksums.update(
            block_checksums(unit.pieces, unit.first_block, self._group.block_bytes)
        )


def block_checksums(pieces: list[Piece], block: int, block_bytes: int) -> list[tuple[int, int]]:
    """The number and checksum of each block, from number `block` on."""
    found = []
    room = block_bytes
    digest = xxhash.xxh3_64()
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest) >= room:
            digest.update(rest[:room])
            found.append((block, digest.intdigest()))
            digest.reset()
            rest = rest[room:]
            block, room = block + 1, block_bytes
        digest.update(rest)
        room -= len(rest)
    if room < block_bytes:
        found.append((block, digest.intdigest()))
    return found
