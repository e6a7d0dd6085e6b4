"""Calls that the tests of stores share."""

import concurrent.futures
import threading
from collections.abc import Callable

from bootseer.store import Backend


def put(backend: Backend, path: str, data: bytes, *, overwrite: bool = False) -> None:
    """Write a whole file."""
    with backend.create(path, overwrite=overwrite) as writer:
        writer.write(data)


def race(count: int, function: Callable[[int], bool]) -> int:
    """Return how many of `count` threads that start at once get True."""
    barrier = threading.Barrier(count)

    def run(index: int) -> bool:
        barrier.wait(60)
        return function(index)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return sum(pool.map(run, range(count), timeout=60))
