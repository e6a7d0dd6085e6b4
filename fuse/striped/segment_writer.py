"""Writes one segment: units in, parts out, in parallel, within the mount's memory.

Owns the threads that write parts (one per part) and the temporary folder of its generation. `send`
and `finish` are for one thread; `abort` may be called from any. A failure of any part fails the
segment: nothing of it becomes visible, and its folder is removed when the last thread has let go.
"""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable

import xxhash

from bootseer.errors import BootseerError, DeadlineError, UnavailableError
from bootseer.fuse.striped.layout import Part, Segment, pack_checksums
from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.view import generation_folder
from bootseer.store.backend import Backend, Writer

_log = logging.getLogger(__name__)

_POLL_S = 0.2


def new_generation() -> str:
    """A name that no other writer, on any node, chooses."""
    return secrets.token_hex(16)


class _Unit:
    __slots__ = ("first_block", "length", "pieces")

    def __init__(self, pieces: list[bytes], length: int, first_block: int) -> None:
        self.pieces = pieces
        self.length = length
        self.first_block = first_block


class _PartThread:
    """One part: a queue of units, a thread, a file of the backend."""

    def __init__(self, segment: "SegmentWriter", name: str) -> None:
        self.name = name
        self.size_bytes = 0
        self.checksums: dict[int, int] = {}
        self.queue: queue.SimpleQueue[_Unit | None] = queue.SimpleQueue()
        self.done = threading.Event()
        self._segment = segment
        threading.Thread(target=self._run, name=f"stripe-part-{name}", daemon=True).start()

    def _run(self) -> None:
        segment = self._segment
        writer: Writer | None = None
        at_end = False
        try:
            while (unit := self.queue.get()) is not None:
                try:
                    if not segment.failed:
                        if writer is None:
                            writer = segment.create_part(self.name)
                        self._write(writer, unit)
                finally:
                    segment.budget.give(unit.length)
            at_end = True
            if writer is not None and not segment.failed:
                writer.close()
                segment.note_progress()
        except BaseException as error:
            # hdfs-native panics with exceptions that are no `Exception`.
            segment.fail(error)
            if not at_end:
                self._drain()
        finally:
            if segment.failed and writer is not None:
                writer.abort()
            segment.part_ended()
            self.done.set()

    def _write(self, writer: Writer, unit: _Unit) -> None:
        block_bytes = self._segment.block_bytes
        block, room = unit.first_block, block_bytes
        digest = xxhash.xxh3_64()
        for piece in unit.pieces:
            writer.write(piece)
            self._segment.note_progress()
            rest = memoryview(piece)
            while len(rest) >= room:
                digest.update(rest[:room])
                self.checksums[block] = digest.intdigest()
                digest.reset()
                rest = rest[room:]
                block, room = block + 1, block_bytes
            digest.update(rest)
            room -= len(rest)
        if room < block_bytes:
            self.checksums[block] = digest.intdigest()
        self.size_bytes += unit.length

    def empty_queue(self) -> None:
        """Give back the memory of what was not begun. For the thread that sends."""
        with contextlib.suppress(queue.Empty):
            while (unit := self.queue.get_nowait()) is not None:
                self._segment.budget.give(unit.length)
            # That was the end mark: the part's thread still needs it.
            self.queue.put(None)

    def _drain(self) -> None:
        while (unit := self.queue.get()) is not None:
            self._segment.budget.give(unit.length)


class SegmentWriter:
    """A segment in the making."""

    def __init__(
        self,
        backend: Backend,
        directory: str,
        budget: MemoryBudget,
        *,
        stripe_unit_bytes: int,
        stripe_count: int,
        block_bytes: int,
        deadline_s: float,
    ) -> None:
        self.generation = new_generation()
        self.size_bytes = 0
        self.block_bytes = block_bytes
        self.budget = budget
        self.failed = False
        self._backend = backend
        self._folder = generation_folder(directory, self.generation)
        self._unit_bytes = stripe_unit_bytes
        self._count = stripe_count
        self._deadline_s = deadline_s
        self._parts: list[_PartThread] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._ended = 0
        self._sealed = False
        self._progress_s = time.monotonic()

    def send(self, pieces: list[bytes], length: int, cancelled: Callable[[], bool]) -> None:
        """Hand over the next unit; full, but for the last one of the segment.

        Waits while the mount's memory is used up. Raises what a part failed with, DeadlineError,
        InterruptedError.
        """
        self._check()
        try:
            self.budget.take(length, self._deadline_s, lambda: cancelled() or self.failed)
        except InterruptedError:
            self._check()
            raise
        except DeadlineError as error:
            self.fail(error)
            raise
        number = self.size_bytes // self._unit_bytes
        if number < self._count:
            self._parts.append(_PartThread(self, f"{number:02x}"))
        unit = _Unit(pieces, length, self.size_bytes // self.block_bytes)
        self.size_bytes += length
        self._parts[number % self._count].queue.put(unit)

    def finish(self) -> Segment:
        """Close every part; returns when all bytes are durable.

        Raises what a part failed with, or DeadlineError when nothing moved for the deadline.
        """
        self._seal()
        self.note_progress()
        for part in self._parts:
            while not part.done.wait(_POLL_S):
                if self.failed:
                    break
                if time.monotonic() - self._progress_s > self._deadline_s:
                    self.fail(
                        DeadlineError(
                            f"cannot write {self._folder}/{part.name}: no answer from "
                            f"{self._backend.url} within {self._deadline_s:.0f} s"
                        )
                    )
        self._check()
        checksums: dict[int, int] = {}
        for part in self._parts:
            checksums.update(part.checksums)
        return Segment(
            self.generation,
            self.size_bytes,
            self._unit_bytes,
            self.block_bytes,
            tuple(Part(part.name, part.size_bytes) for part in self._parts),
            pack_checksums([checksums[block] for block in range(len(checksums))]),
        )

    def abort(self, wait_s: float = 0.0) -> None:
        """Give up: nothing of the segment stays, as soon as its threads come to it.

        Waits for them at most `wait_s`.
        """
        self.fail(InterruptedError("given up"))
        for part in self._parts:
            # A part that is stuck in a dead server must not keep the mount's memory.
            part.empty_queue()
        self._seal()
        with self._lock:
            if self._ended == len(self._parts):
                self._remove_folder()
        deadline = time.monotonic() + wait_s
        for part in self._parts:
            part.done.wait(max(0.0, deadline - time.monotonic()))

    # ---- for the part threads -------------------------------------------------------------

    def create_part(self, name: str) -> Writer:
        return self._backend.create(f"{self._folder}/{name}")

    def note_progress(self) -> None:
        self._progress_s = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """The first failure decides what the writer is told."""
        with self._lock:
            if self._error is None:
                self._error = error
            self.failed = True

    def part_ended(self) -> None:
        with self._lock:
            self._ended += 1
            if self.failed and self._sealed and self._ended == len(self._parts):
                self._remove_folder()

    # ---- inside ---------------------------------------------------------------------------

    def _seal(self) -> None:
        with self._lock:
            if self._sealed:
                return
            self._sealed = True
        for part in self._parts:
            part.queue.put(None)

    def _check(self) -> None:
        error = self._error
        if error is None:
            return
        self._seal()
        if isinstance(error, BootseerError | OSError):
            raise error
        raise UnavailableError(
            f"cannot write {self._folder}: {type(error).__name__}: {error}"
        ) from error

    def _remove_folder(self) -> None:
        # What cannot be removed now is garbage that fsck names; the writer's error matters more.
        with contextlib.suppress(Exception):
            self._backend.delete(self._folder, recursive=True)
