"""Runs a set-up command: its output on our stderr, its failure as an error with its exit code.

Stateless; any thread that may start processes.
"""

import signal
import subprocess
import time
from collections.abc import Sequence

from bootseer.errors import BootseerError, SetupFailedError, exit_code_of
from bootseer.snapshots.setup.request import Request, working_directory

# The set-up's output is not ours to put on stdout, which carries data.
_STDERR = 2


def run_command(request: Request, locks: Sequence[int]) -> float:
    """Run it; how many seconds it took. `locks`: descriptors that it inherits, so that nobody else
    changes the targets while it runs, should this process be killed. Raises: SetupFailedError."""
    started = time.monotonic()
    command = list(request.command)
    environ = request.environ
    try:
        done = request.runner(
            command,
            stdout=_STDERR,
            stderr=_STDERR,
            cwd=request.directory or None,
            env=None if environ is None else dict(environ),
            pass_fds=locks,
        )
    except BootseerError as error:
        # Of a container's runner. It may have run: as good as the command's own failure.
        raise SetupFailedError(f"cannot run the set-up: {error}", exit_code_of(error)) from error
    except (OSError, subprocess.SubprocessError) as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        where = working_directory(request)
        raise SetupFailedError(
            f"cannot start the set-up {command[0]!r} in {where}: {error}", code
        ) from error
    code = done.returncode
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        raise SetupFailedError(
            f"the set-up {command[0]!r} was ended by {name}; nothing was stored", 128 - code
        )
    if code:
        raise SetupFailedError(
            f"the set-up {command[0]!r} failed with exit code {code}; nothing was stored", code
        )
    return time.monotonic() - started
