"""What to read ahead, in which order and in which pieces. Pure (no I/O)."""

from collections.abc import Iterator

from msgspec import Struct

from bootseer.prefetch.warm.record import Range, WarmFile, WarmRecord, normalized

GAP_BYTES = 128 * 1024
"""Smaller gaps are read as well: the kernel's own read-ahead, 128 KiB, would reach over them, and
on a network file system a request costs about what so many bytes do."""

JOB_BYTES = 32 * 2**20
"""What one thread reads of a file before others may take its next part."""


class Job(Struct, frozen=True):
    """Ranges of one file, from its start towards its end. Empty: only open the file."""

    file: WarmFile
    ranges: tuple[Range, ...]


class Plan(Struct, frozen=True):
    """Jobs in the order in which they should begin."""

    jobs: tuple[Job, ...]
    planned_bytes: int
    left_out_bytes: int
    """What the budget has no room for."""


def plan(record: WarmRecord, budget_bytes: int) -> Plan:
    """Everything of the record that fits into `budget_bytes`, what is wanted first before."""
    jobs: list[Job] = []
    left_bytes = budget_bytes
    left_out_bytes = 0
    for file in record.files:
        if not file.ranges:
            jobs.append(Job(file, ()))
            continue
        for job in _jobs(file):
            count = sum(found.length for found in job.ranges)
            if count > left_bytes:
                left_out_bytes += count
                continue
            left_bytes -= count
            jobs.append(job)
    return Plan(tuple(jobs), budget_bytes - left_bytes, left_out_bytes)


def _jobs(file: WarmFile) -> Iterator[Job]:
    part: list[Range] = []
    part_bytes = 0
    for found in normalized(file.ranges, GAP_BYTES):
        offset = found.offset
        while offset < found.end:
            length = min(found.end - offset, JOB_BYTES - part_bytes)
            part.append(Range(offset, length))
            part_bytes += length
            offset += length
            if part_bytes == JOB_BYTES:
                yield Job(file, tuple(part))
                part, part_bytes = [], 0
    if part:
        yield Job(file, tuple(part))
