"""Simple mirror of one directory by mfusepy (libfuse3), for the case `fuse-read`.

    python -m bench.peers.mfusepy_passthrough SOURCE MOUNTPOINT [--direct-io]

Serves in the foreground until unmounted.
"""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Else mfusepy takes libfuse 2 where a machine has both.
os.environ["FUSE_LIBRARY_NAME"] = "fuse3"

import mfusepy

_FIELDS = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_mtime", "st_atime", "st_ctime")


class Mirror(mfusepy.Operations):  # type: ignore[misc]
    """File system that maps paths to calls of `os`, as users of mfusepy write it."""

    # mfusepy requires this attribute. False: times are passed as seconds.
    use_ns = False

    def __init__(self, root: Path, direct_io: bool) -> None:
        self._root = str(root)
        self._direct_io = direct_io

    def init_with_config(self, conn_info: Any, config: Any) -> None:
        config.direct_io = int(self._direct_io)
        config.kernel_cache = int(not self._direct_io)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._root + path)
        return {field: getattr(status, field) for field in _FIELDS}

    def readdir(self, path: str, fh: int) -> Iterable[str]:
        return [".", "..", *os.listdir(self._root + path)]

    def open(self, path: str, flags: int) -> int:
        return os.open(self._root + path, flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


def main() -> None:
    """Serve until the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--direct-io", action="store_true")
    arguments = parser.parse_args()
    mirror = Mirror(arguments.source, arguments.direct_io)
    # With threads, as by default.
    mfusepy.FUSE(mirror, str(arguments.mountpoint), foreground=True, nothreads=False, ro=True)


if __name__ == "__main__":
    main()
