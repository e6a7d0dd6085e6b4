"""Suppression of duplicate calls: of several threads that need a result, one computes it.

Used to open stored files once, since each opening is a request to a server. Any thread.
"""

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

Result = TypeVar("Result")

# A thread that has waited for so long computes the result itself: the other thread may hang, or may
# have stayed in the process from which this one was forked.
_WAIT_S = 5.0


class SingleFlight:
    """Calls in progress by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, threading.Event] = {}

    def do(
        self, key: Hashable, find: Callable[[], Result | None], work: Callable[[], Result]
    ) -> Result:
        """Return the result of `find`; while it is None, of `work`, called by one thread at a time.

        After `work` has returned, `find` must find its result. If `work` fails, each waiting thread
        calls it in turn. Raises: as `find` and `work`.
        """
        found = find()
        if found is not None:
            return found
        with self._lock:
            others = self._under_way.get(key)
            done = self._under_way.setdefault(key, threading.Event())
        if others is not None and others.wait(_WAIT_S) and (found := find()) is not None:
            return found
        try:
            return work()
        finally:
            with self._lock:
                self._under_way.pop(key, None)
            done.set()
