"""Several readers of one file that does not fit into memory."""

import os
import random
from pathlib import Path

from tests.fuse.striped.support.harness import UNIT, Driver, storage_on


def test_readers_that_follow_each_other_share_the_fetches(tmp_path: Path) -> None:
    size = 250 * UNIT
    data = random.Random(1).randbytes(size)
    with storage_on(tmp_path) as storage:
        driver = Driver(storage)
        driver.write("f", data, step=UNIT)
        assert storage.memory.limit_bytes < size // 3
        files = [driver.open("f", os.O_RDONLY) for _ in range(4)]
        # The last reader is nine units behind the first: more than the slack of one stream.
        for step in range(size // UNIT + 9):
            for number, file in enumerate(files):
                at = (step - 3 * number) * UNIT
                if 0 <= at < size:
                    assert driver.pread(file, at, UNIT) == data[at : at + UNIT]
        for file in files:
            driver.close(file)
        assert storage.reader.fetched_bytes <= 1.1 * size
