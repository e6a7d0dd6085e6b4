"""Makes the next read of a file a cold one."""

import os
from collections.abc import Sequence
from pathlib import Path


def evict_file(path: Path) -> str:
    """Drop one file's clean pages from the page cache; says how, for the record."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return "posix_fadvise(DONTNEED) on the file"


def evict_everything(paths: Sequence[Path]) -> str:
    """Drop the whole page cache, dentries and inodes when that is allowed, else the clean pages
    of `paths`; says which, for the record."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for path in paths:
            evict_file(path)
        return "posix_fadvise(DONTNEED) on the files only: not allowed to write drop_caches"
    return "drop_caches"
