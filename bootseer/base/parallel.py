"""A function applied to several items at once in threads; the first failure stops the others.

A thread stops when it next reports progress. Thread-safe.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkStoppedError(Exception):
    """Raised inside work whose result is not needed: other work failed, or the user interrupted."""


class StoppableProgress:
    """Progress callback that raises WorkStoppedError once `stop` was called."""

    def __init__(self, on_progress: Callable[[int], None] | None) -> None:
        self._on_progress = on_progress
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Make every further report of progress raise WorkStoppedError. Idempotent."""
        self._is_stopped.set()

    def __call__(self, count: int) -> None:
        if self._is_stopped.is_set():
            raise WorkStoppedError
        if self._on_progress is not None:
            self._on_progress(count)


def map_in_threads(
    items: Mapping[str, Item],
    work: Callable[[str, Item], Result],
    progress: StoppableProgress,
    *,
    thread_count: int,
    thread_name: str,
    size_of: Callable[[Item], int | None],
    drop: Callable[[Result], object] = lambda result: None,
) -> dict[str, Result]:
    """Return the results of `work` on all items, by their keys and in the order of `items`.

    The largest item is started first, since it takes longest. After a failure or an interrupt no
    further item is started, `progress` stops those in progress, and finished results are passed to
    `drop`. Raises: the first failure.
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
