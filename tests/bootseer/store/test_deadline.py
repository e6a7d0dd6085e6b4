"""Calls end by a deadline, also if the called code hangs."""

import contextlib
import math
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from bootseer.base.wait_budget import WaitBudget
from bootseer.errors import DeadlineError, UnavailableError
from bootseer.store.deadline import Call, DeadlineCaller
from testbed.waiting import pause, wait_for


def test_returns_and_raises_what_the_function_does() -> None:
    caller = DeadlineCaller("test", 2)
    assert caller.run(lambda _: 42, 60) == 42

    def fail(_: Call[None]) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        caller.run(fail, 60)
    caller.close()


def test_gives_up_a_function_that_hangs_but_not_one_that_moves() -> None:
    caller = DeadlineCaller("test", 4)
    release = threading.Event()
    abandoned: list[bool] = []

    def hang(call: Call[None]) -> None:
        release.wait(60)
        with call.handover:
            abandoned.append(call.abandoned)

    with pytest.raises(DeadlineError):
        caller.run(hang, 0.05)
    release.set()

    def move(call: Call[str]) -> str:
        # Longer than the deadline, and far from it at each step.
        for _ in range(12):
            pause(0.1)
            call.progress_count += 1
        return "moved"

    assert caller.run(move, 1.0) == "moved"
    wait_for(lambda: abandoned, "the end of what hung")
    assert abandoned == [True]
    caller.close()


@pytest.mark.parametrize(("timeout_s", "is_told"), [(0.5, False), (2.0, True)])
def test_a_look_meanwhile_does_not_prolong_a_wait(
    timeout_s: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a look at a NameNode that began a second before the end took two."""
    monkeypatch.setattr("bootseer.store.deadline._ON_WAIT_EVERY_S", 0.4)
    caller = DeadlineCaller("test", 2)
    release = threading.Event()
    looks: list[int] = []
    with pytest.raises(DeadlineError):
        caller.run(lambda _: release.wait(60), timeout_s, on_wait=lambda: looks.append(1))
    assert bool(looks) == is_told
    release.set()
    caller.close()


def test_a_call_without_a_helper_ends_too() -> None:
    caller = DeadlineCaller("test", 1)
    release = threading.Event()
    ran: list[int] = []
    with pytest.raises(DeadlineError):
        caller.run(lambda _: release.wait(60), 0.05)
    with pytest.raises(DeadlineError):
        caller.run(lambda _: ran.append(1), 0.05)
    release.set()
    assert caller.run(lambda _: "served again", 60) == "served again"
    assert ran == [], "nobody waits for it any more"
    caller.close()


def test_many_callers_share_the_helpers() -> None:
    caller = DeadlineCaller("test", 4)
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(caller.run(lambda _: n * n, 60)))
        for n in range(50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [n * n for n in range(50)]
    caller.close()


def test_a_thread_that_cannot_be_started_is_an_error_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = DeadlineCaller("test", 2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(5):
            with pytest.raises(UnavailableError, match="cannot start a thread"):
                caller.run(lambda _: 1, 60)
    assert caller.run(lambda _: 2, 60) == 2
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        # A folder that exists does.
        assert caller.run(lambda _: caller is not None, 60)
    caller.close()


def test_a_forked_child_has_helpers_of_its_own() -> None:
    caller = DeadlineCaller("test", 2)
    assert caller.run(lambda _: 1, 60) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os._exit(caller.run(lambda _: 7, 60))
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    caller.close()


def test_what_was_waited_in_vain_is_not_waited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start has one budget for all calls of all its stages."""
    wait_budget = WaitBudget()
    monkeypatch.setattr("bootseer.store.deadline.WAIT_BUDGET", wait_budget)
    wait_budget.limit(6.0)
    caller = DeadlineCaller("test", 4)
    release = threading.Event()

    def hang(_: Call[None]) -> None:
        release.wait(60)

    def refuse(_: Call[None]) -> None:
        pause(0.6)
        raise UnavailableError("nobody is there")

    with pytest.raises(UnavailableError, match="nobody"):
        caller.run(refuse, 60)
    assert wait_budget.left_s < 5.5
    # A call that succeeds uses up nothing, however long it takes.
    left_s = wait_budget.left_s
    assert caller.run(lambda _: pause(0.7), 60) is None
    assert wait_budget.left_s == left_s
    with pytest.raises(DeadlineError, match="within"):
        caller.run(hang, 60)
    with pytest.raises(DeadlineError, match="within 6 s, in earlier calls"):
        caller.run(hang, 60)
    wait_budget.limit(math.inf)
    assert caller.run(lambda _: 5, 60) == 5
    release.set()
    caller.close()


def test_a_call_that_fails_soon_uses_up_nothing_of_the_budget() -> None:
    """A start may find many objects missing: that takes long only together."""
    wait_budget = WaitBudget()
    wait_budget.limit(6.0)
    for _ in range(100):
        wait_budget.spend(0.4)
    assert wait_budget.left_s == 6.0
    wait_budget.spend(0.75)
    assert wait_budget.left_s == pytest.approx(5.25)


def test_calls_that_wait_at_once_use_the_budget_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: sixteen reads that stalled for four seconds used up a minute."""
    wait_budget = WaitBudget()
    monkeypatch.setattr("bootseer.store.deadline.WAIT_BUDGET", wait_budget)
    wait_budget.limit(8.0)
    caller = DeadlineCaller("test", 16)
    release = threading.Event()
    together = threading.Barrier(16)

    def read(_: int) -> None:
        together.wait(60)
        with pytest.raises(DeadlineError):
            caller.run(lambda _: release.wait(60), 1.0)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(read, range(16)))
    release.set()
    assert not wait_budget.is_spent
    caller.close()


def test_waits_that_overlap_count_as_long_as_anything_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_budget, now_s = WaitBudget(), 100.0
    monkeypatch.setattr("bootseer.base.wait_budget.time.monotonic", lambda: now_s)
    wait_budget.limit(100.0)
    # Ends at, length, rest of the budget.
    for now_s, seconds, left_s in (  # noqa: B007
        (110.0, 5.0, 95.0),
        (111.0, 3.0, 94.0),
        (120.0, 2.0, 92.0),
        (130.0, 30.0, 70.0),
        (130.0, 4.0, 70.0),
        (140.0, 20.0, 60.0),
    ):
        wait_budget.spend(seconds)
        assert wait_budget.left_s == left_s
