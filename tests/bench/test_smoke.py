"""Cases with a smoke run of a few seconds still run, and check their content.

`make bench-smoke` runs every case.
"""

import subprocess
import sys

import pytest

from bench.catalogue import all_cases
from testbed.needs import MissingError
from testbed.paths import REPOSITORY

# By case, the variants that run: none named means all. Other servers than ours are left out.
CASES = {
    "checkpoint-small": (),
    "fuse-read": ("native", "cached", "direct_io", "passthrough"),
    "warm": (),
}


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("name", CASES)
def test_a_case_runs(name: str) -> None:
    done = bench(name, "--smoke", *(f"--only={variant}" for variant in CASES[name]))
    if "cannot run here" in done.stdout:
        raise MissingError(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    case = all_cases()[name]
    ran = done.stdout.splitlines()[0].removeprefix(f"{name}: ran: ").split(", ")
    assert set(ran) <= set(CASES[name] or [variant.name for variant in case.variants])
    assert ran, done.stdout
    assert not any(ratio.name in done.stdout for ratio in case.ratios)


def test_list_names_every_case_and_its_audience() -> None:
    done = bench("--list")
    assert done.returncode == 0, done.stderr
    assert [tuple(line.split()[:2]) for line in done.stdout.splitlines()] == [
        (case.name, case.audience) for case in all_cases().values()
    ]


def test_an_unknown_case_is_a_usage_error() -> None:
    for arguments in (("no-such-case",), ("no-such-case", "--smoke"), ()):
        done = bench(*arguments)
        assert done.returncode == 2
        assert "--list" in done.stderr
