"""Some thousand random operations on two mounts of one folder, against a model.

`BOOTSEER_EXERCISER_SEED` chooses others; `make soak` runs for longer. A failure is printed with its
seed, and `python -m tests.fuse.striped.exerciser --seed SEED --first NUMBER` repeats it.
"""

import os
import time
from pathlib import Path

import pytest

from tests.fuse.striped.exerciser.driver import SequenceError, open_site, run_random, shrink

_SEED = os.environ.get("BOOTSEER_EXERCISER_SEED", "1")
_SEQUENCES = {"file": 5, "hdfs": 2}
# A slow machine runs fewer sequences.
_BEGIN_S = 20.0
_SHRINK_S = 60.0


@pytest.mark.timeout(900)
@pytest.mark.needs("fuse")
def test_random_operations(url: str, tmp_path: Path) -> None:
    kind = url.partition(":")[0]
    number = count = 0
    begun_s = time.monotonic()
    try:
        with open_site(tmp_path, url) as site:
            for number in range(_SEQUENCES[kind]):
                count += run_random(site, _SEED, number)
                if time.monotonic() - begun_s > _BEGIN_S:
                    break
    except SequenceError as failure:
        (tmp_path / "again").mkdir()
        until_s = time.monotonic() + _SHRINK_S
        shorter = shrink(tmp_path / "again", f"{url}-again", failure, until_s)
        pytest.fail(
            f"seed {_SEED}, sequence {number}, on {kind}:\n{failure}\n"
            + (f"the shortest found:\n{shorter}" if shorter else "it did not happen again")
        )
    print(f"seed {_SEED}: {number + 1} sequences, {count} operations on {kind}")
