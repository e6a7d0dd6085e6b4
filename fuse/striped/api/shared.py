"""One `StripedStorage` per target and process, however many ask for it.

Owns the sharing: fsspec makes a file system per thread, and each of them with a window of its own
would hold many times the memory that was allowed. Thread-safe. A forked child opens its own, and
leaves the parent's alone: the threads behind it did not come along.
"""

import os
import threading
import weakref
from collections.abc import Callable, Hashable

from bootseer.fuse.striped.storage import StripedStorage

_lock = threading.Lock()
_known: "weakref.WeakValueDictionary[Hashable, SharedStorage]" = weakref.WeakValueDictionary()
# What a forked child inherited. Kept: to drop a connection can mean to wait for its threads.
_inherited: list[StripedStorage] = []


class SharedStorage:
    """A storage that is opened when it is first asked for, and closed after its last user."""

    def __init__(self, make: Callable[[], StripedStorage]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._opened: list[StripedStorage] = []
        weakref.finalize(self, _close, os.getpid(), self._opened)

    def get(self) -> StripedStorage:
        """The storage, for this process."""
        with self._lock:
            if not self._opened:
                self._opened.append(self._make())
            return self._opened[0]

    def after_fork(self) -> None:
        """Forget the parent's storages, in a forked child. Locks of threads that are gone stay
        locked."""
        self._lock = threading.Lock()
        _inherited.extend(self._opened)
        self._opened = []
        weakref.finalize(self, _close, os.getpid(), self._opened)


def shared_storage(key: Hashable, make: Callable[[], StripedStorage]) -> SharedStorage:
    """The storage that all code of this process gets for `key`."""
    with _lock:
        found = _known.get(key)
        if found is None:
            found = _known[key] = SharedStorage(make)
        return found


def _close(pid: int, opened: list[StripedStorage]) -> None:
    if pid == os.getpid():
        while opened:
            opened.pop().close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for shared in list(_known.values()):
        shared.after_fork()


os.register_at_fork(after_in_child=_after_fork)
