"""The kernel's control files of FUSE connections: is one alive, and abort it.

Alone knows the fusectl file system. Where nobody has mounted it on /sys/fs/fuse/connections
(containers, minimal hosts), root uses a mount of its own that has no place in the file tree and
so is seen by nobody. Stateless; safe from any thread.
"""

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Iterator

log = logging.getLogger(__name__)

_CONNECTIONS = "/sys/fs/fuse/connections"
# System calls since Linux 5.2 have one number on every architecture that Python runs on but alpha.
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_CLOEXEC = 1  # FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC
_FSCONFIG_CMD_CREATE = 6
_POLL_S = 0.01
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def _connections() -> Iterator[int | None]:
    """A descriptor of the folder with one folder for each connection; None: not accessible."""
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


def _is_alive(folder: int, device_minor: int) -> bool:
    try:
        os.stat(str(device_minor), dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def is_alive(device_minor: int) -> bool | None:
    """Whether the kernel still has the connection; None if that cannot be known."""
    with _connections() as folder:
        return None if folder is None else _is_alive(folder, device_minor)


def wait_gone(device_minor: int, timeout_s: float) -> bool | None:
    """Wait until the kernel has dropped the connection; None if that cannot be known."""
    deadline = time.monotonic() + timeout_s
    with _connections() as folder:
        if folder is None:
            return None
        while _is_alive(folder, device_minor):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
    return True


def abort(device_minor: int) -> bool:
    """Fail every request of the connection, now and for ever. True also if it is gone already;
    False where the control files are out of reach."""
    with _connections() as folder:
        if folder is None:
            return False
        path = f"{device_minor}/abort"
        try:
            control = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return True
        except OSError as error:
            log.debug("cannot abort connection %d: %s", device_minor, error)
            return False
        try:
            os.write(control, b"1")
        finally:
            os.close(control)
    return True
