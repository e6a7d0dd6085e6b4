"""Whose failure it is when a call to HDFS does not return."""

import signal
import socket
import threading
from types import FrameType

import pytest

from bootseer.errors import DeadlineError, UnavailableError
from bootseer.store.hdfs.backend import HdfsBackend

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
    waiting = threading.get_ident()
    before = signal.signal(signal.SIGALRM, _stop)

    def hang(_: object) -> bool:
        signal.pthread_kill(waiting, signal.SIGALRM)
        return release.wait(30)

    try:
        with pytest.raises(_StopError):
            HdfsBackend(_URL).run(hang, "read", "a")
    finally:
        signal.signal(signal.SIGALRM, before)
        release.set()


def test_a_panic_is_a_failure_of_the_server() -> None:
    def panic(_: object) -> None:
        raise _PanicError("index out of bounds")

    with pytest.raises(UnavailableError, match=r"cannot read \S+/x/a: index out"):
        HdfsBackend(_URL).run(panic, "read", "a")


@pytest.mark.parametrize("listens", [True, False])
def test_a_call_without_an_answer_names_what_was_asked(listens: bool) -> None:
    """And tells a NameNode that hangs from one that is gone, which may be back soon."""
    release = threading.Event()
    told = "no answer" if listens else "within .* no NameNode took a connection"
    kind = DeadlineError if listens else UnavailableError
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"hdfs://127.0.0.1:{server.getsockname()[1]}/x" if listens else _URL
        try:
            with pytest.raises(kind, match=rf"^cannot read \S+/x/a: {told}"):
                HdfsBackend(url, deadline_s=1.0).run(lambda _: release.wait(30), "read", "a")
        finally:
            release.set()
