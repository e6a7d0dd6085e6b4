"""Scenario: truncate."""

import os
from pathlib import Path

from testbed.mounts.scenario import read, say, write

write("a", b"x" * 10000)
os.truncate("a", 5000)
say(len(read("a")))
os.truncate("a", 9000)
say(read("a") == b"x" * 5000 + bytes(4000))
with Path("a").open("r+b") as f:
    f.truncate(3)
    f.seek(0)
    say(f.read())
write("a", b"new")
say(read("a"))
