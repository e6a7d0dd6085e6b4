"""The budget: what the machine and the control groups around us leave."""

from pathlib import Path

import pytest

from bootseer.prefetch.warm.request import budget_bytes

_MIB = 2**20


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: 999999999 kB\nMemAvailable: {1000 * 1024} kB\n")
    return path


def test_half_of_what_the_machine_has_left(meminfo: Path, tmp_path: Path) -> None:
    assert budget_bytes(meminfo, tmp_path / "no groups here") == 500 * _MIB


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
    # Page cache gives way, so it counts as free.
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {100 * _MIB}\n")
    assert budget_bytes(meminfo, group) == expected_mib * _MIB


def test_the_real_machine_has_some() -> None:
    assert 0 < budget_bytes() < 2**50
