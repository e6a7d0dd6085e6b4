"""Scenario: rename."""

import ctypes
import os
from errno import errorcode

from testbed.mounts.scenario import attempt, read, say, show, write

RENAME = ctypes.CDLL(None, use_errno=True).renameat2


def rename(a: bytes, b: bytes, flags: int) -> str:
    return "" if RENAME(-100, a, -100, b, flags) == 0 else errorcode[ctypes.get_errno()]


write("a", b"a")
write("b", b"b")
os.mkdir("d")
say(rename(b"a", b"b", 1))
say(rename(b"a", b"b", 2), read("a"), read("b"))
os.rename("a", "b")
say(sorted(os.listdir(".")), read("b"))
say(rename(b"b", b"d", 0))
say(attempt(os.rename, "d", "b"))
os.rename("b", "d/x")
say(read("d/x"))
say(attempt(os.rename, "d", "d/y"))
say(attempt(os.rename, "zzz", "y"))
os.rename("d", "e")
show("e/x")
