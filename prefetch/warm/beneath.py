"""Regular files below a directory, by paths that a record names: opened without leaving it.

No component may be a symbolic link, and nothing but a regular file is opened, so that neither a
planted link nor a planted record leads elsewhere. A `Beneath` belongs to one thread.
"""

import os
import stat

from bootseer.base.closing import Closing
from bootseer.store.local.beneath import open_directory

# A pipe or device that takes a file's place must not hold us up.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Beneath(Closing):
    """Opens files below `root`. Keeps the folder that was used last open: paths that follow each
    other often share it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder = b""
        self._fd = -1

    def stat(self, path: bytes) -> os.stat_result:
        """Returns the status of the file itself, not of a link's target. Raises: OSError."""
        return os.stat(self._name(path), dir_fd=self._fd, follow_symlinks=False)

    def open(self, path: bytes) -> int:
        """A descriptor to read a regular file. Raises: OSError."""
        name = self._name(path)
        # Before it is opened: opening a device may do something.
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
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
