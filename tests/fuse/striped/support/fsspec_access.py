"""Small stripes for tests of the fsspec interface, and a check for every storage."""

import contextlib
import random
from typing import Any

from bootseer.fuse.striped.fsspec_system import CheckpointFileSystem

UNIT = 256 * 2**10
OPTIONS: dict[str, Any] = {"stripe_unit_bytes": UNIT, "stripe_count": 3, "memory_bytes": 32 * 2**20}
DATA = random.Random(5).randbytes(3 * UNIT + 4567)


def exercise(fs: CheckpointFileSystem, root: str) -> None:
    """Write, move, replace and remove files below `root`; leave nothing behind."""
    fs.pipe_file(f"{root}/a/f", DATA)
    assert fs.storage.tree.stored.view(fs.key(f"{root}/a/f")).layout is not None
    fs.mv(f"{root}/a/f", f"{root}/a/g")
    assert fs.cat_file(f"{root}/a/g", 9, -9) == DATA[9:-9]
    fs.mv(f"{root}/a", f"{root}/b", recursive=True)
    assert fs.find(root) == [f"{root}/b/g"]
    with contextlib.suppress(KeyError), fs.open(f"{root}/b/g", "wb") as file:
        file.write(DATA[1:])
        raise KeyError
    assert fs.cat_file(f"{root}/b/g") == DATA
    fs.rm(f"{root}/b", recursive=True)
    assert fs.find(root) == []
