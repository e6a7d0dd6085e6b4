"""Jobs whose reads fail, hang or return wrong bytes at random end once, with right bytes."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from bootseer.errors import CorruptError, UnavailableError
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.engine import FetchEngine, JobAttempt, ReadInto, ReadJob
from bootseer.transfer.policy import Policy
from bootseer.transfer.ranges import Priority
from testbed.waiting import pause

DATA = random.Random(4).randbytes(32 * 1024)
PIECE_BYTES = 8192
STALL_S = 0.05


class Flaky(ReadJob):
    """Job whose every step may fail."""

    def __init__(self, seed: int) -> None:
        super().__init__(f"place {seed % 3}", len(DATA), f"job {seed}")
        self.landed_count = 0
        self._dice = random.Random(seed)

    def open(self, one: JobAttempt) -> ReadInto:
        if self._dice.random() < 0.05:
            raise UnavailableError("cannot be opened")
        one.tells_progress = self._dice.random() < 0.8
        return self._read

    def _read(self, start: int, buffer: memoryview, attempt: Attempt) -> int:
        for done in range(0, len(buffer), PIECE_BYTES):
            chance = self._dice.random()
            piece = DATA[start + done : start + done + PIECE_BYTES][: len(buffer) - done]
            if chance < 0.05:
                raise UnavailableError("cut off")
            if chance < 0.06:
                raise KeyError("a bug")
            if chance < 0.08:
                pause(2 * STALL_S)
            if chance > 0.98:
                piece = bytes(len(piece))
            if not attempt.put(done, buffer, piece):
                return done
        return len(buffer)

    def check(self, one: JobAttempt, data: memoryview) -> None:
        if data != DATA:
            raise CorruptError("wrong bytes")

    def land(self, one: JobAttempt, data: memoryview) -> None:
        assert data == DATA
        self.landed_count += 1


def test_each_job_of_a_flaky_storage_ends_once() -> None:
    policies = dict.fromkeys(Priority, Policy(attempts=50, base_s=0.001, cap_s=0.005))
    before = set(threading.enumerate())
    engine = FetchEngine(policies, threads=3, demand_threads=1, deadline_s=5.0, stall_s=STALL_S)

    def customer(number: int) -> list[Flaky]:
        dice, jobs = random.Random(number), []
        for at in range(20):
            job = Flaky(number * 1000 + at)
            chance = dice.random()
            with engine.lock:
                engine.add(job, dice.choice(list(Priority)))
                if chance < 0.1:
                    engine.end(job, UnavailableError("given up"))
                elif chance < 0.2:
                    engine.hasten(job, Priority.DEMAND)
                elif chance < 0.3 and engine.withdraw(job):
                    continue
            jobs.append(job)
            if chance < 0.8:
                engine.wait(job)
        for job in jobs:
            engine.wait(job)
        return jobs

    with ThreadPoolExecutor(6) as pool:
        jobs = [
            job for done in [pool.submit(customer, n) for n in range(6)] for job in done.result()
        ]
    engine.close()
    assert all(job.landed_count == (job.error is None) for job in jobs)
    assert not any(job.attempts for job in jobs)
    assert sum(job.error is None for job in jobs) > len(jobs) / 2
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("bootseer-")]
