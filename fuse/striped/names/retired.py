"""Deletion of parts that no layout names any more.

A retired generation is deleted after a grace period for readers on other nodes, once no file of
this mount has it open. `close` deletes all generations that are not open, without the grace period.
After a crash, fsck finds and deletes the parts. Thread-safe.
"""

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from bootseer.fuse.striped.view import generation_folder
from bootseer.store.backend import Backend
from bootseer.transfer.policy import Policy, dice

_log = logging.getLogger(__name__)

_SWEEP_S = 1.0
# Well below the age (an hour) at which fsck deletes garbage.
_MARK_EVERY_S = 900.0
_CLOSE_TIMEOUT_S = 5.0
# Deletions that fail are repeated with growing pauses.
_AGAIN = Policy(attempts=math.inf, base_s=1.0, cap_s=300.0)


class _Retired(Struct):
    directory: str
    generation: str
    due_s: float
    marked_s: float = -math.inf
    mark: str = ""
    failures_count: int = 0


class RetiredParts:
    """The retired generations of one storage, and the thread that deletes them."""

    def __init__(self, backend: Backend, grace_s: float, in_use: Callable[[], set[str]]) -> None:
        """`in_use` returns the generations that are open in this mount."""
        self._backend = backend
        self._grace_s = grace_s
        self._in_use = in_use
        self._folders: list[_Retired] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def retire(self, directory: str, generations: set[str], *, were_visible: bool = True) -> None:
        """Delete the folders of generations in `directory` once they have no readers.

        Generations that were never visible have no readers anywhere, so they get no grace period.
        """
        due_s = time.monotonic() + (self._grace_s if were_visible else 0.0)
        with self._lock:
            self._folders += [_Retired(directory, name, due_s) for name in sorted(generations)]
            if self._thread is None and not self._closed and self._folders:
                self._thread = threading.Thread(target=self._run, name="stripe-delete", daemon=True)
                self._thread.start()
        if self._grace_s <= 0:
            self.sweep()

    def moved(self, source: str, target: str) -> None:
        """Follow a rename of the directory `source` to `target`."""
        with self._lock:
            for retired in self._folders:
                if retired.directory == source or retired.directory.startswith(source + "/"):
                    retired.directory = target + retired.directory[len(source) :]

    def take(self, directory: str) -> None:
        """Forget the folders of one directory, which the caller removes."""
        with self._lock:
            self._folders = [retired for retired in self._folders if retired.directory != directory]

    def sweep(self, *, all_due: bool = False) -> None:
        """Delete the folders that are due and not in use. Failures are logged and tried again."""
        now_s = time.monotonic()
        used = self._in_use()
        with self._lock:
            due = [
                retired
                for retired in self._folders
                if (all_due or retired.due_s <= now_s) and retired.generation not in used
            ]
            self._folders = [retired for retired in self._folders if retired not in due]
            held = [
                retired
                for retired in self._folders
                if retired.due_s <= now_s and retired.marked_s + _MARK_EVERY_S <= now_s
            ]
            for retired in held:
                retired.marked_s = now_s
        for retired in held:
            self._mark(retired)
        for retired in due:
            self._delete(retired, is_last=all_due)

    def _delete(self, retired: _Retired, *, is_last: bool) -> None:
        folder = generation_folder(retired.directory, retired.generation)
        try:
            self._backend.delete(folder, recursive=True)
        except Exception as error:
            # No error may prevent the deletion of the other folders.
            if is_last:
                _log.warning("replaced parts stay behind for fsck: %s", error)
                return
            retired.failures_count += 1
            pause_s = _AGAIN.delay_s(retired.failures_count, dice())
            _log.warning("replaced parts are deleted in %.0f s: %s", pause_s, error)
            with self._lock:
                retired.due_s = time.monotonic() + pause_s
                self._folders.append(retired)

    def _mark(self, retired: _Retired) -> None:
        """Renew the age of a folder that this mount still reads, to keep it from fsck."""
        folder = generation_folder(retired.directory, retired.generation)
        # No error may prevent the deletions; the mark is renewed again later.
        with contextlib.suppress(Exception):
            old, mark = retired.mark, f"open-{secrets.token_hex(8)}"
            with self._backend.create(f"{folder}/{mark}") as writer:
                writer.write(b"\n")
            retired.mark = mark
            if old:
                self._backend.delete(f"{folder}/{old}")

    def close(self) -> None:
        """Delete all folders that are not in use, now."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        self.sweep(all_due=True)

    def _run(self) -> None:
        while not self._wake.wait(_SWEEP_S):
            try:
                self.sweep()
            except Exception:
                # This thread must not end: nothing would be deleted any more.
                _log.exception("replaced parts are deleted later")
