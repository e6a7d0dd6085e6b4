"""Programs as shells, `env` and execvp(3) run them: also scripts whose first line names no
interpreter, which the kernel refuses; and how a new interpreter finds us. Stateless; any thread.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypedDict

import bootseer
from bootseer.errors import SetupFailedError

_LOOK_BYTES = 256


class RunOptions(TypedDict, total=False):
    """Options of programs that a set-up runs, as `subprocess.run` takes them."""

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
    """Our environment, so that a new interpreter finds this very Bootseer, wherever it runs.

    `variables`: what is different there; None: what is left out.
    """
    source = str(Path(bootseer.__file__).parent.parent)
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    return {name: text for name, text in ours.items() if text is not None}


def execute(command: Sequence[str]) -> NoReturn:
    """Become this command. Raises: SetupFailedError with 127 or 126, as shells have it, where it is
    missing or cannot be executed."""
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
    """What to run instead of a command that failed to start with `error`, or None.

    Text without "#!" is for sh; a program of another machine is for nobody. `search_path`: as
    PATH, else this process's; `directory`: where the command starts, else here.
    """
    if error.errno != errno.ENOEXEC:
        return None
    program = command[0]
    if "/" not in program:
        import shutil  # here: it loads every kind of compression

        program = shutil.which(program, path=search_path) or program
    try:
        with Path(directory, program).open("rb") as file:
            is_text = b"\0" not in file.read(_LOOK_BYTES)
    except OSError:
        return None
    return ["/bin/sh", program, *command[1:]] if is_text else None
