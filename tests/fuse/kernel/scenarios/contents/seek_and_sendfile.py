"""Scenario: seek and sendfile."""

import os

from testbed.mounts.scenario import read, say, write

write("a", os.urandom(200000))
a, b = os.open("a", os.O_RDONLY), os.open("b", os.O_WRONLY | os.O_CREAT)
say(os.sendfile(b, a, 0, 200000))
say(read("a") == read("b"))
say(os.copy_file_range(a, b, 1000, 0, 0))
