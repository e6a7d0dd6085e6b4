"""Running a program for what it prints, within a deadline that holds whatever it has started.

`subprocess.run` kills the program at its time-out, then waits without one until all who have its
pipe have ended: a child that it left behind holds the caller for ever. Stateless; any thread.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

_REAP_S = 5.0
"""What was killed ends at once, unless it waits for a file system that hangs."""


def run_within(
    command: Sequence[str], deadline_s: float, *, given: bytes = b"", size_max: int = 16 << 20
) -> tuple[int, bytes]:
    """Return the exit code of a program, and at most `size_max` bytes of what it printed.

    `given` is its standard input; its errors go nowhere. Neither touches a disk.
    Raises: OSError; subprocess.TimeoutExpired, after it and its process group were killed.
    """
    source, sink = os.memfd_create("input"), os.memfd_create("output")
    try:
        os.pwrite(source, given, 0)
        process = subprocess.Popen(
            command, stdin=source, stdout=sink, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(deadline_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
            raise
        return code, os.pread(sink, size_max, 0)
    finally:
        os.close(source)
        os.close(sink)
