"""Scenario: directories."""

import os

from testbed.mounts.scenario import attempt, say, write

for n in range(300):
    write(f"{n:03}", b"")
say(sorted(os.listdir(".")) == [f"{n:03}" for n in range(300)])
os.makedirs("x/y/z")
say(attempt(os.rmdir, "x"))
os.rmdir("x/y/z")
say(sorted(e.name for e in os.scandir("x")), [e.is_dir() for e in os.scandir("x")])
names = []
for entry in os.scandir("."):
    names.append(entry.name)
    if entry.is_file():
        os.unlink(entry.name)
say(len(names), len(set(names)), os.listdir("."))
fd = os.open(".", os.O_RDONLY)
os.fsync(fd)
