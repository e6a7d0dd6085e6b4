"""Waiting for processes, and for descriptors of any number: select(2) fails above 1023."""

import os
import select
from collections.abc import Iterable


def wait_readable(descriptors: Iterable[int], timeout_s: float | None) -> list[int]:
    """Those that can be read, or whose other end is gone; [] after `timeout_s` (None: never)."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    timeout_ms = None if timeout_s is None else max(0.0, timeout_s * 1000)
    return [descriptor for descriptor, _ in poll.poll(timeout_ms)]


def wait_ended(pid: int, timeout_s: float | None) -> bool:
    """Whether a child ended in time, at once when it does; `subprocess` looks every 50 ms. It is
    left to be waited for. Raises: OSError."""
    process = os.pidfd_open(pid)
    try:
        return bool(wait_readable([process], timeout_s))
    finally:
        os.close(process)
