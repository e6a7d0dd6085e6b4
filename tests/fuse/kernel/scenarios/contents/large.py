"""Scenario: large."""

import os
from pathlib import Path

from testbed.mounts.scenario import read, say, show

block = os.urandom(1 << 20)
with Path("a").open("wb") as f:
    for _ in range(8):
        f.write(block)
say(read("a") == block * 8)
show("a")
