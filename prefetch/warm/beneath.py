"""Opening of regular files below a directory, by untrusted paths, without leaving the directory.

No component of a path may be a symbolic link, and only regular files are opened, so neither a
planted link nor a forged record leads elsewhere. A `FilesBeneath` belongs to one thread.
"""

import os
import stat

from bootseer.base.closing import Closing
from bootseer.store.local.beneath import open_directory

# O_NONBLOCK: opening a pipe or device in the place of a file must not wait.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class FilesBeneath(Closing):
    """Regular files below `root`. Keeps the last folder open: successive paths often share it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder = b""
        self._fd = -1

    def stat(self, path: bytes) -> os.stat_result:
        """Return the status of a file, without following a link. Raises: OSError."""
        return os.stat(self._name(path), dir_fd=self._fd, follow_symlinks=False)

    def open(self, path: bytes) -> int:
        """Open a regular file for reading, and return its descriptor. Raises: OSError."""
        name = self._name(path)
        # Checked before the file is opened, because opening a device may have effects.
        if not stat.S_ISREG(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode):
            raise FileNotFoundError(f"{os.fsdecode(path)} is no regular file")
        fd = os.open(name, _FLAGS, dir_fd=self._fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(f"{os.fsdecode(path)} is no regular file")
        return fd

    def _name(self, path: bytes) -> bytes:
        folder, _, name = path.rpartition(b"/")
        if self._fd < 0 or folder != self._folder:
            self.close()
            parts = [os.fsdecode(part) for part in folder.split(b"/")] if folder else []
            self._fd = open_directory(self._root, parts)
            self._folder = folder
        return name

    def close(self) -> None:
        """Close the folder. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
