"""The rules of the fetch engine, with scripted jobs that read from memory."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from bootseer.errors import CorruptError, DeadlineError, UnavailableError
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.engine import FetchEngine, JobAttempt, ReadInto, ReadJob
from bootseer.transfer.pace import Pace
from bootseer.transfer.policy import REQUEST, UNTIL_DEADLINE, Policy
from bootseer.transfer.ranges import Priority
from testbed.waiting import wait_for
from tests.bootseer.transfer.faults import LONG_S

DATA = bytes(range(256)) * 512
Read = Callable[[int, int, memoryview, Attempt], int]
"""Function of a scripted read: `read(try_number, start, buffer, attempt)`."""


def right(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
    attempt.put(0, buffer, DATA[start : start + len(buffer)])
    return len(buffer)


class Recorded(ReadJob):
    """Job that keeps a record of its attempts."""

    def __init__(self, read: Read = right, place: str = "file") -> None:
        super().__init__(place, len(DATA), f"all of {place}")
        self.starts: list[int] = []
        self.buffers: list[memoryview] = []
        self.landed: list[bytes] = []
        self.spare_count = 1
        """Number of refusals of memory for a second attempt, before one is granted."""
        self._read = read

    def open(self, one: JobAttempt) -> ReadInto:
        one.tells_progress = one.has_replicas = True

        def read_into(start: int, buffer: memoryview, attempt: Attempt) -> int:
            number = len(self.starts)
            self.starts.append(start)
            self.buffers.append(one.buffer)
            return self._read(number, start, buffer, attempt)

        return read_into

    def spare_buffer(self) -> memoryview | None:
        self.spare_count -= 1
        return None if self.spare_count > 0 else super().spare_buffer()

    def check(self, one: JobAttempt, data: memoryview) -> None:
        if data != DATA:
            raise CorruptError("wrong bytes")

    def land(self, one: JobAttempt, data: memoryview) -> None:
        self.landed.append(bytes(data))


Make = Callable[..., FetchEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[FetchEngine] = []

    def build(policy: Policy = UNTIL_DEADLINE, **options: float) -> FetchEngine:
        settings = {"threads": 2, "demand_threads": 1, "deadline_s": LONG_S, "stall_s": LONG_S}
        settings.update(options)
        made.append(FetchEngine(dict.fromkeys(Priority, policy), **settings))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def add(engine: FetchEngine, job: ReadJob, priority: Priority = Priority.PREFETCH) -> None:
    with engine.lock:
        engine.add(job, priority)


def test_a_damaged_answer_that_is_fast_does_not_beat_a_sound_one(make: Make) -> None:
    damaged = threading.Event()

    def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        if number == 0:
            # Late: the second attempt starts, is faster, and brings wrong bytes.
            assert damaged.wait(LONG_S)
            return right(number, start, buffer, attempt)
        attempt.put(0, buffer, bytes(len(buffer)))
        damaged.set()
        return len(buffer)

    engine, job = make(), Recorded(read)
    add(engine, job, Priority.DEMAND)
    engine.wait(job)
    assert job.error is None
    assert job.landed == [DATA]
    assert len(job.starts) == 2


def test_a_try_that_fails_when_its_job_has_ended_is_not_reported(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a second attempt that came too late was logged with a traceback."""
    ended, failed = threading.Event(), threading.Event()

    def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        assert ended.wait(LONG_S)
        failed.set()
        raise AssertionError("the job has ended")

    engine, job = make(threads=1), Recorded(read)
    add(engine, job)
    wait_for(lambda: job.starts)
    with engine.lock:
        engine.end(job, None)
    ended.set()
    assert failed.wait(LONG_S)
    other = Recorded()
    add(engine, other)
    engine.wait(other)
    engine.close()
    assert caplog.messages == []


def test_damage_and_outages_in_turn_end(make: Make) -> None:
    """Each outage followed some bytes, so failures counted anew, and damage was never summed up."""

    def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        if start == 0:
            attempt.put(0, buffer, DATA[:-1])
            raise UnavailableError("cut off")
        attempt.put(0, buffer, b"?")
        return 1

    engine, job = make(Policy(base_s=0.001)), Recorded(read)
    add(engine, job)
    engine.wait(job)
    assert isinstance(job.error, CorruptError)
    assert len(job.starts) == 8


def test_a_try_goes_on_behind_the_bytes_that_came_in_the_same_buffer(make: Make) -> None:
    def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        if number < 3:
            attempt.put(0, buffer, DATA[start : start + 100])
            raise UnavailableError("cut off")
        return right(number, start, buffer, attempt)

    engine, job = make(Policy(base_s=0.001)), Recorded(read)
    add(engine, job)
    engine.wait(job)
    assert job.landed == [DATA]
    assert job.starts == [0, 100, 200, 300]
    assert len({id(buffer) for buffer in job.buffers}) == 1


@pytest.mark.usefixtures("no_second_requests")
def test_a_try_that_hangs_keeps_its_buffer_to_itself(make: Make) -> None:
    release = threading.Event()

    def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        if number == 0:
            attempt.put(0, buffer, DATA[:100])
            assert release.wait(LONG_S)
            buffer[:] = bytes(len(buffer))
            return len(buffer)
        return right(number, start, buffer, attempt)

    engine, job = make(stall_s=0.05), Recorded(read)
    add(engine, job)
    try:
        engine.wait(job)
    finally:
        release.set()
    assert job.landed == [DATA]
    assert job.starts == [0, 100]
    assert job.buffers[0] is not job.buffers[1]


@pytest.mark.usefixtures("no_second_requests")
def test_a_job_fails_after_a_silence_and_tells_of_the_outage_before(make: Make) -> None:
    release = threading.Event()

    def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        if number == 0:
            raise UnavailableError("connection refused")
        assert release.wait(LONG_S)
        return 0

    engine, job, silent = make(deadline_s=0.3, stall_s=0.1), Recorded(read), Recorded(read)
    silent.starts.append(0)
    try:
        for one in (job, silent):
            add(engine, one)
            engine.wait(one)
    finally:
        release.set()
    assert isinstance(job.error, UnavailableError)
    assert isinstance(silent.error, DeadlineError)
    assert "no answer" in str(silent.error)


def test_bytes_for_others_count_for_a_job_that_waits_for_its_turn(make: Make) -> None:
    """On a slow link one read may take longer than the deadline, and the next one waits for it."""
    release = threading.Event()

    def begin(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        attempt.put(0, buffer, DATA[: len(DATA) // 2])
        assert release.wait(LONG_S)
        return right(number, start, buffer, attempt)

    engine, slow, waiting = make(threads=1), Recorded(begin), Recorded()
    for job in (slow, waiting):
        add(engine, job)

    def has_heard() -> bool:
        with engine.lock:
            return engine.silent_s(waiting, 0.0, time.monotonic()) < LONG_S

    try:
        wait_for(has_heard, "bytes of the first job")
    finally:
        release.set()
    for job in (slow, waiting):
        engine.wait(job)
        assert job.landed == [DATA]


def test_jobs_that_rest_hold_no_thread(make: Make) -> None:
    def refuse(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        raise UnavailableError("down")

    engine = make(Policy(attempts=10**9, base_s=LONG_S, cap_s=LONG_S))
    dead = [Recorded(refuse, "dead") for _ in range(20)]
    for job in dead:
        add(engine, job, Priority.DEMAND)
    well = Recorded()
    add(engine, well, Priority.DEMAND)
    engine.wait(well)
    assert well.landed == [DATA]
    assert all(job.error is None for job in dead)


def test_close_tells_every_waiter(make: Make) -> None:
    release, reading = threading.Event(), threading.Semaphore(0)

    def hang(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        reading.release()
        assert release.wait(LONG_S)
        return 0

    def refuse(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        raise UnavailableError("down")

    engine = make(Policy(attempts=10**9, base_s=LONG_S, cap_s=LONG_S))
    resting = Recorded(refuse)
    add(engine, resting)
    wait_for(lambda: resting.failure_count, "the first failure")
    queued = [Recorded(hang) for _ in range(5)]
    for job in queued:
        add(engine, job)
    assert reading.acquire(timeout=LONG_S)
    waiters = [threading.Thread(target=engine.wait, args=(job,)) for job in (resting, *queued)]
    for waiter in waiters:
        waiter.start()
    closer = threading.Thread(target=engine.close)
    closer.start()
    try:
        for waiter in waiters:
            waiter.join(LONG_S / 2)
            assert not waiter.is_alive()
    finally:
        release.set()
    closer.join()
    assert all(isinstance(job.error, UnavailableError) for job in (resting, *queued))
    with pytest.raises(UnavailableError, match="was closed"):
        add(engine, Recorded())


def test_a_place_with_a_queue_does_not_keep_another_one_idle(make: Make) -> None:
    order: list[str] = []
    running, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def job(place: str) -> Recorded:
        def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
            order.append(place)
            running.release()
            assert go_on.acquire(timeout=LONG_S)
            return right(number, start, buffer, attempt)

        return Recorded(read, place)

    engine = make(threads=3)
    for place in ["a"] * 6 + ["b"] * 2 + ["c"]:
        add(engine, job(place))
        if len(order) < 1:
            assert running.acquire(timeout=LONG_S)
    for _ in range(2):
        assert running.acquire(timeout=LONG_S)
    # Two of "a" may have begun before there was anything else.
    go_on.release(3)
    for _ in range(3):
        assert running.acquire(timeout=LONG_S)
    begun = order[:6]
    go_on.release(9)
    assert "b" in begun
    assert "c" in begun


def test_threads_whose_place_others_took_end_when_their_read_returns(make: Make) -> None:
    """After an outage there are no more parallel reads than before."""
    release = threading.Event()

    def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        assert number or release.wait(LONG_S)
        return right(number, start, buffer, attempt)

    before = set(threading.enumerate())
    engine, late = make(stall_s=0.05), [Recorded(read) for _ in range(2)]
    try:
        for job in late:
            add(engine, job)
        for job in late:
            engine.wait(job)
    finally:
        release.set()
    assert [job.landed for job in late] == [[DATA]] * 2
    # Two for the reads, and one for the deadlines.
    wait_for(lambda: len(set(threading.enumerate()) - before) <= 3, "the end of the others")


def test_credit_is_spent_by_second_tries_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credit for a second attempt was once lost when there was no memory for it."""
    second = threading.Event()
    late: list[Attempt] = []

    def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        if number == 0:
            late.append(attempt)
            assert second.wait(LONG_S)
            return 0
        second.set()
        return right(number, start, buffer, attempt)

    spent: list[bool] = []
    spend = Pace.spend

    def counted(pace: Pace) -> bool:
        spent.append(spend(pace))
        return spent[-1]

    monkeypatch.setattr(Pace, "spend", counted)
    engine, job = make(REQUEST), Recorded(read)
    job.spare_count = 10
    add(engine, job, Priority.DEMAND)
    engine.wait(job)
    assert job.landed == [DATA]
    assert spent == [True]
    assert late[0].is_given_up, "its bytes would still take their share of the line"


def test_a_failed_job_keeps_no_memory_alive(make: Make) -> None:
    class Memory(bytearray):
        """Memory whose release can be observed."""

    freed = threading.Event()

    class Watched(Recorded):
        def buffer(self, one: JobAttempt) -> memoryview:

            memory = Memory(self.length)
            weakref.finalize(memory, freed.set)
            return memoryview(memory)

    def read(number: int, start: int, buffer: memoryview, attempt: Attempt) -> int:
        piece = buffer[:10]
        raise PermissionError(f"not {len(piece)} bytes of it")

    engine, job = make(), Watched(read)
    add(engine, job)
    engine.wait(job)
    error = job.error
    del job
    assert freed.wait(LONG_S), "a frame of the error's traceback had the buffer"
    assert isinstance(error, Exception)
