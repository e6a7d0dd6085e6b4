"""Open directories of an extraction, so that each name is made relative to one. For one thread."""

import os
from array import array

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_MAX = 64


class Directories:
    """Descriptors of directories by inode number; the latest stay open."""

    def __init__(
        self, names: list[bytes], parents: "array[int]", name_of: "array[int]", root_fd: int
    ) -> None:
        """`name_of`: the index of each directory's name, by its inode number."""
        self._names = names
        self._parents = parents
        self._name_of = name_of
        self._root_fd = root_fd
        self._open: dict[int, int] = {}

    def get(self, number: int) -> int:
        """Open until others have been asked for. Raises: OSError."""
        if not number:
            return self._root_fd
        fds = self._open
        found = fds.pop(number, None)
        if found is not None:
            # A dict keeps the order in which its keys came: the first is the longest unused.
            fds[number] = found
            return found
        missing = []
        while number and number not in fds:
            missing.append(number)
            number = self._parents[self._name_of[number]]
        fd = self._root_fd
        if number:
            fd = fds[number] = fds.pop(number)
        for below in reversed(missing):
            fd = fds[below] = os.open(self._names[self._name_of[below]], _DIRECTORY, dir_fd=fd)
            if len(fds) > _OPEN_MAX:
                os.close(fds.pop(next(iter(fds))))
        return fd

    def close(self) -> None:
        """All of them."""
        while self._open:
            os.close(self._open.popitem()[1])
