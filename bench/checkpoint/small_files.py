"""Writes, overwrites and reads many small files of a folder, and prints the times as JSON.

    python -m bench.checkpoint.small_files FOLDER COUNT SIZE_BYTES

Each file is opened, written or read whole, and closed; the bytes read are compared. Nothing is
synced.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path


def main(folder: Path, count: int, size_bytes: int) -> None:
    """Print {"new_s", "overwritten_s", "read_s", "cpu_s"}."""
    paths = [str(folder / f"file-{number:05d}") for number in range(count)]
    tails = [os.urandom(size_bytes - 8) for _ in range(2)]

    def content(number: int, turn: int) -> bytes:
        return number.to_bytes(8, "little") + tails[turn]

    def write(number: int, turn: int, flags: int) -> None:
        descriptor = os.open(paths[number], os.O_WRONLY | flags, 0o600)
        written = os.write(descriptor, content(number, turn))
        os.close(descriptor)
        if written != size_bytes:
            raise SystemExit(f"{paths[number]}: {written} bytes were written")

    def read(number: int) -> None:
        descriptor = os.open(paths[number], os.O_RDONLY)
        found = os.read(descriptor, size_bytes + 1)
        os.close(descriptor)
        if found != content(number, 1):
            raise SystemExit(f"{paths[number]} has other bytes than were written")

    def timed(work: Callable[[int], None]) -> float:
        began = time.monotonic()
        for number in range(count):
            work(number)
        return time.monotonic() - began

    before = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "new_s": timed(lambda number: write(number, 0, os.O_CREAT | os.O_EXCL)),
        "overwritten_s": timed(lambda number: write(number, 1, os.O_TRUNC)),
        "read_s": timed(read),
    }
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    json.dump({**figures, "cpu_s": cpu_s}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
