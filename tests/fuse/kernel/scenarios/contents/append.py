"""Scenario: append."""

import os

from testbed.mounts.scenario import read, say, write

write("a", b"one")
first, second = (os.open("a", os.O_WRONLY | os.O_APPEND) for _ in range(2))
os.write(first, b"two")
os.write(second, b"three")
os.write(first, b"four")
say(read("a"))
os.lseek(first, 0, 0)
os.write(first, b"five")
say(read("a"))
