"""Looks names up below a directory, so that the kernel knows them: a small program of its own.

`python name_walk.py FD` with paths on standard input, separated by NUL, as
`preload_plan.PreloadPlan.names` has them; FD is the directory. A process that waits for a file
system's answer cannot be killed, so a FUSE server never asks its own file system anything. A name
that cannot be looked up is left out. Imports nothing of Bootseer.
"""

import os
import sys
from collections.abc import Iterable


def walk(root: int, paths: Iterable[bytes]) -> None:
    """Have the kernel look up all `paths` below the directory that is open as `root`."""
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
    # Where processors are short, what the start asks for itself comes first.
    os.nice(10)
    walk(int(sys.argv[1]), sys.stdin.buffer.read().split(b"\0"))
