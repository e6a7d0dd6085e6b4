"""Finding, ending and aborting mounts, without ever touching what is mounted.

A stat of a stuck FUSE mount hangs and cannot be killed, so everything here goes through
/proc/self/mountinfo and the kernel's control files. Alone knows umount2(2). Stateless; safe from
any thread.
"""

import ctypes
import errno
import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from bootseer.errors import BusyError, DeadlineError, InvalidInputError, from_oserror
from bootseer.fuse.kernel.mounting import control

log = logging.getLogger(__name__)

MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_HELPER_DEADLINE_S = 20.0
_ABORT_DEADLINE_S = 1.0
_POLL_S = 0.05
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_USER = re.compile(rb"\buser_id=(\d+)")
_libc = ctypes.CDLL(None, use_errno=True)


class Mount(Struct, frozen=True):
    """One FUSE mount that this process can see."""

    path: Path
    device_minor: int
    """The number of the connection: `/sys/fs/fuse/connections/<device_minor>`."""
    subtype: str
    name: str
    read_only: bool
    user: int = 0
    """The user who mounted it."""


class Line(NamedTuple):
    """One line of a mountinfo file."""

    number: bytes
    parent: bytes
    major: int
    minor: int
    path: bytes
    options: list[bytes]
    kind: bytes
    source: bytes
    super_options: bytes


def _unescape(field: bytes) -> bytes:
    return _ESCAPED.sub(lambda m: bytes([int(m[1], 8)]), field)


def parse_lines(text: bytes) -> Iterator[Line]:
    """The text of a mountinfo file, oldest first. Pure."""
    for line in text.splitlines():
        # id parent major:minor root mountpoint options optional... - type source super-options
        fields, _, rest = line.partition(b" - ")
        head, tail = fields.split(b" "), rest.split(b" ")
        if len(head) < 6 or len(tail) < 3:
            continue
        major, _, minor = head[2].partition(b":")
        numbers = (head[0], head[1], int(major), int(minor))
        yield Line(*numbers, _unescape(head[4]), head[5].split(b","), *tail[:3])


def parse_mountinfo(text: bytes) -> Iterator[Mount]:
    """The FUSE mounts in the text of a mountinfo file, oldest first. Pure."""
    for line in parse_lines(text):
        kind, _, subtype = line.kind.partition(b".")
        if kind == b"fuse":
            user = _USER.search(line.super_options)
            yield Mount(
                path=Path(os.fsdecode(line.path)),
                device_minor=line.minor,
                subtype=os.fsdecode(_unescape(subtype)),
                name=os.fsdecode(_unescape(line.source)),
                read_only=b"ro" in line.options,
                user=int(user[1]) if user else 0,
            )


class MountPoint(NamedTuple):
    """One mount of any file system."""

    path: bytes
    device: int
    """As `st_dev` of what is in it, but for file systems whose files show others."""
    kind: bytes


def parse_mount_points(text: bytes) -> list[MountPoint]:
    """Where anything is mounted, by the text of a mountinfo file, oldest first. Pure."""
    return [
        MountPoint(line.path, os.makedev(line.major, line.minor), line.kind)
        for line in parse_lines(text)
    ]


def mount_points() -> list[MountPoint]:
    """Where anything is mounted in this mount namespace, oldest first. Raises: OSError."""
    return parse_mount_points(Path("/proc/self/mountinfo").read_bytes())


def fuse_mounts() -> list[Mount]:
    """Every FUSE mount of this mount namespace, oldest first."""
    return list(parse_mountinfo(Path("/proc/self/mountinfo").read_bytes()))


def find_mounts(subtype_prefix: str) -> list[Mount]:
    """The FUSE mounts whose subtype starts with `subtype_prefix`, oldest first."""
    return [mount for mount in fuse_mounts() if mount.subtype.startswith(subtype_prefix)]


def absolute(path: Path) -> Path:
    """`path` as mountinfo spells it, without touching its last component: it may hang."""
    # Path.resolve() would stat it.
    parent, name = os.path.split(os.path.abspath(path))
    return Path(os.path.realpath(parent)) / name if name else Path(parent)


def find_mount(path: Path) -> Mount | None:
    """The topmost FUSE mount on exactly `path`, if it is seen there: in a namespace that has got
    another /tmp, what had been mounted in /tmp is listed still."""
    wanted = absolute(path)
    text = Path("/proc/self/mountinfo").read_bytes()
    found = [mount for mount in parse_mountinfo(text) if mount.path == wanted]
    return found[-1] if found and not is_hidden(text, os.fsencode(wanted)) else None


def is_hidden(text: bytes, path: bytes) -> bool:
    """Whether what is mounted on `path` is not seen there, since something was mounted later on a
    folder above it; by the text of a mountinfo file. Pure."""
    lines = {line.number: line for line in parse_lines(text)}
    beside = list(lines.values())
    below = next((line for line in reversed(beside) if line.path == path), None)
    while below is not None:
        above = {one.path for one in beside if one.parent == below.parent} - {below.path}
        if any(below.path.startswith(path.rstrip(b"/") + b"/") for path in above):
            return True
        below = lines.pop(below.parent, None)
    return False


def abort_connection(device_minor: int, path: Path | None = None) -> bool:
    """Fail every request of a connection now and for ever; readers get ENOTCONN or ECONNABORTED.

    Where the control files are out of reach, falls back to umount2(MNT_FORCE) of `path`, where
    it must still be mounted. Returns whether the connection is known to be aborted.
    """
    if control.abort(device_minor):
        return True
    if path is None:
        return False
    # MNT_FORCE aborts the connection even when the mount then stays because it is busy.
    failed = _umount2(path, MNT_FORCE)
    return failed is None or failed.errno == errno.EBUSY


def is_of_the_dead(error: BaseException | None) -> bool:
    """Whether an operation failed, or the one that caused it, since a mount's server is gone."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            return True
        error = error.__cause__
    return False


def abort(path: Path) -> bool:
    """Abort the FUSE connection mounted on `path`; False if there is none or it is not allowed."""
    mount = find_mount(path)
    return mount is not None and abort_connection(mount.device_minor, mount.path)


def _umount2(path: Path, flags: int) -> OSError | None:
    if _libc.umount2(os.fsencode(path), flags | UMOUNT_NOFOLLOW) == 0:
        return None
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), str(path))


def find_helper() -> str | None:
    """The set-user-id helper that mounts and unmounts for ordinary users."""
    import shutil  # here: it loads every kind of compression

    return shutil.which("fusermount3") or shutil.which("fusermount")


def detach(path: Path, *, lazy: bool) -> None:
    """Take the mount off `path`; `lazy` also while files are open (they live on until closed).

    Raises:
        BusyError: files are open and `lazy` is False.
        InvalidInputError: nothing is mounted there.
        BootseerError: not allowed, or the helper failed.
    """
    path = absolute(path)
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
    """Run fusermount3; what it says where it fails, else None. Raises: DeadlineError."""
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
    if find_mount(path) is None:
        raise InvalidInputError(f"cannot unmount {path}: nothing is mounted there")
    raise BusyError(f"cannot unmount {path}: {reason}; close the files under it, or detach it")


def unmount(path: Path, *, timeout_s: float = 10.0) -> None:
    """Unmount the FUSE file system on `path`, whatever state it is in.

    Gives open files `timeout_s` to be closed, then aborts the connection: when this returns, the
    path is free and no process waits for a reply. A file counts as open while the kernel waits for
    what it has read ahead in it, also when all who had it open have ended.

    Raises:
        InvalidInputError: no FUSE file system is mounted there.
        BootseerError: not allowed.
    """
    mount = find_mount(path)
    if mount is None:
        raise InvalidInputError(f"cannot unmount {path}: no FUSE file system is mounted there")
    # Taken before it is detached: then its number may be another mount's at any moment.
    with control.connection(mount.device_minor) as connection:
        if connection is None:
            _unmount_blindly(mount, timeout_s)
            return
        detach(mount.path, lazy=True)
        if connection.wait_gone(timeout_s):
            return
        log.warning(
            "%s still has open files, or reads under way, after %.1f s: aborting them",
            mount.path,
            timeout_s,
        )
        connection.abort()
        connection.wait_gone(_ABORT_DEADLINE_S)


def _unmount_blindly(mount: Mount, timeout_s: float) -> None:
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
    if find_mount(mount.path) == mount:
        detach(mount.path, lazy=True)
