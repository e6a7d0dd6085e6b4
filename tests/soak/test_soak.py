"""A soak that was stopped continues; `make soak` runs its rounds."""

from pathlib import Path

from tests.soak.__main__ import Soak


def test_a_stopped_soak_continues(tmp_path: Path) -> None:
    soak = Soak(tmp_path, seed=1)
    soak.round, soak.elapsed_s = 3, 90.0
    soak.results["right"] += 2
    soak.note(["a mount is left"])
    soak.save()
    again = Soak(tmp_path, seed=2)
    assert (again.seed, again.round, again.elapsed_s, again.results) == (1, 3, 90.0, {"right": 2})
    assert again.findings == ["round 3: a mount is left"]
