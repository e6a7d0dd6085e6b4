"""Whose failure it is when a call to HDFS does not return."""

import signal
import threading
from types import FrameType

import pytest

from bootseer.errors import DeadlineError, UnavailableError
from bootseer.store.deadline import Call
from bootseer.store.hdfs.connection import HdfsConnection

# Nothing listens there, and no test here connects.
_URL = "hdfs://127.0.0.1:1/x"


class _StopError(BaseException):
    """What a signal handler raises."""


class _PanicError(BaseException):
    """What hdfs-native raises when Rust panics."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _StopError


def test_a_signal_that_ends_the_waiting_is_no_failure_of_the_server() -> None:
    release = threading.Event()
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(_StopError):
            HdfsConnection(_URL).run(lambda _: release.wait(30), "read", "a")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        release.set()


def test_a_panic_is_a_failure_of_the_server() -> None:
    def panic(_: Call[None]) -> None:
        raise _PanicError("index out of bounds")

    with pytest.raises(UnavailableError, match=r"cannot read \S+/x/a: index out"):
        HdfsConnection(_URL).run(panic, "read", "a")


def test_a_call_without_an_answer_names_what_was_asked() -> None:
    release = threading.Event()
    try:
        with pytest.raises(DeadlineError, match=r"^cannot read \S+/x/a: no answer"):
            HdfsConnection(_URL, deadline_s=0.1).run(lambda _: release.wait(30), "read", "a")
    finally:
        release.set()
