"""New, empty ext4 file systems, one for each run that creates many files.

For minutes after a removal, ext4 passes the inodes of removed files for each new one, which took a
tree of 46,000 names half of its time. Needs root.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from testbed.needs import MissingError

_DEADLINE_S = 60.0
_MKFS = ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1"]


@contextlib.contextmanager
def new_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Make `folder`, with an ext4 of its own in a sparse file beside it, until the block ends.

    Raises: MissingError where there are no loop devices.
    """
    image = folder.with_name(folder.name + ".ext4")
    folder.mkdir()
    try:
        image.touch()
        os.truncate(image, size_bytes)
        # Direct I/O, so that pages are not cached twice.
        attach = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
        _run([*_MKFS, str(image)])
        device = _run(attach)
        try:
            # Without this option the kernel would write inode tables during the measurement.
            _run(["mount", "-o", "noinit_itable", device, str(folder)])
        finally:
            # The device is freed with the mount.
            _run(["losetup", "--detach", device])
        try:
            yield folder
        finally:
            _run(["umount", str(folder)])
    finally:
        image.unlink(missing_ok=True)
        folder.rmdir()


def _run(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        raise MissingError(f"there is no {command[0]}; apt install e2fsprogs mount")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if done.returncode != 0:
        raise MissingError(f"no disk for a node: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()
