"""Bounded run of a program for its output: the deadline also holds for the program's children.

`subprocess.run` kills the program after its timeout, but then waits without limit for everybody who
has the output pipe open: a child that the program left behind holds the caller forever. Stateless;
any thread.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

_REAP_S = 5.0
"""Time for a killed process to end; it needs longer only if it waits for a file system that hangs.
"""


def run_within(
    command: Sequence[str], deadline_s: float, *, given: bytes = b"", size_max: int = 16 << 20
) -> tuple[int, bytes]:
    """Return the exit code of a program, and at most `size_max` bytes of its output.

    `given` is its input; its standard error is discarded. No disk is used. Raises: OSError;
    subprocess.TimeoutExpired, after the program and its process group were killed.
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
