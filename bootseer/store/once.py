"""One thread does what several want done, and the others wait for it a moment.

For stored files that are kept open: each opening is a question to a server. Any thread.
"""

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

Result = TypeVar("Result")

# Who has waited for so long does it too: the other thread may hang, or may have stayed in the
# process that this one was forked from.
_WAIT_S = 5.0


class Once:
    """Work under way, by its key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, threading.Event] = {}

    def do(
        self, key: Hashable, find: Callable[[], Result | None], work: Callable[[], Result]
    ) -> Result:
        """Return what `find` finds or, if that is None, what `work` returns, which is found then.

        Where `work` fails, each of those who waited calls it in turn. Raises: as both.
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
