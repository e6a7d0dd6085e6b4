"""Reads a file from start to end and prints the time and CPU time as JSON.

    python -m bench.reader FILE BLOCK_BYTES

A process of its own, so that its CPU time is the reader's alone, and so that a reader that hangs on
a mount can be left behind. The start of the interpreter is not measured, nor is dropping the file's
pages from the page cache, which comes first.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

from bench.machine.page_cache import evict_file


def main(path: str, block_bytes: int) -> None:
    """Print {"wall_s", "cpu_s", "read_bytes", "size_bytes"}."""
    evict_file(Path(path))
    size_bytes = Path(path).stat().st_size
    # One buffer for all blocks, touched once: the file system is measured, not the allocator.
    buffer = memoryview(bytearray(b"\1" * block_bytes))
    before = resource.getrusage(resource.RUSAGE_SELF)
    started_ns = time.monotonic_ns()
    read_bytes = 0
    descriptor = os.open(path, os.O_RDONLY)
    while count := os.readv(descriptor, [buffer]):
        read_bytes += count
    os.close(descriptor)
    wall_s = (time.monotonic_ns() - started_ns) / 1e9
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    figures = {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "read_bytes": read_bytes,
        "size_bytes": size_bytes,
    }
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
