"""Calls to HDFS that do not return: which part of the cluster the error names."""

import contextlib
import math
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import DeadlineError, UnavailableError
from bootseer.store import open_backend
from tests.bootseer.store.hdfs.name_nodes import NativeClient, NativeFile, replaced_library


class _StopError(BaseException):
    """Exception of a signal handler."""


class _PanicError(BaseException):
    """Exception of hdfs-native for a panic in Rust."""


class _Doing(NativeClient):
    """Library whose every method does the same."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action

    def get_file_info(self, path: str) -> Any:
        return self._action()

    def read(self, path: str) -> NativeFile:
        return NativeFile(self._action())


def _stop(number: int, frame: FrameType | None) -> None:
    raise _StopError


def test_a_signal_that_ends_the_waiting_is_no_failure_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    waiting = threading.get_ident()
    before = signal.signal(signal.SIGALRM, _stop)

    def hang() -> None:
        signal.pthread_kill(waiting, signal.SIGALRM)
        release.wait(30)

    try:
        with replaced_library(monkeypatch, _Doing(hang)) as url, pytest.raises(_StopError):
            open_backend(url).stat("a")
    finally:
        signal.signal(signal.SIGALRM, before)
        release.set()


def test_name_nodes_that_do_not_serve_use_up_the_patience_of_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: each lease of a start waited a deadline for the end of the safe mode."""

    def refuse() -> None:
        raise RuntimeError('RPCError("org.apache.hadoop.SafeModeException", "in safe mode")')

    with replaced_library(monkeypatch, _Doing(refuse), "?deadline_s=6") as url:
        WAIT_BUDGET.limit(2.5)
        try:
            with pytest.raises(UnavailableError, match="in safe mode"):
                open_backend(url).stat("a")
            # It ends when the next pause, of at most 1.6 s, would be too long.
            assert WAIT_BUDGET.left_s <= 1.6
        finally:
            WAIT_BUDGET.limit(math.inf)


def test_a_panic_is_a_failure_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic() -> None:
        raise _PanicError("index out of bounds")

    told = r"cannot look at \S+/x/a: index out"
    with (
        replaced_library(monkeypatch, _Doing(panic)) as url,
        pytest.raises(UnavailableError, match=told),
    ):
        open_backend(url).stat("a")


@pytest.mark.parametrize("listens", [True, False])
def test_a_call_without_an_answer_names_what_was_asked(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error also tells a NameNode that hangs from one that is gone, which may soon return."""
    release = threading.Event()
    told = "no answer within 2 s"
    told += "" if listens else ", and no NameNode took a connection"
    kind = DeadlineError if listens else UnavailableError
    calls: list[Callable[[], Any]] = [lambda: b"first", lambda: release.wait(30)]
    with contextlib.ExitStack() as stack:
        client = _Doing(lambda: calls.pop(0)())
        url = stack.enter_context(replaced_library(monkeypatch, client, "?deadline_s=60"))
        backend = open_backend(url)
        assert backend.read("a") == b"first"
        if not listens:
            stack.close()
        # A start waits less than the deadline.
        WAIT_BUDGET.limit(2.0)
        try:
            with pytest.raises(kind, match=rf"^cannot look at \S+/x/a: {told}"):
                backend.stat("a")
        finally:
            WAIT_BUDGET.limit(math.inf)
            release.set()


def test_a_block_that_nobody_is_known_to_have_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A NameNode that was just started may not know the replicas yet.

    If it still does not, the replicas are lost, and the error comes within a minute.
    """
    missing_count, asked = 2, []

    def read() -> bytes:
        asked.append("")
        if len(asked) <= missing_count:
            raise RuntimeError('DataTransferError("All DataNodes failed: []")')
        return b"abc"

    with replaced_library(monkeypatch, _Doing(read), "?deadline_s=60") as url:
        assert open_backend(url).read("a") == b"abc"
        assert len(asked) == 3
        missing_count = 100
        with pytest.raises(UnavailableError, match=r"All DataNodes failed: \[\]"):
            open_backend(url).read("a")
        assert len(asked) == 9
