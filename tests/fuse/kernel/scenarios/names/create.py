"""Scenario: create."""

import os

from testbed.mounts.scenario import attempt, read, say, show, write

write("a", b"hello")
show("a")
say(read("a"))
say(attempt(os.open, "a", os.O_CREAT | os.O_EXCL))
say(attempt(os.open, "none", os.O_RDONLY))
say(attempt(os.open, "a/b", os.O_RDONLY))
say(attempt(os.rmdir, "a"))
os.umask(0o027)
write("b", b"")
show("b")
os.mkdir("d")
show("d")
say(attempt(os.unlink, "d"), attempt(os.mkdir, "d"))
