"""Work on several things at once in threads, all of which ends at the first failure.

Alone owns how work in another thread comes to an early end: at its next report of progress.
Thread-safe.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class StoppedError(Exception):
    """Other work failed, or the user interrupted: this work need not be finished."""


class Stoppable:
    """`on_progress` that raises StoppedError once `stop` was called."""

    def __init__(self, on_progress: Callable[[int], None] | None) -> None:
        self._on_progress = on_progress
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Ends the work of every thread that reports progress from here on. Idempotent."""
        self._is_stopped.set()

    def __call__(self, count: int) -> None:
        if self._is_stopped.is_set():
            raise StoppedError
        if self._on_progress is not None:
            self._on_progress(count)


def each_at_once(
    items: Mapping[str, Item],
    work: Callable[[str, Item], Result],
    progress: Stoppable,
    *,
    thread_count: int,
    thread_name: str,
    size_of: Callable[[Item], int | None],
    drop: Callable[[Result], object] = lambda result: None,
) -> dict[str, Result]:
    """The results of `work` on all items, by their keys and in their order.

    The largest is begun first: it takes longest, and may be most of the work. After a failure or an
    interrupt nothing more begins, `progress` stops what has begun, and results that are there
    already are given to `drop`. Raises: the failure.
    """
    with ThreadPoolExecutor(thread_count, thread_name_prefix=thread_name) as pool:
        ordered = sorted(items.items(), key=lambda item: -(size_of(item[1]) or 0))
        futures = {key: pool.submit(work, key, item) for key, item in ordered}
        try:
            concurrent.futures.wait(
                futures.values(), return_when=concurrent.futures.FIRST_EXCEPTION
            )
            for future in futures.values():
                if future.done() and (error := future.exception()) is not None:
                    raise error
        except BaseException:
            progress.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in futures.values():
                with contextlib.suppress(BaseException):
                    drop(future.result(0))
            raise
    return {key: futures[key].result() for key in items}
