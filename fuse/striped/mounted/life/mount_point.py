"""The folder that a checkpoint tree is mounted on, before it is mounted and between two mounts.

Alone takes off mounts of ours whose server was killed, and alone sets the immutable attribute of a
mount point. Stateless; safe from any thread.
"""

import array
import errno
import fcntl
import logging
import os
from pathlib import Path

from bootseer.errors import InvalidInputError, UnsupportedError, from_oserror
from bootseer.fuse.kernel.unmount import detach, is_disconnected
from bootseer.fuse.striped.mounted.life.spec import SUBTYPE
from bootseer.linux.mount_table import absolute, find_mount
from bootseer.linux.namespaces import mount_namespace
from bootseer.served.status import find_known

_log = logging.getLogger(__name__)

# FS_IOC_GETFLAGS and FS_IOC_SETFLAGS of <linux/fs.h>: _IOR('f', 1, long), _IOW('f', 2, long), with
# the size of a long in bits 16 to 29. What is passed is an int, whatever the macros say.
_LONG_BYTES = array.array("l").itemsize
_GET_FLAGS = 2 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 1
_SET_FLAGS = 1 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 2
_IMMUTABLE = 0x10  # FS_IMMUTABLE_FL, what `chattr +i` sets
_NO_ATTRIBUTES = frozenset({errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


def take_off_dead_mounts(run_dir: Path, directory: Path) -> None:
    """Take off the checkpoint mounts on `directory` whose server is gone, as after SIGKILL.

    A mount that answers stays. Raises: BootseerError.
    """
    # One of ours that is stuck would keep us waiting. Those of other containers and namespaces are
    # asked: their mount may be on another folder of this name.
    known = find_known(run_dir, directory)
    is_ours = known is not None and known.state.mount_namespace in ("", mount_namespace())
    if known is not None and known.is_running and is_ours:
        return
    while (mounted := find_mount(directory)) is not None and mounted.subtype == SUBTYPE:
        try:
            directory.stat()
            return
        except OSError as error:
            if not is_disconnected(error):
                return
        _log.info("taking a mount off %s whose server is gone", directory)
        detach(directory, lazy=True)


def make_mount_point(run_dir: Path, directory: Path) -> None:
    """Make `directory` and its parents where they are missing. Raises: BootseerError."""
    take_off_dead_mounts(run_dir, absolute(directory))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_oserror(error, f"make the mount point {directory}") from error


def make_immutable(directory: Path) -> None:
    """Let no user, root included, make files in `directory` while nothing is mounted there.

    For a folder on which nothing is mounted; `chattr -i` undoes it. Raises: InvalidInputError where
    something is in it; UnsupportedError where its file system has no such attribute;
    PermissionDeniedError.
    """
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = array.array("i", [0])
            fcntl.ioctl(folder, _GET_FLAGS, flags)
            if flags[0] & _IMMUTABLE:
                return
            if os.listdir(folder):
                raise InvalidInputError(
                    f"cannot make {directory} immutable: there are files in it that were written "
                    "while nothing was mounted; move them away"
                )
            flags[0] |= _IMMUTABLE
            fcntl.ioctl(folder, _SET_FLAGS, flags)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            raise UnsupportedError(
                f"cannot make {directory} immutable: its file system does not know chattr +i"
            ) from error
        raise from_oserror(error, f"make {directory} immutable") from error
