"""A worker that is silent for several looks is ended, unless nothing was running meanwhile."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from bootseer.linux.processes import wait_for_exit
from bootseer.served.supervision.heartbeat import CHECK_S, Heartbeat, silence_for
from testbed.waiting import wait_for


@contextlib.contextmanager
def _worker(heartbeat: Heartbeat) -> Iterator[tuple[int, int]]:
    """Yield the pid of a process that answers, and the descriptor that stops its answers."""
    stop, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        heartbeat.start_answering()
        heartbeat.answer_until(stop)
        signal.pause()
        os._exit(0)
    heartbeat.start_asking()
    try:
        yield pid, tell
    finally:
        os.kill(pid, signal.SIGKILL)
        assert wait_for_exit(pid, 60)
        os.waitpid(pid, 0)
        heartbeat.close()
        for fd in (stop, tell):
            os.close(fd)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Yield the list whose only item is the supervisor's time."""
    now_s = [0.0]
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: now_s[0])
        patch.setattr("bootseer.served.supervision.heartbeat.time", clock)
        yield now_s


def _look(heartbeat: Heartbeat, clock: list[float]) -> float:
    clock[0] += heartbeat.check_s
    return heartbeat.check()


def test_who_answers_is_never_silent(clock: list[float]) -> None:
    heartbeat = Heartbeat(120, 15)
    assert heartbeat.check_s == 15 / 8
    with _worker(heartbeat):
        for _ in range(20):
            wait_for(lambda: _look(heartbeat, clock) == 0)


def test_silence_is_counted_in_looks_from_the_first_answer_on(clock: list[float]) -> None:
    heartbeat = Heartbeat(120, 15)
    with _worker(heartbeat) as (pid, _):
        wait_for(lambda: _look(heartbeat, clock) == 0)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        _look(heartbeat, clock)  # it may have answered the last question
        _look(heartbeat, clock)
        for _ in range(8):
            silence = _look(heartbeat, clock)
        assert silence >= 1
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: _look(heartbeat, clock) == 0)


def test_a_worker_that_starts_has_longer(clock: list[float]) -> None:
    heartbeat = Heartbeat(120, 15)
    heartbeat.start_asking()
    for _ in range(8):
        assert _look(heartbeat, clock) < 0.2
    heartbeat.close()


def test_looks_that_come_late_prove_nothing(clock: list[float]) -> None:
    """The machine was suspended, or supervisor and worker were stopped together."""
    heartbeat = Heartbeat(15, 15)
    heartbeat.start_asking()
    for _ in range(7):
        assert 0 < _look(heartbeat, clock) < 1
    clock[0] += 3600
    assert _look(heartbeat, clock) == 0
    assert _look(heartbeat, clock) < 0.2
    heartbeat.close()


def test_a_worker_that_ends_takes_the_time_that_it_needs(clock: list[float]) -> None:
    heartbeat = Heartbeat(120, 15)
    with _worker(heartbeat) as (_, tell):
        os.write(tell, b"x")
        wait_for(lambda: _look(heartbeat, clock) == 0 and heartbeat._is_ending)
        assert all(_look(heartbeat, clock) == 0 for _ in range(30))


def test_most_of_a_deadline_is_left_to_the_successor() -> None:
    assert [silence_for(one) for one in (1, 40, 60, 600)] == [5, 10, 15, 15]
    assert Heartbeat(1, 600).check_s == CHECK_S
