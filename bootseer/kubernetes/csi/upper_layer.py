"""A private writable layer over a shared tree, no larger than its volume: an overlay whose upper
layer is a file system of its own.

That lies in a file of the node's disk, or in memory where no loop device can be had. The file has
no name any more when the volume is there: whatever happens to driver, pod and node, its room is
free again once nothing is mounted. Stateless; any thread.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import NoSpaceError, UnavailableError, from_oserror
from bootseer.kubernetes.spawner import MOUNT_SOURCE
from bootseer.linux import namespaces
from bootseer.linux.overlay import mount_layers

_log = logging.getLogger(__name__)

# <linux/loop.h>: a free device's number, a device's file and settings in one step (Linux 5.8).
_LOOP_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LOOP_MAJOR = 7
_AUTOCLEAR = 4
# struct loop_config: the file, the size of a block, loop_info64 with its flags, and eight words.
_CONFIG = struct.Struct("=II52xI176x64x")
_MAKE_S = 120.0
_TRIES = 10
_FLAGS = namespaces.MS_NODEV | namespaces.MS_NOSUID


def mount_writable(tree: Path, target: Path, folder: Path, size_bytes: int) -> None:
    """Show `tree` on `target`, writable. What is written takes at most `size_bytes`, in a file
    below `folder`. Raises: BootseerError."""
    try:
        disk = os.statvfs(folder)
        # Otherwise it would go to memory, as where there is no loop device.
        if size_bytes > disk.f_blocks * disk.f_frsize:
            raise NoSpaceError(
                f"the volume's size is {size_bytes} bytes, and the node's whole disk has less"
            )
        with tempfile.TemporaryDirectory(prefix="upper-", dir=folder) as name:
            scratch = Path(name)
            with _mounted_room(scratch, size_bytes) as room:
                for part in ("upper", "work"):
                    (room / part).mkdir(mode=0o700)
                status = os.lstat(tree)
                os.chown(room / "upper", status.st_uid, status.st_gid)
                os.chmod(room / "upper", stat.S_IMODE(status.st_mode))
                mount_layers(
                    [tree], room, target, source=MOUNT_SOURCE, flags=_FLAGS, has_renames=True
                )
    except OSError as error:
        raise from_oserror(error, f"make {target} writable") from error


@contextlib.contextmanager
def _mounted_room(scratch: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of that size, which stays for as long as something uses it."""
    room = scratch / "room"
    room.mkdir(mode=0o700)
    try:
        _mount_on_disk(scratch / "disk", room, size_bytes)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("what a pod writes to its environment goes to memory: %s", error)
        namespaces.mount(MOUNT_SOURCE, room, "tmpfs", _FLAGS, f"mode=700,size={size_bytes}")
    try:
        yield room
    finally:
        # The overlay has a mount of its own by now.
        namespaces.unmount(room)


def _mount_on_disk(disk: Path, room: Path, size_bytes: int) -> None:
    """Raises: OSError, subprocess.SubprocessError."""
    fd = os.open(disk, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(fd, size_bytes)
        # Nothing of it has to survive anything, so it needs no journal.
        subprocess.run(
            ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(disk)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_MAKE_S,
            check=True,
        )
        loop, device = _attach(fd)
        try:
            namespaces.mount(device, room, "ext4", _FLAGS)
        finally:
            # Clears itself when the file system is gone.
            os.close(loop)
    finally:
        os.close(fd)
        disk.unlink()


def _attach(fd: int) -> tuple[int, str]:
    """A loop device of an open file: its descriptor, and its path. Raises: OSError."""
    with Path("/dev/loop-control").open("rb", buffering=0) as control:
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _LOOP_GET_FREE)
            device = f"/dev/loop{number}"
            if not os.path.exists(device):
                # A container has those of the node's devices that were there when it began.
                os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(_LOOP_MAJOR, number))
            loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, _CONFIG.pack(fd, 0, _AUTOCLEAR))
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:
                    raise
                continue  # Another process was quicker.
            return loop, device
    raise UnavailableError("every free loop device was taken by another process")
