"""The retry policy and the rate cap are pure, so they are tested for any input."""

import errno
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    SetupFailedError,
    UnavailableError,
)
from bootseer.transfer.pace import FLOOR_BYTES_PER_S, ByteProgress, Pace, TokenBucket
from bootseer.transfer.policy import Attempts, Policy, as_bootseer_error, fresh_copy, is_retryable


@given(failures=st.integers(1, 10_000), fraction=st.floats(0, 1, exclude_max=True))
def test_delay_grows_to_its_cap_and_is_never_nothing(failures: int, fraction: float) -> None:
    policy = Policy(base_s=0.1, cap_s=3)
    delay_s = policy.delay_s(failures, fraction)
    assert 0.05 <= delay_s <= 3
    assert policy.delay_s(failures + 1, fraction) >= delay_s


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (UnavailableError("x"), True),
        (DeadlineError("x"), True),
        (CorruptError("x"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(errno.EIO, "x"), True),
        (OSError(errno.ESTALE, "x"), True),
        (OSError(errno.ENOSPC, "x"), False),
        (NotFoundError("x"), False),
        (PermissionDeniedError("x"), False),
        (InvalidInputError("x"), False),
        (KeyError("x"), False),
    ],
)
def test_what_is_retryable(error: Exception, retryable: bool) -> None:
    assert is_retryable(error) is retryable
    policy = Policy(attempts=2)
    assert (policy.pause_s(error, 1, 60.0, 0.5) is not None) is retryable
    assert policy.pause_s(error, 2, 60.0, 0.5) is None


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (FileNotFoundError("gone"), NotFoundError),
        (PermissionError("no"), PermissionDeniedError),
        (TimeoutError("late"), DeadlineError),
        (ConnectionRefusedError("down"), UnavailableError),
        (OSError(errno.ENOSPC, "full"), NoSpaceError),
        (KeyError("bug"), BootseerError),
    ],
)
def test_foreign_errors_become_ours_and_say_what_failed(
    error: Exception, ours: type[BootseerError]
) -> None:
    translated = as_bootseer_error(error, "read blobs/x")
    assert type(translated) is ours
    assert "read blobs/x" in str(translated)
    assert translated.__cause__ is error


def test_a_copy_is_another_object_that_says_the_same() -> None:
    error = UnavailableError("down")
    copy = fresh_copy(error)
    assert copy is not error
    assert (type(copy), str(copy)) == (UnavailableError, "down")
    odd = SetupFailedError("failed", 3)
    assert fresh_copy(odd) is odd


@given(
    rate=st.floats(1, 1e9),
    takes=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 10_000_000)), max_size=50),
)
def test_bucket_never_lets_more_through_than_rate_and_burst(
    rate: float, takes: list[tuple[float, int]]
) -> None:
    bucket = TokenBucket(rate, now_s=0.0, burst_s=0.5)
    now_s = 0.0
    taken_bytes = 0
    for pause_s, size_bytes in takes:
        now_s = max(now_s + pause_s, bucket.ready_at_s(now_s + pause_s))
        # All that was taken before has been paid for by now, but for the burst.
        assert taken_bytes <= rate * (now_s + 0.5) * (1 + 1e-9) + 1
        bucket.take(size_bytes, now_s)
        taken_bytes += size_bytes


# ---- the planner beside an obviously right model ------------------------------------------

_BUSY = UnavailableError("busy")
_BUSY.retry_after_s = 1.5
FAILURES = {
    "down": UnavailableError("down"),
    "late": DeadlineError("late"),
    "wrong": CorruptError("wrong"),
    "busy": _BUSY,
    "gone": NotFoundError("gone"),
    "progress": None,
}


def model(
    attempts: int, deadline_s: float, events: list[tuple[str, float, float]]
) -> list[float | None]:
    """Return the results of `Attempts.pause_s` for these failures, in plain steps."""
    now_s, begun_s, count, answers = 0.0, 0.0, 0, list[float | None]()
    for what, took_s, fraction in events:
        now_s += took_s
        if what == "progress":
            begun_s, count = now_s, 0
            continue
        count += 1
        full_s = [0.1, 0.2, 0.4, 0.8, 1.6][count - 1] if count <= 5 else 2.0
        wait_s = full_s / 2 + full_s / 2 * fraction
        if what == "wrong":
            wait_s = 0.0
        if what == "busy":
            wait_s = max(wait_s, 1.5)
        is_final = what == "gone" or count >= attempts or (what == "wrong" and count >= 4)
        if is_final or wait_s >= begun_s + deadline_s - now_s:
            answers.append(None)
            break
        answers.append(wait_s)
        now_s += wait_s
    return answers


@given(
    attempts=st.integers(1, 12),
    deadline_s=st.sampled_from([0.0371, 1.0371, 5.0371, 1e6]),
    events=st.lists(
        st.tuples(
            st.sampled_from(sorted(FAILURES)),
            st.sampled_from([0.0, 0.01, 0.7]),
            st.sampled_from([0.0, 0.25, 0.9]),
        ),
        max_size=20,
    ),
)
def test_attempts_are_as_the_model_plans_them(
    attempts: int, deadline_s: float, events: list[tuple[str, float, float]]
) -> None:
    now_s = 0.0
    fractions = iter([fraction for what, _, fraction in events if what != "progress"])
    planner = Attempts(
        Policy(attempts=attempts),
        deadline_s,
        clock=lambda: now_s,
        random_fraction=lambda: next(fractions),
    )
    answers: list[float | None] = []
    for what, took_s, _ in events:
        now_s += took_s
        error = FAILURES[what]
        if error is None:
            planner.progressed()
            continue
        answers.append(planner.pause_s(error))
        if answers[-1] is None:
            break
        now_s += answers[-1]
    assert answers == pytest.approx(model(attempts, deadline_s, events))


def test_a_trickle_is_silence_and_more_than_that_is_not() -> None:
    progress = ByteProgress(10.0)
    assert progress.silent_s(0, 11.0) == 1.0
    assert progress.silent_s(FLOOR_BYTES_PER_S, 12.0) == 2.0, "too few bytes for two seconds"
    assert progress.silent_s(3 * FLOOR_BYTES_PER_S, 12.5) == 0.0
    assert progress.silent_s(3 * FLOOR_BYTES_PER_S, 14.0) == 1.5


@given(
    rates=st.lists(st.integers(1, 10**9), min_size=4, max_size=64),
    length=st.integers(1, 2**30),
    done=st.integers(0, 2**30),
    elapsed_s=st.floats(0, 1000),
    silent_s=st.floats(0, 1000),
)
def test_late_is_four_times_slower_than_usual_or_silent(
    rates: list[int], length: int, done: int, elapsed_s: float, silent_s: float
) -> None:
    pace = Pace()
    for rate in rates:
        pace.note(rate, 1.0)
    usual = statistics.median(rates)
    expected_s = length / usual
    silent = silent_s >= max(1.0, 4 * expected_s)
    slow = elapsed_s >= max(0.3, expected_s) and done < elapsed_s * usual / 4
    if elapsed_s:
        late = pace.is_late(length, done, elapsed_s, silent_s, has_replicas=True)
        assert late == (done < length and (silent or (done / elapsed_s < usual / 4 and slow)))
        is_over = elapsed_s >= max(1.0, 4 * expected_s)
        assert pace.is_late(length, done, elapsed_s, silent_s, has_replicas=False) == (
            done < length and (silent or (is_over and done / elapsed_s < usual / 4))
        )


def test_credit_for_second_requests_does_not_pile_up() -> None:
    """After an idle hour a storage that slows down as a whole does not get every request twice."""
    pace = Pace()
    for _ in range(10_000):
        pace.note(1 << 20, 0.1)
        pace.note(1 << 20, 0.1, is_second=True)
    assert sum(pace.spend() for _ in range(100)) == 8
