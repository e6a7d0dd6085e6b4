"""Waiting for what comes by itself: the only way in which tests wait for other processes."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

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


def wait_until_it_reads(pid: int, path: Path) -> None:
    """Until a process has a file open and waits for what the file's server answers."""
    wait_for(
        lambda: path in _open_files(pid) and any(one.strip("0") for one in waiting_places(pid)),
        f"a read of {path}",
    )


def _open_files(pid: int) -> list[Path]:
    found = []
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.append(path.readlink())
    return found
