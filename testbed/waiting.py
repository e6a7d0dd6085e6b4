"""Waiting for other processes (`wait_for`), and slowness on purpose (`pause`).

No other module of tests and test beds sleeps.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any, TypeVar

from bootseer.linux.locks import lock_within

# Long enough for a correct program on a busy machine.
TIMEOUT_S = 60.0
_Found = TypeVar("_Found")
# A copy, which still sleeps where a test replaces `time.sleep`.
_sleep = time.sleep  # noqa: TID251


def pause(seconds: float) -> None:
    """Sleep, to be slow on purpose or to keep a pace. To wait for something, use `wait_for`."""
    _sleep(max(0.0, seconds))


def polling(timeout_s: float = TIMEOUT_S, interval_s: float = 0.02) -> Iterator[None]:
    """Yield at once, and again every `interval_s` until `timeout_s` have passed."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        yield
        if time.monotonic() > deadline_s:
            return
        _sleep(interval_s)


def wait_for(
    condition: Callable[[], _Found],
    what: str = "it",
    *,
    timeout_s: float = TIMEOUT_S,
    interval_s: float = 0.02,
) -> _Found:
    """Return the first true result of `condition()`, which is called every `interval_s`.

    Raises: AssertionError, naming `what`, if there is no true result within `timeout_s`.
    """
    for _ in polling(timeout_s, interval_s):
        if found := condition():
            return found
    raise AssertionError(f"{what} never happened")


def wait_started(
    process: "Popen[Any]",
    condition: Callable[[], _Found],
    last_words: Callable[[], str],
    *,
    timeout_s: float = TIMEOUT_S,
    error: type[Exception] = AssertionError,
) -> _Found:
    """Return the first true result of `condition()`, which tells whether a started process serves.

    Raises: `error` with `last_words()` if the process ends before, or `timeout_s` pass.
    """
    for _ in polling(timeout_s):
        if found := condition():
            return found
        if process.poll() is not None:
            break
    raise error(f"did not start: {last_words()}")


def is_listening(port: int) -> bool:
    """Return whether a server accepts connections at this port of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def wait_channels(pid: int) -> list[str]:
    """Return the kernel function in which each thread of a process waits."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/wchan"):
        with contextlib.suppress(OSError):
            found.append(path.read_text())
    return found


def wait_for_fuse_request(pid: int) -> None:
    """Wait until a thread of the process waits for the reply of a file system's server."""
    wait_for(
        lambda: any(
            part in place for place in wait_channels(pid) for part in ("answer", "fuse", "folio")
        ),
        f"a request of process {pid}",
    )


@contextlib.contextmanager
def locked(path: Path, timeout_s: float, error: type[Exception]) -> Iterator[None]:
    """Hold the lock of a file.

    Raises: `error` if another process holds the lock for longer than `timeout_s`.
    """
    with path.open("w") as file:
        try:
            lock_within(file.fileno(), timeout_s)
        except TimeoutError:
            raise error(f"another process holds {path}") from None
        yield
