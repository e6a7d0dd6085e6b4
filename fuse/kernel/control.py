"""The kernel's control files of FUSE connections (fusectl): lookup and abort of connections.

If fusectl is not mounted on /sys/fs/fuse/connections (containers, minimal hosts), root uses a mount
of its own that has no place in the file tree. The number of a connection is reused as soon as the
connection is gone, so code that waits for a connection holds a `LiveConnection`. Any thread.
"""

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Iterator

log = logging.getLogger(__name__)

_CONNECTIONS = "/sys/fs/fuse/connections"
# System calls since Linux 5.2 have the same number on every architecture but alpha.
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_CLOEXEC = 1  # FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC
_FSCONFIG_CMD_CREATE = 6
_POLL_S = 0.01
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def _connections() -> Iterator[int | None]:
    """Yield a descriptor of the folder of all connections, or None without access."""
    folder = _open_visible() if os.path.ismount(_CONNECTIONS) else _open_private()
    try:
        yield folder
    finally:
        if folder is not None:
            os.close(folder)


def _open_visible() -> int | None:
    try:
        return os.open(_CONNECTIONS, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        log.debug("cannot open %s: %s", _CONNECTIONS, error)
        return None


def _open_private() -> int | None:
    context = _libc.syscall(_SYS_FSOPEN, b"fusectl", _CLOEXEC)
    if context < 0:
        return None
    try:
        if _libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0) < 0:
            return None
        folder = _libc.syscall(_SYS_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)
    return int(folder) if folder >= 0 else None


class LiveConnection:
    """FUSE connection, distinguished from a later connection with the same number."""

    def __init__(self, folder: int, device_minor: int) -> None:
        self._folder = folder
        self._name = str(device_minor)
        try:
            # The inode number of the folder is not reused while the folder is open.
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            self._own_folder: int | None = os.open(self._name, flags, dir_fd=folder)
        except FileNotFoundError:
            self._own_folder = None

    def _is_alive(self) -> bool:
        if self._own_folder is None:
            return False
        try:
            found = os.stat(self._name, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        return found.st_ino == os.fstat(self._own_folder).st_ino

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until the kernel has dropped the connection. Return False if it has not."""
        deadline = time.monotonic() + timeout_s
        while self._is_alive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def abort(self) -> bool:
        """Fail all requests of the connection, now and later. Return False if not allowed.

        A connection that is gone counts as aborted.
        """
        if self._own_folder is None:
            return True
        try:
            control = os.open("abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._own_folder)
        except FileNotFoundError:
            return True
        except OSError as error:
            log.debug("cannot abort connection %s: %s", self._name, error)
            return False
        try:
            os.write(control, b"1")
        finally:
            os.close(control)
        return True

    def close(self) -> None:
        """Close the descriptor of the connection's folder."""
        if self._own_folder is not None:
            os.close(self._own_folder)
            self._own_folder = None


@contextlib.contextmanager
def connection(device_minor: int) -> Iterator[LiveConnection | None]:
    """Yield the connection with this number; None if the control files are not accessible."""
    with _connections() as folder:
        if folder is None:
            yield None
            return
        live = LiveConnection(folder, device_minor)
        try:
            yield live
        finally:
            live.close()


def abort(device_minor: int) -> bool:
    """Fail all requests of the connection, now and later.

    Return False if the control files are not accessible. A gone connection counts as aborted.
    """
    with connection(device_minor) as live:
        return live is not None and live.abort()
