"""Unmounting FUSE file systems, and aborting their connections.

No function touches files in a mount: a stat of a stuck mount hangs and cannot be killed. Stateless;
safe from any thread.
"""

import ctypes
import errno
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bootseer.errors import BusyError, DeadlineError, InvalidInputError, from_oserror
from bootseer.fuse.kernel import control
from bootseer.linux import mount_table, namespaces

log = logging.getLogger(__name__)

MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_HELPER_DEADLINE_S = 20.0
_COPIES_S = 0.2
"""Time after which an unmount looks for copies of the mount in other mount namespaces."""
_ABORT_DEADLINE_S = 1.0
_POLL_S = 0.05
_libc = ctypes.CDLL(None, use_errno=True)


def abort_connection(device_minor: int, path: Path | None = None) -> bool:
    """Fail all requests of a connection, now and later, with ENOTCONN or ECONNABORTED.

    If the control files are not accessible, use umount2(MNT_FORCE) of `path`, where the file system
    must still be mounted. Return whether the connection is known to be aborted.
    """
    if control.abort(device_minor):
        return True
    if path is None:
        return False
    # MNT_FORCE aborts the connection even when the mount then stays because it is busy.
    error = _umount2(path, MNT_FORCE)
    return error is None or error.errno == errno.EBUSY


def is_disconnected(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, means that a mount's server is gone."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            return True
        error = error.__cause__
    return False


def _umount2(path: Path, flags: int) -> OSError | None:
    if _libc.umount2(os.fsencode(path), flags | UMOUNT_NOFOLLOW) == 0:
        return None
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), str(path))


def find_helper() -> str | None:
    """Return the set-user-id helper that mounts and unmounts for ordinary users."""
    import shutil  # Imported late: it loads every kind of compression.

    return shutil.which("fusermount3") or shutil.which("fusermount")


def detach(path: Path, *, lazy: bool) -> None:
    """Unmount `path`. With `lazy`, open files still work until they are closed.

    Raises:
        BusyError: files are open and `lazy` is False.
        InvalidInputError: nothing is mounted there.
        BootseerError: not allowed, or the helper failed.
    """
    path = mount_table.absolute(path)
    error = _umount2(path, MNT_DETACH if lazy else 0)
    if error is None:
        return
    if error.errno == errno.EPERM and (helper := find_helper()):
        _detach_with_helper(helper, path, lazy)
        return
    if error.errno == errno.EINVAL:
        raise InvalidInputError(f"cannot unmount {path}: nothing is mounted there")
    raise from_oserror(error, f"unmount {path}") from error


def run_helper(command: Sequence[str], **options: Any) -> str | None:
    """Run fusermount3. Return its error message, or None on success. Raises: DeadlineError."""
    import subprocess  # here: root needs no helper

    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_HELPER_DEADLINE_S,
            check=False,
            **options,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"{' '.join(command)} did not end in {_HELPER_DEADLINE_S:.0f} s"
        ) from error
    if done.returncode == 0:
        return None
    return done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"


def _detach_with_helper(helper: str, path: Path, lazy: bool) -> None:
    reason = run_helper([helper, "-u", *(["-z"] if lazy else []), "--", str(path)])
    if reason is None:
        return
    if mount_table.find_mount(path) is None:
        raise InvalidInputError(f"cannot unmount {path}: nothing is mounted there")
    raise BusyError(f"cannot unmount {path}: {reason}; close the files under it, or detach it")


def unmount(path: Path, *, timeout_s: float = 10.0) -> None:
    """Unmount the FUSE file system on `path`, even if its server is dead or hangs.

    Wait at most `timeout_s` until open files are closed, then abort the connection: on return the
    path is free and no process waits for a reply. A file also counts as open while the kernel waits
    for readahead in it, even if all processes that opened it have ended.

    Raises:
        InvalidInputError: no FUSE file system is mounted there.
        BootseerError: not allowed.
    """
    mount = mount_table.find_mount(path)
    if mount is None:
        raise InvalidInputError(f"cannot unmount {path}: no FUSE file system is mounted there")
    # Opened before the mount is detached, because the connection's number may be reused then.
    with control.connection(mount.device_minor) as connection:
        if connection is None:
            _unmount_blindly(mount, timeout_s)
            return
        detach(mount.path, lazy=True)
        if connection.wait_gone(min(_COPIES_S, timeout_s)):
            return
        if mount.read_only:
            # Copies of a writable mount stay: programs in other namespaces get errors, and do not
            # write into the folder below the mount.
            namespaces.detach_copies(mount.device_minor, timeout_s)
        if connection.wait_gone(timeout_s):
            return
        log.warning(
            "%s still has open files, or reads under way, after %.1f s: aborting them",
            mount.path,
            timeout_s,
        )
        connection.abort()
        connection.wait_gone(_ABORT_DEADLINE_S)


def _unmount_blindly(mount: mount_table.FuseMount, timeout_s: float) -> None:
    """Unmount without the control files: whether files are open shows only while mounted."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            detach(mount.path, lazy=False)
            return
        except BusyError:
            if time.monotonic() >= deadline:
                break
        time.sleep(_POLL_S)
    log.warning("%s still has open files after %.1f s: detaching it", mount.path, timeout_s)
    abort_connection(mount.device_minor, mount.path)
    if mount_table.find_mount(mount.path) == mount:
        detach(mount.path, lazy=True)
