"""Mounting: from an empty directory to the /dev/fuse descriptor that serves it.

With CAP_SYS_ADMIN by mount(2), otherwise through the set-user-id helper fusermount3, which sends
the descriptor over a socket. Stateless; safe from any thread.
"""

import errno
import logging
import os
import socket
import stat
from pathlib import Path

from bootseer.errors import (
    BusyError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnsupportedError,
    from_oserror,
)
from bootseer.fuse.kernel.options import REQUEST_BYTES_MAX, MountOptions
from bootseer.fuse.kernel.unmount import find_helper, run_helper
from bootseer.linux import mount_table, namespaces
from bootseer.linux.processes import has_capability

log = logging.getLogger(__name__)

DEVICE = Path("/dev/fuse")
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_CAP_SYS_ADMIN = 21


def can_mount_directly() -> bool:
    """Return whether this process has CAP_SYS_ADMIN (in its user namespace)."""
    return has_capability(_CAP_SYS_ADMIN)


def mount(mountpoint: Path, options: MountOptions) -> int:
    """Mount on `mountpoint`. Return the descriptor (close-on-exec) of the kernel's requests.

    Until a server answers INIT, every access to the mountpoint waits.

    Raises:
        NotFoundError, InvalidInputError: the mountpoint is missing or not a directory.
        BusyError: a FUSE file system is mounted there already.
        UnsupportedError: there is no /dev/fuse, or neither privileges nor fusermount3.
        PermissionDeniedError: mounting is not allowed.
    """
    path = mount_table.absolute(mountpoint)
    existing = mount_table.find_mount(path)
    if existing is not None:
        raise BusyError(
            f"cannot mount on {path}: {existing.name} (fuse.{existing.subtype}) is mounted there; "
            "unmount it first"
        )
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise NotFoundError(f"cannot mount on {path}: it does not exist; create it") from error
    except OSError as error:
        raise from_oserror(error, f"mount on {path}") from error
    if not stat.S_ISDIR(mode):
        raise InvalidInputError(f"cannot mount on {path}: it is not a directory")
    if not DEVICE.exists():
        raise UnsupportedError(
            f"cannot mount on {path}: there is no {DEVICE}; load the module (modprobe fuse), or "
            f"give the container the device (--device {DEVICE})"
        )
    # The helper opens the device with the rights of its caller.
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise PermissionDeniedError(
            f"cannot mount on {path}: this user may not open {DEVICE}; let root run "
            f"`chmod 666 {DEVICE}`, as most distributions do"
        )
    if can_mount_directly():
        return _mount_directly(path.resolve(), mode, options)
    return _mount_with_helper(path.resolve(), options)


def _mount_directly(path: Path, mode: int, options: MountOptions) -> int:
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise from_oserror(error, f"open {DEVICE} to mount on {path}") from error
    data = [
        f"fd={device}",
        f"rootmode={mode & 0o170000:o}",
        f"user_id={os.geteuid()}",
        f"group_id={os.getegid()}",
        f"max_read={REQUEST_BYTES_MAX}",
    ]
    data += ["default_permissions"] if options.default_permissions else []
    data += ["allow_other"] if options.allow_other else []
    flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if options.read_only else 0)
    try:
        namespaces.mount(options.name, path, f"fuse.{options.subtype}", flags, ",".join(data))
        return device
    except OSError as error:
        os.close(device)
        if error.errno == errno.EPERM and find_helper():
            # For example in a user namespace that does not own the mount namespace.
            log.debug("mount(2) on %s is not permitted: trying the helper", path)
            return _mount_with_helper(path, options)
        if error.errno == errno.ENODEV:
            raise UnsupportedError(
                f"cannot mount on {path}: this kernel has no FUSE (modprobe fuse)"
            ) from error
        raise from_oserror(error, f"mount on {path}") from error


def _helper_options(options: MountOptions) -> str:
    chosen = [f"fsname={options.name}", f"subtype={options.subtype}"]
    chosen.append(f"max_read={REQUEST_BYTES_MAX}")
    chosen.append("ro" if options.read_only else "rw")
    chosen += ["default_permissions"] if options.default_permissions else []
    chosen += ["allow_other"] if options.allow_other else []
    return ",".join(chosen)


def _mount_with_helper(path: Path, options: MountOptions) -> int:
    helper = find_helper()
    if helper is None:
        raise UnsupportedError(
            f"cannot mount on {path}: without root it takes fusermount3; install fuse3"
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        command = [helper, "-o", _helper_options(options), "--", str(path)]
        environment = {**os.environ, "_FUSE_COMMFD": str(theirs.fileno())}
        reason = run_helper(command, env=environment, pass_fds=[theirs.fileno()])
        if reason is not None:
            raise PermissionDeniedError(f"cannot mount on {path}: {reason}")
        # The helper has ended, so its message is in the socket now or never.
        ours.setblocking(False)
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        except BlockingIOError:
            descriptors = []
    if not descriptors:
        raise UnsupportedError(f"cannot mount on {path}: {helper} handed over no descriptor")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def set_readahead(device_minor: int, readahead_bytes: int) -> bool:
    """Set the kernel's readahead for a connection. Return False if only root may."""
    control = Path(f"/sys/class/bdi/0:{device_minor}/read_ahead_kb")
    try:
        control.write_text(f"{readahead_bytes // 1024}\n")
    except OSError as error:
        log.debug("cannot write %s: %s", control, error)
        return False
    return True
