"""A child process that does file operations in one directory, for model tests.

The test process must not touch a mount that it serves itself: a stuck operation could not be ended.
`FileAgent` sends one operation at a time and waits for its result with a deadline.
"""

import contextlib
import errno
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bootseer.linux.processes import wait_readable
from testbed.paths import REPOSITORY

_DEADLINE_S = 30.0


class FileAgent:
    """Runs file operations in `root` in a child process."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "testbed.mounts.file_agent", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
        )

    def do(self, operation: str, *arguments: Any) -> Any:
        """Return the result of an operation, or the name of its errno. Raises: TimeoutError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        pickle.dump((operation, arguments), stdin)
        stdin.flush()
        if not wait_readable([stdout.fileno()], _DEADLINE_S):
            raise TimeoutError(f"{operation}{arguments} does not end")
        return pickle.load(stdout)

    def close(self) -> None:
        """Kill the child process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait(_DEADLINE_S)


_open_files: dict[int, int] = {}


def _status(path: str) -> tuple[int, int, int]:
    status = os.lstat(path)
    is_file = stat.S_ISREG(status.st_mode)
    return status.st_mode, status.st_size if is_file else 0, status.st_nlink if is_file else 0


def _open(key: int, path: str, flags: int) -> None:
    # Open before closing: a failing open leaves the slot's old file open.
    fd = os.open(path, flags, 0o644)
    _close(key)
    _open_files[key] = fd


def _close(key: int) -> None:
    fd = _open_files.pop(key, None)
    if fd is not None:
        os.close(fd)


def _file(key: int) -> int:
    if key not in _open_files:
        raise OSError(errno.EBADF, "not open")
    return _open_files[key]


def _fstat(key: int) -> tuple[int, int]:
    status = os.fstat(_file(key))
    return status.st_size, status.st_nlink


def _content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "status": _status,
    "list": lambda path: sorted(os.listdir(path)),
    "content": _content,
    "mkdir": os.mkdir,
    "rmdir": os.rmdir,
    "unlink": os.unlink,
    "rename": os.rename,
    "link": lambda a, b: os.link(a, b, follow_symlinks=False),
    "symlink": os.symlink,
    "readlink": os.readlink,
    "chmod": os.chmod,
    "truncate": os.truncate,
    "open": _open,
    "close": _close,
    "pread": lambda key, offset, length: os.pread(_file(key), length, offset),
    "pwrite": lambda key, offset, data: os.pwrite(_file(key), data, offset),
    "append": lambda key, data: os.write(_file(key), data),
    "ftruncate": lambda key, size: os.ftruncate(_file(key), size),
    "fstat": _fstat,
    "fsync": lambda key: os.fsync(_file(key)),
}


def main() -> None:
    """Run operations from stdin until it ends."""
    os.chdir(sys.argv[1])
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            operation, arguments = pickle.load(stdin)
            try:
                outcome = _OPERATIONS[operation](*arguments)
            except OSError as error:
                outcome = errno.errorcode[error.errno or 0]
            pickle.dump(outcome, stdout)
            stdout.flush()


if __name__ == "__main__":
    main()
