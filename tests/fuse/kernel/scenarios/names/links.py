"""Scenario: links."""

import os

from testbed.mounts.scenario import attempt, read, say, show, write

write("a", b"a")
os.link("a", "b")
show("a")
show("b")
os.unlink("a")
show("b")
os.symlink("b", "s")
show("s")
say(os.readlink("s"), read("s"))
os.symlink("x" * 4000, "t")
say(len(os.readlink("t")))
say(attempt(os.link, "b", "s"))
os.symlink("nowhere", "u")
say(attempt(read, "u"))
