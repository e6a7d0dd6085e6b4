"""Running of programs as shells and execvp(3) do, and the environment for a new Python interpreter.

Includes scripts whose first line names no interpreter, which the kernel refuses. Stateless; any
thread.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypedDict

import bootseer
from bootseer.errors import SetupFailedError

_PROBE_BYTES = 256


class RunOptions(TypedDict, total=False):
    """Options of `subprocess.run` for programs that a set-up runs."""

    stdin: int | None
    stdout: int | None
    stderr: int | None
    cwd: str | None
    env: Mapping[str, str] | None
    timeout: float | None
    pass_fds: Sequence[int]


def python_environment(
    variables: Mapping[str, str | None] = MappingProxyType({}),
) -> dict[str, str]:
    """Return this process's environment for a new interpreter that imports this Bootseer.

    `variables` are set in addition; a variable with value None is left out.
    """
    source = str(Path(bootseer.__file__).parent.parent)
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    return {name: text for name, text in ours.items() if text is not None}


def execute(command: Sequence[str]) -> NoReturn:
    """Become a command. Raises: SetupFailedError: 127 if missing, 126 if not executable."""
    try:
        _execute(command)
    except OSError as error:
        code = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
        raise SetupFailedError(f"cannot run {command[0]}: {error.strerror}", code) from error


def _execute(command: Sequence[str]) -> NoReturn:
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        script = as_script(error, command)
        if script is None:
            raise
    os.execv(script[0], script)


def as_script(
    error: OSError, command: Sequence[str], *, search_path: str | None = None, directory: str = ""
) -> list[str] | None:
    """Return the command that runs a script which failed to start with `error`; None if it is none.

    A text file without "#!" is run by sh. `search_path` replaces PATH; the command starts in
    `directory`, if given.
    """
    if error.errno != errno.ENOEXEC:
        return None
    program = command[0]
    if "/" not in program:
        import shutil  # here: it loads every kind of compression

        program = shutil.which(program, path=search_path) or program
    try:
        with Path(directory, program).open("rb") as file:
            is_text = b"\0" not in file.read(_PROBE_BYTES)
    except OSError:
        return None
    return ["/bin/sh", program, *command[1:]] if is_text else None
