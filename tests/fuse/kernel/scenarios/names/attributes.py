"""Scenario: attributes."""

import os

from testbed.mounts.scenario import attempt, say, show, write

write("a", b"a")
os.chmod("a", 0o4751)
show("a")
os.chmod("a", 0o640)
os.utime("a", ns=(1234567890123456789, 987654321987654321))
s = os.stat("a")
say(s.st_atime_ns, s.st_mtime_ns)
os.utime("a", ns=(-5, 5))
say(os.stat("a").st_mtime_ns)
say(attempt(os.chown, "a", 12, 34))
show("a")
say(os.access("a", os.X_OK))
