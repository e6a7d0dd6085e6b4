"""Scenario: random writes."""

import os
import random

from testbed.mounts.scenario import read, say

r = random.Random(1)
model = bytearray(300000)
fd = os.open("a", os.O_RDWR | os.O_CREAT)
os.truncate(fd, len(model))
for _ in range(60):
    at, data = r.randrange(290000), r.randbytes(r.randrange(1, 9000))
    os.pwrite(fd, data, at)
    model[at : at + len(data)] = data
os.fsync(fd)
say(read("a") == model)
say(os.pread(fd, 100, 299950) == model[299950:])
say(os.pread(fd, 10, 400000))
os.fdatasync(fd)
say(len(model))
