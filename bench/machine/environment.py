"""Description of the machine of a benchmark: enough to judge its numbers, without its name."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from testbed.paths import REPOSITORY

_PACKAGES = ("bootseer", "fsspec", "hdfs-native", "mfusepy", "pyarrow", "zstandard")


def describe(directory: Path) -> dict[str, Any]:
    """Return kernel, CPU, memory, Python, packages, commit, and the file system of `directory`."""
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": _packages(),
        "commit": _commit(),
        "file_system": file_system_of(directory),
        "is_root": os.geteuid() == 0,
    }


def kernel_version() -> tuple[int, int]:
    """Return the running kernel's version such as (6, 9), or (0, 0) if it cannot be read."""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds `path`, such as "ext4", or "unknown"."""
    best_length, best_type = -1, "unknown"
    target = str(path.resolve())
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return best_type
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = before.split()[4]
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        # >= since a later mount hides an earlier one at the same path.
        if inside and len(mount) >= best_length:
            best_length, best_type = len(mount), after.split()[0]
    return best_type


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Return the commit of the checkout, with "+" if files differ; "unknown" outside of one."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    # Results are written into the checkout, and must not mark the next run as changed.
    status = [
        git,
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ":!bench/results",
        ":!docs",
    ]
    try:
        head = subprocess.run(
            [git, "rev-parse", "--short=12", "HEAD"],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        dirty = subprocess.run(
            status, cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
