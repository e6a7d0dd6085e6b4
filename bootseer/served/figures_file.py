"""Metrics files in `metrics_dir`: one per running mount or start, for node-exporter.

Only this module writes files named `bootseer-*` there. Several writers of one identity (mounts of
one image and workload, starts of one job) at the same time get different slots. A writer takes the
lowest free slot, so that the next writer continues the series of the last one. A lock beside the
file marks a used slot. A file stays until its slot is used again, or for an hour, since a short
launch may end before it was scraped. Unlike other files of Bootseer these are readable for all
users; they hold names and numbers. The folder may be another user's, so no link in it is followed.
Thread-safe; several processes may use it at once.
"""

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.base.closing import Closing
from bootseer.linux.locks import lock_file

_log = logging.getLogger(__name__)

_KEPT_S = 3600.0
_OURS = re.compile(r"bootseer-(image|start|checkpoint)-[0-9a-f]{16}-")
_LOCK = ".lock"
_SLOTS_MAX = 1000
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def file_name(kind: str, *identity: str) -> str:
    """Return the name of the files of one identity. `kind` is "image", "start" or "checkpoint"."""
    digest = hashlib.sha256("\0".join(identity).encode("utf-8", "surrogateescape"))
    return f"bootseer-{kind}-{digest.hexdigest()[:16]}"


class FiguresFile(Closing):
    """Metrics file of one writer. Has its slot until it is closed, or the process ends."""

    def __init__(self, metrics_dir: Path) -> None:
        """Remove the files of old writers; write nothing yet."""
        self._directory = metrics_dir
        self._folder = self._lock = -1
        self._slot = 0
        self._thread_lock = threading.Lock()
        self._has_failed = False
        with contextlib.suppress(OSError):
            _remove_old(metrics_dir)

    def write(self, name: str, render: Callable[[int], str]) -> None:
        """Replace the file's contents by what `render` returns for the slot.

        `name` is always the same `file_name`. Never raises: the first failure is one warning.
        """
        try:
            with self._thread_lock:
                self._reserve(name)
                self._replace(f"{name}-{self._slot}", render(self._slot).encode())
        except OSError as error:
            self._warn(error)
        except Exception:
            # A bug here must not end the thread; the next round may succeed.
            if not self._has_failed:
                self._has_failed = True
                _log.exception("unexpected error in the figures for %s", self._directory)

    def reserve(self, name: str) -> None:
        """Take a slot now, for copies of this process that will write. Never raises."""
        try:
            with self._thread_lock:
                self._reserve(name)
        except OSError as error:
            self._warn(error)

    def _reserve(self, name: str) -> None:
        if self._folder < 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._folder = os.open(self._directory, _FOLDER)
        if self._lock < 0:
            self._slot, self._lock = _free_slot(self._folder, name)

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning("cannot write figures to %s: %s", self._directory, error)

    def close(self) -> None:
        """Free the slot for another writer; the file stays. Idempotent."""
        for fd in (self._folder, self._lock):
            if fd >= 0:
                os.close(fd)
        self._folder = self._lock = -1

    def _replace(self, name: str, data: bytes) -> None:
        # The collector reads *.prom only.
        temporary = f"{name}.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._folder)
        with os.fdopen(os.open(temporary, _CREATE, 0o600, dir_fd=self._folder), "wb") as file:
            file.write(data)
            # Readable whatever the umask, since node-exporter is another user.
            os.fchmod(file.fileno(), 0o644)
        os.rename(temporary, f"{name}.prom", src_dir_fd=self._folder, dst_dir_fd=self._folder)


def _free_slot(folder: int, name: str) -> tuple[int, int]:
    """Return the lowest free slot, and the descriptor of its lock. Raises: OSError."""
    for slot in range(_SLOTS_MAX):
        with contextlib.suppress(PermissionError, TimeoutError):
            # On to the next slot if it belongs to another user or is in use.
            return slot, lock_file(Path(f"{name}-{slot}{_LOCK}"), 0, folder=folder)
    raise BlockingIOError(None, "too many of one kind at once")


def _remove_old(metrics_dir: Path) -> None:
    before_s = time.time() - _KEPT_S
    folder = os.open(metrics_dir, _FOLDER)
    try:
        for name in os.listdir(metrics_dir):
            with contextlib.suppress(OSError):
                if not _OURS.match(name):
                    continue
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime >= before_s:
                    continue
                held = lock_file(Path(name), 0, folder=folder) if name.endswith(_LOCK) else -1
                os.unlink(name, dir_fd=folder)
                if held >= 0:
                    os.close(held)
    finally:
        os.close(folder)
