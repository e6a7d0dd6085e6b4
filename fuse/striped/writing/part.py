"""Parts of a file that is being written. The thread of a part stores its units in one stored file.

    NO_FILE --create--> WRITING --last unit, close--> STORED
       ^                   |
       |                failure
       |                   v
       +---pause--- BACKING_OFF     any state --permanent failure, or the part set failed--> FAILED

After a failure that another server may not have (BACKING_OFF), the part is written again, to a file
with a new name. The bytes come from units that are still in memory, and otherwise from the failed
file, checked against the block checksums. Up to four files of a part may fail after they took
bytes. While the storage takes no bytes, attempts are repeated until the deadline.

Thread safety: the part's own thread runs the states. `queue` and `discard_queue` are for the
sending thread; any thread may read the other public attributes.
"""

import contextlib
import enum
import logging
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import xxhash

from bootseer.base.content_digest import ContentHasher
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.fuse.striped.writing.write_memory import Charge, Unit, WriteMemory
from bootseer.store.backend import KEEP_ALIVE_S, FileGroup, Piece, Writer
from bootseer.transfer.policy import UNTIL_DEADLINE, WRONG_ATTEMPTS, Attempts

if TYPE_CHECKING:
    from bootseer.fuse.striped.writing.part_set import PartSet, Round

_log = logging.getLogger(__name__)

_POLL_S = 0.2
# Files of one part that may take bytes: two servers may die during one save.
_FILES_MAX = 4
# Errors after which a part is not written again: every server would give the same answer, or the
# deadline has passed.
_FINAL_ERRORS = (
    AlreadyExistsError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    PermissionDeniedError,
    UnsupportedError,
)


class PartState(enum.Enum):
    """State of a part; see the diagram above."""

    NO_FILE = enum.auto()
    WRITING = enum.auto()
    BACKING_OFF = enum.auto()
    STORED = enum.auto()
    FAILED = enum.auto()


class _File:
    """Stored file of one attempt to write a part."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.writer: Writer | None = None
        """None before the file is created, and after the file is closed or abandoned."""
        self.sent_count = 0
        """Number of units that the writer has taken."""
        self._held: deque[Unit] = deque()
        self._held_bytes = 0

    def note_sent(self, unit: Unit, writer_held_bytes: int, memory: WriteMemory) -> None:
        """Count a sent unit. Its memory may be dropped once the writer no longer refers to it."""
        self.sent_count += 1
        if unit.pieces is None:
            return
        if not writer_held_bytes or not memory.hold(unit):
            memory.keep(unit)
            return
        self._held.append(unit)
        self._held_bytes += unit.length
        while self._held_bytes - self._held[0].length >= writer_held_bytes:
            oldest = self._held.popleft()
            self._held_bytes -= oldest.length
            memory.end_hold(oldest.length)
            memory.keep(oldest)

    def end_holding(self, memory: WriteMemory) -> None:
        """Note that the writer has ended, so that it refers to no unit any more."""
        memory.end_hold(self._held_bytes)
        self._held.clear()
        self._held_bytes = 0


class PartWriter:
    """Writer of one part: a queue of units, a thread, and a stored file."""

    def __init__(
        self,
        owner: "PartSet",
        part_round: "Round",
        files: FileGroup,
        label: str,
        source: str,
        charge: Charge,
    ) -> None:
        """Make a part, whose thread starts with `start`.

        Args:
            owner: The set that the part belongs to.
            part_round: The round that the part belongs to.
            files: Creates the stored files.
            label: Name of the file in the folder of `part_round`.
            source: Name that the part's bytes are counted under.
            charge: Memory of the storage's writer.
        """
        self.state = PartState.NO_FILE
        self.round = part_round
        self.files = files
        self.charge = charge
        self.name = label
        """Name of the stored file. It differs from the label after a failure."""
        self.size_bytes = 0
        self.checksums: dict[int, int] = {}
        """Checksum of each block, by its number in the segment."""
        self.digests: list[bytes] = []
        """BLAKE3 digest of each unit of the part, in order; none if no reader uses checksums."""
        self.queue: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        """Units to store. None marks the end."""
        self.ended = threading.Event()
        self._owner = owner
        self._shared = owner.shared
        self._label = label
        self._source = source
        self._units: list[Unit] = []
        self._is_complete = False
        """Whether the last unit was taken from the queue."""
        self._file: _File | None = None
        self._failed_files: list[_File] = []
        self._file_count = 1
        """Number of files that took bytes, counting the current one."""
        self._outage: Attempts | None = None
        """Attempts since the storage last took bytes."""
        self._pause_s = 0.0
        self._cause: BaseException | None = None
        """Error of the last failed file."""
        self._wrong_count = 0
        """Count of reads of failed files whose bytes did not match their checksums."""
        self._is_lost = False
        """Whether some bytes are neither in memory nor in a failed file."""

    def start(self) -> None:
        """Start the thread. Raises: RuntimeError if the system allows no more threads."""
        name = f"stripe-part-{self._label}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def discard_queue(self) -> None:
        """Release the units that the thread has not taken, and leave an end mark for it."""
        with contextlib.suppress(queue.Empty):
            while True:
                unit = self.queue.get_nowait()
                if unit is not None:
                    self._shared.memory.release(unit)
        self.queue.put(None)

    # ---- the states, on the part's thread -----------------------------------------------------

    def _run(self) -> None:
        try:
            while self.state is not PartState.STORED and not self._owner.has_failed:
                try:
                    self._step()
                except BaseException as error:
                    # Panics of hdfs-native are not of type `Exception`.
                    if not self._may_try_again(error):
                        raise
                    self._give_up_file(error)
        except BaseException as error:
            self._owner.fail(error)
        finally:
            self._end()

    def _step(self) -> None:
        if self.state is PartState.BACKING_OFF:
            self._wait_to_begin_again()
            self.state = PartState.NO_FILE
        elif self._file is None:
            if not self._units and not self._take_unit():
                self.state = PartState.STORED  # The part has no units.
                return
            self._file = _File(self.name)
            self._file.writer = self.files.create(
                self._path_of(self.name),
                # After a failure the storage's own checksums are used as well.
                is_checked=self._owner.has_checksums and not self._failed_files,
            )
            self.state = PartState.WRITING
        elif self._file.sent_count < len(self._units):
            self._send(self._file, self._units[self._file.sent_count])
        elif not self._is_complete:
            self._take_unit()
        else:
            self._close(self._file)
            self.state = PartState.STORED

    def _take_unit(self) -> bool:
        """Wait for the next unit; return False at the end. Keep the storage's writer alive."""
        while True:
            try:
                unit = self.queue.get(timeout=KEEP_ALIVE_S)
                break
            except queue.Empty:
                if self._file is not None and self._file.writer is not None:
                    self._file.writer.keep_alive()
        if unit is None:
            self._is_complete = True
            return False
        self._units.append(unit)
        self.size_bytes += unit.length
        assert unit.pieces is not None
        block_bytes = self._owner.assignment.block_bytes
        self.checksums.update(block_checksums(unit.pieces, unit.first_block, block_bytes))
        if self._owner.has_checksums:
            hasher = ContentHasher()
            for piece in unit.pieces:
                hasher.update(piece)
            self.digests.append(hasher.digest())
        return True

    def _send(self, file: _File, unit: Unit) -> None:
        # Read once: another thread may take the unit's memory at any time.
        pieces = unit.pieces or self._read_back(file, unit)
        writer = file.writer
        assert writer is not None, "the state WRITING has one"
        start_ns = time.monotonic_ns()
        writer.write_all(pieces, self._owner.note_progress)
        busy_ns = time.monotonic_ns() - start_ns
        counters = self._shared.counters
        counters.add(written_bytes=unit.length, write_count=1, write_busy_ns=busy_ns)
        counters.add_for(self._source, written_bytes=unit.length, write_count=1)
        if not file.sent_count:
            self.charge.settle(is_buffered=writer.is_buffered)
            self._owner.note_event()
            self._outage = None
        file.note_sent(unit, writer.held_bytes, self._shared.memory)

    def _close(self, file: _File) -> None:
        assert file.writer is not None
        file.writer.close()
        file.writer = None
        self._owner.note_progress()
        for failed in self._failed_files:
            # A file that cannot be deleted now is deleted later, together with its folder.
            with contextlib.suppress(Exception):
                self._shared.backend.delete(self._path_of(failed.name))

    def _end(self) -> None:
        """Release all memory and discard an unfinished file. The thread ends after this."""
        memory = self._shared.memory
        is_stored = self.state is PartState.STORED
        if self._file is not None:
            if self._file.writer is not None:
                self._file.writer.abort()
            self._file.end_holding(memory)
        if not is_stored:
            self.state = PartState.FAILED
            self.discard_queue()
        for unit in self._units:
            memory.release(unit)
        self.charge.end()
        self._owner.part_ended(self)
        self.ended.set()

    # ---- failures -----------------------------------------------------------------------------

    def _may_try_again(self, error: BaseException) -> bool:
        """Return whether the part is written again after `error`; set the pause before that."""
        if self._owner.has_failed or self._is_lost or isinstance(error, _FINAL_ERRORS):
            return False
        if self._file is not None and self._file.sent_count:
            if self._file_count >= _FILES_MAX:
                return False
            self._file_count += 1
            self._outage = None
        if self._outage is None:
            self._outage = Attempts(UNTIL_DEADLINE, self._owner.deadline_s)
        # An error of any type may be temporary: hdfs-native has exceptions of its own.
        pause_s = self._outage.pause_s(UnavailableError(str(error)))
        self._pause_s = pause_s or 0.0
        return pause_s is not None

    def _give_up_file(self, error: BaseException) -> None:
        """Leave the current file, from which units that are not in memory may be read back."""
        _log.warning(
            "writing part %s of %s again, after: %s", self._label, self.round.folder, error
        )
        self._cause = error
        self._owner.note_outage(error)
        self._shared.counters.add(write_retry_count=1)
        self.state = PartState.BACKING_OFF
        memory = self._shared.memory
        for unit in self._units:
            memory.take_back(unit)
        file, self._file = self._file, None
        if file is None:
            return
        file.end_holding(memory)
        if file.writer is None:
            pass  # The file was probably not created.
        elif all(unit.pieces is not None for unit in self._units):
            file.writer.abort()
            file.writer = None
        elif file.writer.abandon():
            file.writer = None
        self._failed_files.append(file)
        self.name = f"{self._label}.{len(self._failed_files)}"

    def _wait_to_begin_again(self) -> None:
        end_s = time.monotonic() + self._pause_s
        while not self._owner.has_failed and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))

    def _read_back(self, file: _File, unit: Unit) -> list[Piece]:
        """Return the bytes of a unit that is not in memory any more, from a file that failed."""
        offset = file.sent_count * self._owner.assignment.unit_bytes
        may_come_later = False
        for failed in reversed(self._failed_files):
            if failed.writer is not None:
                # If the storage did not answer, missing bytes of the file may appear later.
                if failed.writer.abandon():
                    failed.writer = None
                else:
                    may_come_later = True
            try:
                data = self._shared.backend.read(self._path_of(failed.name), offset, unit.length)
            except NotFoundError:
                continue
            except BootseerError:
                may_come_later = True
                continue
            if len(data) == unit.length:
                if self._matches(data, unit):
                    self._owner.note_progress()
                    return [data]
                # Another replica may be intact.
                self._wrong_count += 1
                may_come_later |= self._wrong_count < WRONG_ATTEMPTS
        self._is_lost = not may_come_later
        assert self._cause is not None, "units leave memory only after they were sent"
        raise self._cause

    def _matches(self, data: bytes, unit: Unit) -> bool:
        block_bytes = self._owner.assignment.block_bytes
        return all(
            self.checksums[block] == checksum
            for block, checksum in block_checksums([data], unit.first_block, block_bytes)
        )

    def _path_of(self, name: str) -> str:
        return f"{self.round.folder}/{name}"


def block_checksums(pieces: list[Piece], block: int, block_bytes: int) -> list[tuple[int, int]]:
    """Return the number and checksum of each block, from number `block` on. Pure."""
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
