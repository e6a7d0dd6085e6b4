"""The files with figures in `metrics_dir`: one per running mount, replaced while it lives, kept a
while.

Alone owns the names `bootseer-image-*` there. Mounts of one image and workload that run at once are
told apart by a slot: the lowest number that none of them has, so that the next start goes on with
the series of the last one. A lock beside the file says that its slot is in use. A launch may be
over before it was scraped: its file stays until the slot is used again, or for an hour. Unlike
everything else of ours, these files are for all users: they hold names of images and workloads, and
numbers. The folder may be another user's: no link in it is followed. Thread-safe; several processes
at once do no harm.
"""

import contextlib
import hashlib
import logging
import os
import threading
import time
from pathlib import Path

from bootseer.base.closing import Closing
from bootseer.linux.locks import lock_file
from bootseer.prefetch.serve.launch_figures import LaunchFigures
from bootseer.prefetch.serve.prometheus import render

_log = logging.getLogger(__name__)

_KEPT_S = 3600.0
_PREFIX = "bootseer-image-"
_LOCK = ".lock"
_SLOTS_MAX = 1000
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FiguresFile(Closing):
    """One mount's file. It has its slot until it is closed, or its process ends."""

    def __init__(self, metrics_dir: Path) -> None:
        """Nothing is written yet, but what older mounts left is removed."""
        self._directory = metrics_dir
        self._folder = self._lock = -1
        self._slot = 0
        self._turn = threading.Lock()
        self._has_failed = False
        with contextlib.suppress(OSError):
            _remove_old(metrics_dir)

    def write(self, figures: LaunchFigures) -> None:
        """Replace the file at once. Never raises: one warning when it cannot be written."""
        name = (
            _PREFIX
            + hashlib.sha256(
                f"{figures.image}\0{figures.workload}".encode("utf-8", "surrogateescape")
            ).hexdigest()[:16]
        )
        try:
            with self._turn:
                if self._folder < 0:
                    self._directory.mkdir(parents=True, exist_ok=True)
                    self._folder = os.open(self._directory, _FOLDER)
                if self._lock < 0:
                    self._slot, self._lock = _free_slot(self._folder, name)
                self._replace(f"{name}-{self._slot}", render(figures, self._slot).encode())
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                _log.warning("cannot write figures to %s: %s", self._directory, error)

    def close(self) -> None:
        """Let another mount have the slot; the file stays. Idempotent."""
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
            # Whatever the umask: node-exporter is another user.
            os.fchmod(file.fileno(), 0o644)
        os.rename(temporary, f"{name}.prom", src_dir_fd=self._folder, dst_dir_fd=self._folder)


def _free_slot(folder: int, name: str) -> tuple[int, int]:
    """The lowest slot that no process has, and the descriptor that holds it. Raises: OSError."""
    for slot in range(_SLOTS_MAX):
        with contextlib.suppress(PermissionError, TimeoutError):
            # Of another user, or in use.
            return slot, lock_file(Path(f"{name}-{slot}{_LOCK}"), 0, folder=folder)
    raise BlockingIOError(None, "too many mounts of one image at once")


def _remove_old(metrics_dir: Path) -> None:
    before_s = time.time() - _KEPT_S
    folder = os.open(metrics_dir, _FOLDER)
    try:
        for name in os.listdir(metrics_dir):
            with contextlib.suppress(OSError):
                if not name.startswith(_PREFIX):
                    continue
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime >= before_s:
                    continue
                held = lock_file(Path(name), 0, folder=folder) if name.endswith(_LOCK) else -1
                os.unlink(name, dir_fd=folder)
                if held >= 0:
                    os.close(held)
    finally:
        os.close(folder)
