"""The model of what is under way: chunks, who waits for them, and the reads that bring them.

State, which the scheduler and the engine change. Not thread-safe: the executor's lock guards all of
it, except that any thread may wait for a `Ticket`.
"""

import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import TypeAlias

from msgspec import Struct, field

from bootseer.errors import BootseerError
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.pace import FLOOR_BYTES_PER_S, STALL_S, Pace, Progress
from bootseer.transfer.plan import Chunk, Fetch, Priority
from bootseer.transfer.worker_pool import Worker

Deliver: TypeAlias = Callable[[Chunk, memoryview], None]
"""Called once per chunk with its verified bytes, from a worker thread, before any waiter wakes."""
Reader: TypeAlias = Callable[[str, int, memoryview, Attempt], int]
"""`read(key, offset, buffer, attempt)` fills the buffer and returns the count, tells `attempt` how
much has come, and may stop where that was given up; or it raises."""


class Phase(Enum):
    """Where a task stands."""

    QUEUED = auto()
    READING = auto()
    """A worker has it: reading, verifying or delivering."""
    RESTING = auto()
    """Failed, and waits for its next attempt."""
    DONE = auto()


class Ticket:
    """One requester's stake in a number of chunks; the thing that it waits for."""

    __slots__ = ("_arrived", "error", "has_left", "is_urgent", "pending_chunks", "remaining_count")

    def __init__(self, chunk_count: int, *, is_urgent: bool) -> None:
        self.remaining_count = chunk_count
        self.is_urgent = is_urgent
        """A thread waits for exactly this chunk now."""
        self.has_left = False
        """The requester gave up: nothing needs to be tried again for it."""
        self.error: BootseerError | None = None
        """The first failure."""
        self.pending_chunks: set[PendingChunk] = set()
        self._arrived = threading.Event()
        if chunk_count == 0:
            self._arrived.set()

    def settle(self, error: BootseerError | None) -> None:
        """One chunk is delivered, or failed with `error`."""
        self.remaining_count -= 1
        if error is not None:
            self.fail(error)
        elif self.remaining_count == 0:
            self._arrived.set()

    def fail(self, error: BootseerError) -> None:
        """Wake the requester with `error`, unless it has failed already."""
        if self.error is None:
            self.error = error
        self._arrived.set()

    @property
    def is_settled(self) -> bool:
        """All delivered, or one failed. Any thread."""
        return self._arrived.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Until settled; False: not within `timeout_s`. Any thread, without the lock."""
        return self._arrived.wait(timeout_s)


class Delivery(Struct, eq=False):
    """A callback that gets one chunk once, and the requesters that count on it."""

    deliver: Deliver
    tickets: list[Ticket]
    error: BootseerError | None = None


class PendingChunk(Struct, eq=False):
    """One chunk that is wanted and has not come."""

    chunk: Chunk
    task: "Task"
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def is_urgent(self) -> bool:
        """Whether a thread waits for this chunk now."""
        return any(
            ticket.is_urgent and not ticket.has_left
            for delivery in self.deliveries
            for ticket in delivery.tickets
        )

    @property
    def is_wanted(self) -> bool:
        """Whether a requester still counts on it."""
        return any(
            not ticket.has_left for delivery in self.deliveries for ticket in delivery.tickets
        )

    def add(self, ticket: Ticket, deliver: Deliver) -> None:
        """`ticket` counts on this chunk through `deliver`, which is called once however many
        requesters name it."""
        ticket.pending_chunks.add(self)
        for delivery in self.deliveries:
            if delivery.deliver == deliver:
                delivery.tickets.append(ticket)
                return
        self.deliveries.append(Delivery(deliver, [ticket]))

    def drop(self, ticket: Ticket) -> None:
        """`ticket` no longer counts on it."""
        ticket.pending_chunks.discard(self)
        for delivery in self.deliveries:
            delivery.tickets = [other for other in delivery.tickets if other is not ticket]
        self.deliveries = [delivery for delivery in self.deliveries if delivery.tickets]


class Task(Struct, eq=False):
    """One read to be done, and tried again when it fails."""

    fetch: Fetch
    priority: Priority
    sequence: int
    """Submission order: what runs first within a priority."""
    pending_chunks: dict[Chunk, PendingChunk] = field(default_factory=dict)
    """The chunks it still has to bring, in the fetch's order."""
    phase: Phase = Phase.QUEUED
    attempts_made: int = 0
    deadline_s: float | None = None
    """Monotonic; no attempt starts or lasts beyond. Set when the first attempt starts."""
    resume_at_s: float = 0.0
    """While resting: when the next attempt is due."""
    earlier: "Reading | None" = None
    """The last attempt, which failed or is late: the next one goes on behind the bytes that it
    brought, if it is at the same fetch still."""


class Reading:
    """One worker carrying out one task once. Void as soon as it is not among those that run."""

    __slots__ = (
        "_patience_s",
        "_progress",
        "attempt",
        "buffer",
        "deadline_s",
        "earlier",
        "fetch",
        "is_landing",
        "pending_chunks",
        "start_bytes",
        "started_s",
        "task",
        "was_late",
        "worker",
    )

    def __init__(self, worker: Worker, task: Task, patience_s: float, now_s: float) -> None:
        """After `patience_s` without progress it is given up."""
        self.worker = worker
        self.task = task
        self._patience_s = patience_s
        self.is_landing = False
        self.was_late = False
        # Copies: when the attempt is given up, the task goes on without it.
        self.fetch = task.fetch
        self.pending_chunks = tuple(task.pending_chunks.values())
        self.attempt = Attempt()
        self.attempt.is_second = task.earlier is not None
        self.buffer = memoryview(b"")
        earlier = task.earlier
        self.earlier = earlier if earlier is not None and earlier.fetch is self.fetch else None
        self.start_bytes = 0
        """How much of it an earlier attempt has brought."""
        self.started_s = now_s
        self._progress = Progress(now_s)
        self.deadline_s = 0.0
        """Monotonic; no later than the task's."""
        self.is_overdue(now_s)

    def is_overdue(self, now_s: float) -> bool:
        """Whether it has outlived its deadline, which moves on as long as bytes come."""
        if not self.is_landing:
            self._progress.silent_s(self.attempt.done_bytes, now_s)
            ends_s = self._progress.seen_s + self._patience_s
            self.deadline_s = min(ends_s, self.task.deadline_s or ends_s)
        return self.deadline_s <= now_s

    @property
    def has_progressed(self) -> bool:
        """Whether it brought more than a trickle does before it is given up."""
        return self.attempt.done_bytes >= FLOOR_BYTES_PER_S * STALL_S

    def fill(self, read: Reader, buffer: memoryview) -> int:
        """Read all into `buffer`, but for what an earlier attempt has brought; returns the count.
        Raises whatever `read` raises."""
        if self.earlier is not None:
            start = self.earlier.done_bytes
            buffer[:start] = self.earlier.buffer[:start]
            self.start_bytes = start
            self.earlier = None
        self.buffer = buffer
        start = self.start_bytes
        if start == len(buffer):
            return start
        return start + read(self.fetch.key, self.fetch.offset + start, buffer[start:], self.attempt)

    @property
    def done_bytes(self) -> int:
        """How much is in the buffer."""
        return min(self.start_bytes + self.attempt.done_bytes, len(self.buffer))

    def is_late(self, pace: Pace, now_s: float) -> bool:
        """Whether a requester waits, or will, and should not for this attempt alone."""
        if self.was_late or self.is_landing or self.task.priority is Priority.FILL:
            return False
        done = self.attempt.done_bytes
        silent_s = self._progress.silent_s(done, now_s)
        length = self.fetch.length - self.start_bytes
        return pace.is_late_alike(length, done, now_s - self.started_s, silent_s)
