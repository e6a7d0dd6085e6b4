"""Carries out fetches: in parallel, bounded, verified, shared, with deadlines.

The public face of transfers; threads and clock are the `Engine`'s, the sharing of what is under way
is the `Scheduler`'s. All methods may be called from any thread, except that callbacks (`deliver`,
`on_progress`, `is_cached`) must not wait for this executor. An executor does not survive fork(2):
make it in the process that uses it.
"""

import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from bootseer.base.closing import Closing
from bootseer.errors import DeadlineError, UnavailableError
from bootseer.transfer.engine import Engine
from bootseer.transfer.pending import Deliver, Reader, Ticket
from bootseer.transfer.plan import Chunk, Fetch, Priority, covering
from bootseer.transfer.policy import REQUEST, Policy, fresh_copy
from bootseer.transfer.statistics import Statistics

__all__ = ["Batch", "Deliver", "Executor", "Reader"]


class Batch:
    """Fetches submitted together."""

    def __init__(self, engine: Engine, ticket: Ticket) -> None:
        self._engine = engine
        self._ticket = ticket

    def wait(self, timeout_s: float | None = None) -> None:
        """Until every chunk is delivered. Raises: the first failure; DeadlineError.

        Without a timeout it still ends: each read has a deadline of its own, and reads that no
        thread is left for fail as well. A cancelled batch raises UnavailableError. Running into
        `timeout_s` does not cancel.
        """
        if not self._ticket.wait(timeout_s):
            raise DeadlineError(
                f"{self._ticket.remaining_count} chunks were not there after {timeout_s} s"
            )
        if self._ticket.error is not None:
            raise fresh_copy(self._ticket.error)

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._ticket.is_settled

    @property
    def remaining_count(self) -> int:
        """Chunks neither delivered nor failed yet."""
        return self._ticket.remaining_count

    def cancel(self) -> None:
        """Drop what has not started. Idempotent. What is being read is still delivered."""
        with self._engine.lock:
            if self._engine.scheduler.leave(self._ticket):
                self._ticket.fail(UnavailableError("the transfer was cancelled"))


class Executor(Closing):
    """Reads ranges of stored objects on behalf of many callers. Thread-safe."""

    def __init__(
        self,
        read: Reader,
        *,
        workers: int = 8,
        demand_workers: int = 4,
        deadline_s: float = 30.0,
        attempt_deadline_s: float | None = None,
        policy: Policy = REQUEST,
        take_buffer: Callable[[int], memoryview] = lambda length: memoryview(bytearray(length)),
        fill_bytes_per_s: float | None = None,
        is_cached: Callable[[Chunk], bool] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """`deadline_s` covers all attempts at one read, from the first on; `attempt_deadline_s`
        (default: a third of it) is how long one attempt may make no progress; then its thread is
        given up and replaced.

        `policy` says when a read that failed is tried again. One that is late (`pace`) is asked for
        again on another thread, and so on another connection; the first that ends brings the bytes,
        and each goes on behind those that came. `take_buffer` gives memory for a read of so many
        bytes, which is delivered in it. `fill_bytes_per_s` caps what FILL reads take. `is_cached`
        closes the gap between a caller's look into its cache and its request: it is asked under the
        executor's lock, so it must be quick. `on_progress` gets the bytes of each delivered chunk,
        from worker threads.
        """
        self._deadline_s = deadline_s
        self._is_cached = is_cached
        self._engine = Engine(
            read,
            policy,
            take_buffer,
            workers=workers,
            demand_workers=demand_workers,
            deadline_s=deadline_s,
            attempt_deadline_s=deadline_s / 3 if attempt_deadline_s is None else attempt_deadline_s,
            fill_bytes_per_s=fill_bytes_per_s,
            on_progress=on_progress,
        )

    def submit(self, fetches: Iterable[Fetch], deliver: Deliver) -> Batch:
        """Queue fetches behind everything of the same or a lower priority number.

        Each chunk that waits costs about half a kilobyte of memory.
        Raises: UnavailableError when the executor is closed.
        """
        fetches = list(fetches)
        ticket = Ticket(sum(len(set(fetch.chunks)) for fetch in fetches), is_urgent=False)
        for fetch in fetches:
            # The lock is taken anew for each, so that a long plan never holds up a demand.
            with self._engine.lock:
                self._engine.check_open()
                self._engine.scheduler.request(fetch, ticket, deliver, self._is_cached)
        return Batch(self._engine, ticket)

    def demand(self, chunk: Chunk, deliver: Deliver, *, deadline_s: float | None = None) -> None:
        """Returns once `chunk` has been delivered.

        In flight already: waits for it; should that read fail and be larger than the chunk, the
        chunk is read alone at once. Queued: its fetch moves to the demand pool. Neither: fetched
        at once on the demand pool, which prefetch and fill never occupy.
        Raises: DeadlineError, CorruptError, UnavailableError, NotFoundError; what `deliver` raised.
        """
        self.demand_all((covering((chunk,), Priority.DEMAND),), deliver, deadline_s=deadline_s)

    def demand_all(
        self, fetches: Iterable[Fetch], deliver: Deliver, *, deadline_s: float | None = None
    ) -> None:
        """`demand` for several chunks at once, read as `fetches` say, in parallel.

        The fetches' own priority does not matter. Raises: as `demand`, at the first failure.
        """
        started_ns = time.monotonic_ns()
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        urgent = [replace(fetch, priority=Priority.DEMAND) for fetch in fetches]
        ticket = Ticket(sum(len(set(fetch.chunks)) for fetch in urgent), is_urgent=True)
        with self._engine.lock:
            self._engine.check_open()
            self._engine.recorder.demand_count += 1
            for fetch in urgent:
                self._engine.scheduler.request(fetch, ticket, deliver, self._is_cached)
        arrived = ticket.wait(deadline_s)
        with self._engine.lock:
            self._engine.recorder.demand_done(time.monotonic_ns() - started_ns)
            if not arrived or ticket.error is not None:
                self._engine.scheduler.leave(ticket)
        if ticket.error is not None:
            raise fresh_copy(ticket.error)
        if not arrived and not ticket.is_settled:
            keys = ", ".join(dict.fromkeys(fetch.key for fetch in urgent))
            raise DeadlineError(
                f"{ticket.remaining_count} chunks of {keys} were not there after {deadline_s} s; "
                "the store may be overloaded or out of reach"
            )

    def statistics(self) -> Statistics:
        """What has been done so far."""
        with self._engine.lock:
            return self._engine.recorder.snapshot()

    def close(self) -> None:
        """Cancel everything, fail all waiters, end the threads. Idempotent.

        Waits for callbacks that are running; nothing is delivered afterwards. A thread that hangs
        in a read is left behind as a daemon and ends when the read does.
        """
        self._engine.close()
