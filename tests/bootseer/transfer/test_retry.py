"""The retry policy and the rate cap: pure, so tested for any input."""

import errno

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
from bootseer.transfer.rate import TokenBucket
from bootseer.transfer.retry import RetryPolicy, as_bootseer_error, fresh_copy, is_retryable
from bootseer.transfer.statistics import percentile


@given(attempts_made=st.integers(1, 10_000), fraction=st.floats(0, 1, exclude_max=True))
def test_delay_grows_to_its_cap_and_is_never_nothing(attempts_made: int, fraction: float) -> None:
    policy = RetryPolicy(base_s=0.1, cap_s=3)
    delay_s = policy.delay_s(attempts_made, fraction)
    assert 0.05 <= delay_s <= 3
    assert policy.delay_s(attempts_made + 1, fraction) >= delay_s


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
    policy = RetryPolicy(attempts=2)
    assert policy.allows(error, 1) is retryable
    assert not policy.allows(error, 2)


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


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([7], 0.99) == 7
    assert percentile(list(range(100)), 0.5) == 50
    assert percentile(list(range(100)), 0.99) == 99
