"""Waiting for what comes by itself: the only way in which tests wait for other processes."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.linux.locks import lock_within

# What is right happens long before, also on a machine that does much else.
TIMEOUT_S = 60.0


def wait_for(
    condition: Callable[[], object],
    what: str = "it",
    *,
    timeout_s: float = TIMEOUT_S,
    look_s: float = 0.02,
) -> None:
    """Until `condition()` is true, asked every `look_s`; fails, naming `what`, when that never
    happens."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} never happened"
        time.sleep(look_s)


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
