"""Readahead: its pieces, within the memory that the machine has free."""

from pathlib import Path

import pytest

from bootseer.prefetch.warm.plan import (
    GAP_BYTES,
    JOB_BYTES,
    memory_budget_bytes,
    plan_read_ahead,
)
from bootseer.prefetch.warm.record import FileRange, WarmFile, WarmRecord

_MIB = 2**20


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: 999999999 kB\nMemAvailable: {1000 * 1024} kB\n")
    return path


def test_half_of_what_the_machine_has_left(meminfo: Path, tmp_path: Path) -> None:
    assert memory_budget_bytes(meminfo, tmp_path / "no groups here") == 500 * _MIB


@pytest.mark.parametrize(
    ("limit", "expected_mib"),
    [("max", 500), (str(400 * _MIB), 100), (str(200 * _MIB), 0), ("nonsense", 500)],
)
def test_a_control_group_may_leave_less(
    meminfo: Path, tmp_path: Path, limit: str, expected_mib: int
) -> None:
    group = tmp_path / "groups"
    group.mkdir()
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text(f"{300 * _MIB}\n")
    # Page cache can be dropped, so it counts as free.
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {100 * _MIB}\n")
    assert memory_budget_bytes(meminfo, group) == expected_mib * _MIB


def test_the_real_machine_has_some() -> None:
    assert 0 < memory_budget_bytes() < 2**50


def _record(*files: WarmFile) -> WarmRecord:
    return WarmRecord("path:/lustre/env", "train", "inotify", 1, 7, files)


def _file(path: bytes, *ranges: tuple[int, int], size: int = 10_000) -> WarmFile:
    return WarmFile(path, size, 5, tuple(FileRange(*numbers) for numbers in ranges))


def test_small_gaps_are_read_over_and_large_ones_are_not() -> None:
    far = GAP_BYTES + 4096 + 1
    record = _record(_file(b"a", (0, 1), (GAP_BYTES, 4096), (2 * far, 10), size=_MIB))
    (job,) = plan_read_ahead(record, 2**40).jobs
    assert job.ranges == (FileRange(0, GAP_BYTES + 4096), FileRange(2 * far, 10))


def test_a_large_file_is_shared_among_threads_in_order() -> None:
    record = _record(_file(b"a", (5, 2 * JOB_BYTES + 7), size=2**40))
    work = plan_read_ahead(record, 2**40)
    assert [job.ranges for job in work.jobs] == [
        (FileRange(5, JOB_BYTES),),
        (FileRange(5 + JOB_BYTES, JOB_BYTES),),
        (FileRange(5 + 2 * JOB_BYTES, 7),),
    ]
    assert work.planned_bytes == record.range_bytes


def test_what_is_wanted_first_has_the_memory() -> None:
    record = _record(
        _file(b"first", (0, 600)),
        _file(b"second", (0, 600)),
        _file(b"empty"),
        _file(b"third", (0, 300)),
    )
    work = plan_read_ahead(record, 1000)
    assert [job.file.path for job in work.jobs] == [b"first", b"empty", b"third"]
    assert (work.planned_bytes, work.left_out_bytes) == (900, 600)
