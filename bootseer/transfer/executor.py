"""Carries out fetches: in parallel, bounded, verified, shared, with deadlines."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from bootseer.transfer.plan import Chunk, Fetch

Reader: TypeAlias = Callable[[str, int, int], bytes]
"""`read(key, offset, length)`: the bytes, exactly `length` of them, or an exception."""

Deliver: TypeAlias = Callable[[Chunk, memoryview], None]
"""Called once per chunk with its verified bytes, from a worker thread, before any waiter wakes."""


class Batch:
    """Fetches submitted together."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Until every chunk is delivered. Raises: the first failure; DeadlineError."""
        raise RuntimeError("to be written")

    def cancel(self) -> None:
        """Drop what has not started. Idempotent."""
        raise RuntimeError("to be written")


class Executor:
    """Reads ranges of stored objects on behalf of many callers. Thread-safe."""

    def __init__(
        self,
        read: Reader,
        *,
        workers: int = 8,
        demand_workers: int = 4,
        deadline_s: float = 30.0,
        attempts: int = 4,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        raise RuntimeError("to be written")

    def submit(self, fetches: Iterable[Fetch], deliver: Deliver) -> Batch:
        """Queue fetches behind everything of the same or a lower priority number."""
        raise RuntimeError("to be written")

    def demand(self, chunk: Chunk, deliver: Deliver, *, deadline_s: float | None = None) -> None:
        """Returns once `chunk` has been delivered.

        In flight already: waits for it. Queued: its fetch moves to the front of the demand lane.
        Neither: fetched at once on the demand lane, which prefetch and fill never occupy.
        Raises: DeadlineError, CorruptError, UnavailableError, NotFoundError.
        """
        raise RuntimeError("to be written")

    def close(self) -> None:
        """Cancel everything, fail all waiters, end the threads. Idempotent."""
        raise RuntimeError("to be written")
