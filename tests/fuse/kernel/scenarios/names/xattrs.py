"""Scenario: xattrs."""

import os

from testbed.mounts.scenario import attempt, say, write

write("a", b"")
say(os.listxattr("a"))
os.setxattr("a", "user.k", b"v\0w")
say(os.getxattr("a", "user.k"))
say(
    attempt(os.setxattr, "a", "user.k", b"", os.XATTR_CREATE),
    attempt(os.getxattr, "a", "user.none"),
)
os.setxattr("a", "user.long", b"z" * 3000)
say(sorted(os.listxattr("a")), len(os.getxattr("a", "user.long")))
os.removexattr("a", "user.k")
say(os.listxattr("a"))
say(attempt(os.removexattr, "a", "user.k"))
