"""A directory behind latency: the stand-in for a network file system whose every request is a
round trip. Counts what is asked of it.

`python -m tests.support.slow_fs SOURCE MOUNTPOINT LATENCY_S READAHEAD_BYTES` serves it from a
process of its own, which writes its counters as JSON to stdout when it is unmounted.
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.fuse.kernel import MountOptions, serve
from bootseer.fuse.kernel.operations import Buffer, Caller, Entry, Opened
from tests.support.passthrough_fs import PassthroughFileSystem

_TTL_S = 3600.0
_THREADS = 16


@dataclass(frozen=True, slots=True)
class Counters:
    """What was asked so far."""

    read_count: int
    read_bytes: int
    small_read_count: int
    """Reads of one page."""
    open_count: int
    lookup_count: int


class SlowFileSystem(PassthroughFileSystem):
    """Mirrors `root`; each read, open and lookup takes `latency_s`. Thread-safe."""

    def __init__(self, root: Path, *, latency_s: float = 0.0) -> None:
        super().__init__(root, ttl_s=_TTL_S)
        self._latency_s = latency_s
        self._count_lock = threading.Lock()
        self.read_lengths: list[int] = []
        self.open_count = 0
        self.lookup_count = 0

    def counters(self) -> Counters:
        """What was asked since the last `reset`."""
        with self._count_lock:
            lengths = list(self.read_lengths)
            return Counters(
                len(lengths),
                sum(lengths),
                sum(length <= 4096 for length in lengths),
                self.open_count,
                self.lookup_count,
            )

    def reset(self) -> None:
        """Count from zero again."""
        with self._count_lock:
            self.read_lengths.clear()
            self.open_count = self.lookup_count = 0

    def lookup(self, caller: Caller, parent: int, name: bytes) -> Entry:
        with self._count_lock:
            self.lookup_count += 1
        time.sleep(self._latency_s)
        return super().lookup(caller, parent, name)

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        with self._count_lock:
            self.open_count += 1
        time.sleep(self._latency_s)
        return super().open(caller, node, flags)

    def read(
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> Buffer | Sequence[Buffer]:
        data = super().read(caller, node, handle, offset, length)
        assert isinstance(data, bytes)
        with self._count_lock:
            self.read_lengths.append(len(data))
        time.sleep(self._latency_s)
        return data


def main(source: str, mountpoint: str, latency_s: str, readahead_bytes: str) -> None:
    """Serve until unmounted, then say what was asked."""
    operations = SlowFileSystem(Path(source), latency_s=float(latency_s))
    options = MountOptions(
        name="slow",
        subtype="bootseer-bench",
        threads=_THREADS,
        max_readahead_bytes=int(readahead_bytes),
    )
    serve(operations, Path(mountpoint), options)
    counters = operations.counters()
    json.dump({name: getattr(counters, name) for name in Counters.__slots__}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
