"""The model of what is under way: chunks, who waits for them, and the reads that bring them.

Plain state without behaviour of its own. Not thread-safe: the executor's lock guards all of it,
except that anybody may wait for a `Ticket`.
"""

import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import TypeAlias

from msgspec import Struct, field

from bootseer.errors import BootseerError
from bootseer.transfer.plan import Chunk, Fetch, Priority

Deliver: TypeAlias = Callable[[Chunk, memoryview], None]
"""Called once per chunk with its verified bytes, from a worker thread, before any waiter wakes."""


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

    __slots__ = ("_arrived", "error", "flights", "has_left", "is_urgent", "remaining_count")

    def __init__(self, chunk_count: int, *, is_urgent: bool) -> None:
        self.remaining_count = chunk_count
        self.is_urgent = is_urgent
        """A thread waits for exactly this chunk now."""
        self.has_left = False
        """The requester gave up: nothing needs to be tried again for it."""
        self.error: BootseerError | None = None
        """The first failure."""
        self.flights: set[Flight] = set()
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
    """A callback that gets one chunk once, and those who count on it."""

    deliver: Deliver
    tickets: list[Ticket]
    error: BootseerError | None = None


class Flight(Struct, eq=False):
    """One chunk under way."""

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
        """Whether anybody still counts on it."""
        return any(
            not ticket.has_left for delivery in self.deliveries for ticket in delivery.tickets
        )

    def add(self, ticket: Ticket, deliver: Deliver) -> None:
        """`ticket` counts on this chunk through `deliver`, which is called once however many
        requesters name it."""
        ticket.flights.add(self)
        for delivery in self.deliveries:
            if delivery.deliver == deliver:
                delivery.tickets.append(ticket)
                return
        self.deliveries.append(Delivery(deliver, [ticket]))

    def drop(self, ticket: Ticket) -> None:
        """`ticket` no longer counts on it."""
        ticket.flights.discard(self)
        for delivery in self.deliveries:
            delivery.tickets = [other for other in delivery.tickets if other is not ticket]
        self.deliveries = [delivery for delivery in self.deliveries if delivery.tickets]


class Task(Struct, eq=False):
    """One read to be done, and tried again when it fails."""

    fetch: Fetch
    priority: Priority
    sequence: int
    """Submission order: what runs first within a priority."""
    flights: dict[Chunk, Flight] = field(default_factory=dict)
    """The chunks it still has to bring, in the fetch's order."""
    phase: Phase = Phase.QUEUED
    attempts_made: int = 0
    deadline_s: float | None = None
    """Monotonic; no attempt starts or lasts beyond. Set when the first attempt starts."""
    resume_at_s: float = 0.0
    """While resting: when the next attempt is due."""
