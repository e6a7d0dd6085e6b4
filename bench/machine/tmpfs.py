"""Folders in memory, for benchmarks that must not measure a disk."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.machine.environment import file_system_of
from testbed.needs import MissingError

# The tmpfs that every Linux has.
_SHARED_MEMORY = Path("/dev/shm")


def available_memory_bytes() -> int:
    """Return the kernel's estimate of the memory that can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def tmpfs(workspace: Path, size_bytes: int, beside_bytes: int | None = None) -> Iterator[Path]:
    """Yield a tmpfs folder with room for `size_bytes`: a new mount for root, else in /dev/shm.

    `beside_bytes` of memory are left to other uses; by default as much again, for instance for the
    page cache. Raises: MissingError if there is not enough memory or no tmpfs.
    """
    needed_bytes = size_bytes + (size_bytes + 2**29 if beside_bytes is None else beside_bytes)
    if available_memory_bytes() < needed_bytes:
        raise MissingError(f"less than {needed_bytes >> 20} MiB of memory are available")
    own = workspace / "tmpfs"
    own.mkdir()
    if os.geteuid() == 0 and _mount(own, size_bytes):
        try:
            yield own
        finally:
            subprocess.run(["umount", "-l", str(own)], timeout=20, check=False)
        return
    if file_system_of(_SHARED_MEMORY) != "tmpfs":
        raise MissingError("/dev/shm is no tmpfs, and mounting one needs root")
    if shutil.disk_usage(_SHARED_MEMORY).free < size_bytes + 2**24:
        raise MissingError(f"/dev/shm has no room for {size_bytes >> 20} MiB")
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY, prefix="bootseer-bench-") as name:
        yield Path(name)


def _mount(target: Path, size_bytes: int) -> bool:
    options = f"size={size_bytes + 2**24},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "bootseer-bench", str(target)],
        capture_output=True,
        timeout=20,
        check=False,
    )
    return done.returncode == 0
