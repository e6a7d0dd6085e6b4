"""Scenario: locks."""

import fcntl
import os

from testbed.mounts.scenario import attempt, say, write

write("a", b"")
a = os.open("a", os.O_WRONLY)
b = os.open("a", os.O_RDWR)
fcntl.flock(a, fcntl.LOCK_EX)
say(attempt(fcntl.flock, b, fcntl.LOCK_EX | fcntl.LOCK_NB))
fcntl.flock(a, fcntl.LOCK_UN)
fcntl.flock(b, fcntl.LOCK_EX)
fcntl.lockf(b, fcntl.LOCK_SH)
