"""Waiting for what comes by itself: the only way in which tests wait for other processes."""

import time
from collections.abc import Callable

# What is right happens long before, also on a machine that does much else.
TIMEOUT_S = 60.0


def wait_for(
    condition: Callable[[], object], what: str = "it", *, timeout_s: float = TIMEOUT_S
) -> None:
    """Until `condition()` is true; fails, naming `what`, when that never happens."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} never happened"
        time.sleep(0.02)
