"""Scenario: unlinked but open."""

import os

from testbed.mounts.scenario import say

fd = os.open("a", os.O_RDWR | os.O_CREAT)
os.write(fd, b"ghost")
os.unlink("a")
say(os.listdir("."), os.pread(fd, 9, 0))
os.write(fd, b"!")
say(os.fstat(fd).st_size, os.pread(fd, 9, 0))
