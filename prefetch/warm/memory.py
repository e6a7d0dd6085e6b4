"""How much page cache a read-ahead may fill: half of what is free for it.

Alone owns that rule. What is read ahead beyond the memory would push out what was read ahead
before, and the job's own pages. Stateless; any thread.
"""

from pathlib import Path

_SHARE = 0.5
_GROUPS = Path("/sys/fs/cgroup")


def budget_bytes(meminfo: Path = Path("/proc/meminfo"), groups: Path = _GROUPS) -> int:
    """Half of the memory available to this process, on this machine and in its control group."""
    limits = [_available_bytes(meminfo), *_group_limits(groups)]
    return int(min(limits) * _SHARE)


def _available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _group_limits(groups: Path) -> list[int]:
    """What each control group (version 2) around this process has left, page cache counted as
    free: it is what gives way."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    found = []
    folder = groups / own.lstrip("/")
    while folder.is_relative_to(groups):
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                used = int((folder / "memory.current").read_text())
                statistics = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                cache = int(statistics.get("inactive_file", 0))
                found.append(max(int(limit) - used + cache, 0))
        except (OSError, ValueError):
            pass  # the root group has no limit, and an older system has no such group
        folder = folder.parent
    return found
