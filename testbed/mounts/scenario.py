"""Functions of the scenarios in tests/fuse/kernel/scenarios.

A scenario is a script that works in the directory named by its first argument and prints results;
the test compares its output on a mount with its output on a plain directory.
"""

import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.chdir(sys.argv[1])


def say(*values: object) -> None:
    """Print values on one line."""
    sys.stdout.write(" ".join(str(value) for value in values) + "\n")


def attempt(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of a call, or the name of its errno."""
    try:
        return function(*arguments, **named)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def write(name: str | bytes, data: bytes) -> None:
    """Make or replace a file."""
    Path(os.fsdecode(name)).write_bytes(data)


def read(name: str | bytes) -> bytes:
    """Return the content of a file."""
    return Path(os.fsdecode(name)).read_bytes()


def show(name: str) -> None:
    """Print the result of lstat, without fields that differ between two equal files."""
    status = os.lstat(name)
    size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else ""
    links = status.st_nlink if not stat.S_ISDIR(status.st_mode) else ""
    say(name, oct(status.st_mode), size_bytes, links, status.st_uid, status.st_gid, status.st_rdev)
