"""Dropping files from the page cache."""

import os
from collections.abc import Sequence
from pathlib import Path


def evict_file(path: Path) -> str:
    """Drop one file's clean pages from the page cache; return the method, for the notes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return "posix_fadvise(DONTNEED) on the file"


def evict_everything(paths: Sequence[Path]) -> str:
    """Drop the whole page cache, dentries and inodes, or else the clean pages of `paths`.

    Return the method, for the notes.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for path in paths:
            evict_file(path)
        return "posix_fadvise(DONTNEED) on the files only: not allowed to write drop_caches"
    return "drop_caches"
