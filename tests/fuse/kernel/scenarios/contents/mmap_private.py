"""Scenario: mmap private."""

import mmap
import os

from testbed.mounts.scenario import say, write

write("a", b"abc" * 50000)
fd = os.open("a", os.O_RDONLY)
m = mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
say(m[:6], m[149994:], len(m))
