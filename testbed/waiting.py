"""Waiting: for what other processes bring about (`wait_for`), and as slow servers do (`pause`).

Nothing else in tests and test beds sleeps.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any, TypeVar

from bootseer.linux.locks import lock_within

# What is right happens long before, also on a machine that does much else.
TIMEOUT_S = 60.0
_Found = TypeVar("_Found")
# Also where a test replaces `time.sleep`.
_sleep = time.sleep  # noqa: TID251


def pause(seconds: float) -> None:
    """Sleep: for what is slow on purpose, or paced. To wait for something, use `wait_for`."""
    _sleep(max(0.0, seconds))


def looks(timeout_s: float = TIMEOUT_S, look_s: float = 0.02) -> Iterator[None]:
    """Yield once, and again every `look_s` until `timeout_s` have passed."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        yield
        if time.monotonic() > deadline_s:
            return
        _sleep(look_s)


def wait_for(
    condition: Callable[[], _Found],
    what: str = "it",
    *,
    timeout_s: float = TIMEOUT_S,
    look_s: float = 0.02,
) -> _Found:
    """Return the first true result of `condition()`, which is called every `look_s`.

    Raises: AssertionError, naming `what`, when there is none within `timeout_s`.
    """
    for _ in looks(timeout_s, look_s):
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
    """Return the first true result of `condition()`, which tells that a started process serves.

    Raises: `error` with `last_words()` when the process ends before, or `timeout_s` pass.
    """
    for _ in looks(timeout_s):
        if found := condition():
            return found
        if process.poll() is not None:
            break
    raise error(f"did not start: {last_words()}")


def is_listening(port: int) -> bool:
    """Tell whether a server takes connections at this port of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def waiting_places(pid: int) -> list[str]:
    """In which function of the kernel each thread of a process waits."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/wchan"):
        with contextlib.suppress(OSError):
            found.append(path.read_text())
    return found


def wait_until_it_asks(pid: int) -> None:
    """Until a process waits for what a file system's server answers."""
    wait_for(
        lambda: any(
            part in place for place in waiting_places(pid) for part in ("answer", "fuse", "folio")
        ),
        f"a request of process {pid}",
    )


@contextlib.contextmanager
def locked(path: Path, timeout_s: float, error: type[Exception]) -> Iterator[None]:
    """Hold the lock of a file. Raises: `error` when another process does for longer than that."""
    with path.open("w") as file:
        try:
            lock_within(file.fileno(), timeout_s)
        except TimeoutError:
            raise error(f"another process holds {path}") from None
        yield
