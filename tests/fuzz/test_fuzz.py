"""Some mutations for every parser, the same ones each time; `make fuzz` runs more."""

import pytest

from tests.fuzz.harness import fuzz
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_hostile_bytes_are_refused_or_within_bounds(name: str) -> None:
    fuzz(TARGETS[name], 60, None, cpu_s=30)
