"""A directory behind latency, in place of a network file system, with counts of its requests.

`python -m testbed.mounts.slow_fs SOURCE MOUNTPOINT LATENCY_S READAHEAD_BYTES COUNTERS` serves it
from a process of its own that keeps its counts in the file COUNTERS (`read_counters`).
"""

import mmap
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.fuse.kernel.operations import Buffer, Caller, NodeEntry, Opened
from bootseer.fuse.kernel.options import MountOptions
from testbed.mounts.passthrough_fs import PassthroughFileSystem
from testbed.mounts.serving import serve
from testbed.waiting import pause

_TTL_S = 3600.0
_THREADS = 16
_PAGE_BYTES = 4096
_COUNTERS = struct.Struct("<5Q")


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Numbers of requests and read bytes so far."""

    read_count: int
    read_bytes: int
    small_read_count: int
    """Reads of one page."""
    open_count: int
    lookup_count: int


def read_counters(path: Path) -> RequestCounts:
    """Return the counts of a server in another process from its counters file."""
    return RequestCounts(*_COUNTERS.unpack(path.read_bytes()[: _COUNTERS.size]))


class SlowFileSystem(PassthroughFileSystem):
    """Mirrors `root`; each read, open and lookup takes `latency_s`. Thread-safe."""

    def __init__(self, root: Path, *, latency_s: float = 0.0, shared: Path | None = None) -> None:
        super().__init__(root, ttl_s=_TTL_S)
        self._latency_s = latency_s
        self._count_lock = threading.Lock()
        self._counts = [0] * len(RequestCounts.__slots__)
        self._shared: mmap.mmap | None = None
        if shared is not None:
            shared.write_bytes(bytes(_COUNTERS.size))
            with shared.open("r+b") as file:
                self._shared = mmap.mmap(file.fileno(), 0)

    def counters(self) -> RequestCounts:
        """Return the counts since the last `reset`."""
        with self._count_lock:
            return RequestCounts(*self._counts)

    def _asked(self, *changes: int) -> None:
        with self._count_lock:
            self._counts = [a + b for a, b in zip(self._counts, changes, strict=True)]
            if self._shared is not None:
                _COUNTERS.pack_into(self._shared, 0, *self._counts)
        pause(self._latency_s)

    def reset(self) -> None:
        """Set all counts to zero."""
        with self._count_lock:
            self._counts = [0] * len(self._counts)

    def lookup(self, caller: Caller, parent: int, name: bytes) -> NodeEntry:
        self._asked(0, 0, 0, 0, 1)
        return super().lookup(caller, parent, name)

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        self._asked(0, 0, 0, 1, 0)
        return super().open(caller, node, flags)

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        data = super().read(caller, node, handle, offset, length)
        assert isinstance(data, bytes)
        self._asked(1, len(data), len(data) <= _PAGE_BYTES, 0, 0)
        return data


def main(source: str, mountpoint: str, latency_s: str, readahead_bytes: str, counters: str) -> None:
    """Serve until unmounted."""
    operations = SlowFileSystem(Path(source), latency_s=float(latency_s), shared=Path(counters))
    options = MountOptions(
        name="slow",
        subtype="bootseer-bench",
        threads=_THREADS,
        max_readahead_bytes=int(readahead_bytes),
    )
    serve(operations, Path(mountpoint), options)


if __name__ == "__main__":
    main(*sys.argv[1:])
