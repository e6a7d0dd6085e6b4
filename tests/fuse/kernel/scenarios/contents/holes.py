"""Scenario: holes."""

import os

from testbed.mounts.scenario import attempt, say

fd = os.open("a", os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"x", 1 << 20)
os.posix_fallocate(fd, 0, 4096)
say(os.lseek(fd, 0, os.SEEK_END))
say(os.lseek(fd, 1 << 20, os.SEEK_DATA) <= 1 << 20)
say(attempt(os.lseek, fd, 1 << 30, os.SEEK_DATA))
