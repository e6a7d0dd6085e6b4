"""Scenario: mmap shared."""

import mmap
import os

from testbed.mounts.scenario import read, say, write

write("a", bytes(100000))
fd = os.open("a", os.O_RDWR)
m = mmap.mmap(fd, 100000)
m[5000:5005] = b"hello"
m.flush()
say(read("a")[4998:5007])
os.pwrite(fd, b"there", 70000)
say(m[70000:70005])
m.close()
os.close(fd)
say(read("a").count(0))
