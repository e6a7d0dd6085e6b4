"""Plan of a read-ahead: ranges of files in order, within the memory that the node has left.

Pure but for `memory_budget_bytes`, which reads /proc and the control groups.
"""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.prefetch.warm.record import FileRange, WarmFile, WarmRecord, normalized

GAP_BYTES = 128 * 1024
"""Least gap that splits two ranges. Smaller gaps are read: the kernel's own read-ahead, 128 KiB,
would reach over them, and on a network file system a request costs as much as reading them."""

JOB_BYTES = 32 * 2**20
"""Bytes of a file that one thread reads before other threads may take the file's next part."""

_BUDGET_SHARE = 0.5


class WarmJob(Struct, frozen=True):
    """Ranges of one file, in ascending order; without ranges, the file is only opened."""

    file: WarmFile
    ranges: tuple[FileRange, ...]


class WarmPlan(Struct, frozen=True):
    """Jobs in the order in which they should begin."""

    jobs: tuple[WarmJob, ...]
    planned_bytes: int
    left_out_bytes: int
    """Bytes of the record beyond the budget."""

    def memory_warning(self, directory: str) -> str:
        """Return a sentence for the user if the budget is smaller than the record, else ""."""
        if not self.left_out_bytes:
            return ""
        return (
            f"the memory takes {self.planned_bytes >> 20} MiB of what {directory} has on "
            f"record, {self.left_out_bytes >> 20} MiB are not read ahead; see --memory"
        )


def plan_read_ahead(record: WarmRecord, budget_bytes: int | None) -> WarmPlan:
    """Plan to read the record's ranges in order, as far as `budget_bytes` allow.

    Without a budget, `memory_budget_bytes` is used.
    """
    jobs: list[WarmJob] = []
    if budget_bytes is None:
        budget_bytes = memory_budget_bytes()
    remaining_bytes = budget_bytes
    left_out_bytes = 0
    for file in record.files:
        if not file.ranges:
            jobs.append(WarmJob(file, ()))
            continue
        for job in _jobs_of(file):
            count_bytes = sum(found.length for found in job.ranges)
            if count_bytes > remaining_bytes:
                left_out_bytes += count_bytes
                continue
            remaining_bytes -= count_bytes
            jobs.append(job)
    return WarmPlan(tuple(jobs), budget_bytes - remaining_bytes, left_out_bytes)


def _jobs_of(file: WarmFile) -> Iterator[WarmJob]:
    part: list[FileRange] = []
    part_bytes = 0
    for found in normalized(file.ranges, GAP_BYTES):
        offset = found.offset
        while offset < found.end:
            length = min(found.end - offset, JOB_BYTES - part_bytes)
            part.append(FileRange(offset, length))
            part_bytes += length
            offset += length
            if part_bytes == JOB_BYTES:
                yield WarmJob(file, tuple(part))
                part, part_bytes = [], 0
    if part:
        yield WarmJob(file, tuple(part))


def memory_budget_bytes(
    meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return half of the memory available to this process on the node and in its control groups.

    Reading more would evict pages that were read ahead before, and the job's own pages.
    """
    limits = [_available_bytes(meminfo), *_group_limits(groups)]
    return int(min(limits) * _BUDGET_SHARE)


def _available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _group_limits(groups: Path) -> list[int]:
    """Return the free memory of each control group (version 2) around this process, in bytes.

    The page cache counts as free, since the kernel reclaims it first.
    """
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
            pass  # The root group has no limit, and an older system has no such group.
        folder = folder.parent
    return found
