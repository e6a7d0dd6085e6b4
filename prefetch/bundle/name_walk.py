"""Program that looks up names below a directory, so that the kernel caches them.

Usage: `python name_walk.py FD`, with FD an open directory, and paths separated by NUL on standard
input, as `PreloadPlan.names` has them: a path that ends with a slash is a directory to list. Names
that cannot be looked up are skipped.

A program of its own, since a process that waits for a FUSE file system cannot be killed, so that a
FUSE server never accesses its own. Imports nothing of Bootseer, so that it starts quickly.
"""

import os
import sys
from collections.abc import Iterable


def walk(root: int, paths: Iterable[bytes]) -> None:
    """Look up all `paths` below the directory that is open as `root`."""
    for path in paths:
        try:
            if not path.endswith(b"/"):
                os.stat(path, dir_fd=root, follow_symlinks=False)
                continue
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            directory = os.open(path[:-1] or b".", flags, dir_fd=root)
            try:
                os.listdir(directory)
            finally:
                os.close(directory)
        except OSError:
            continue


if __name__ == "__main__":
    # If the CPUs are busy, the job's own requests come first.
    os.nice(10)
    walk(int(sys.argv[1]), sys.stdin.buffer.read().split(b"\0"))
