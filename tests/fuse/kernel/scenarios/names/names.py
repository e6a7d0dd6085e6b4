"""Scenario: names."""

import os

from testbed.mounts.scenario import attempt, read, say, write

for name in (b"x" * 255, b"\xff\xfe", "\u00fc \n%".encode(), b"-rf"):
    write(name, name)
    say(read(name) == name)
say(attempt(os.open, b"x" * 256, os.O_CREAT))
say(sorted(os.listdir(b".")))
