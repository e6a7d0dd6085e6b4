"""Search path for programs that tests and benchmarks start, whatever the caller's shell has set."""

import os
import sys
from pathlib import Path

from bootseer.linux.interpreters import is_interpreter


def usual_search_path() -> str:
    """Return PATH without this process's virtual environment, and with an interpreter in it.

    Packages of the environment, such as torch, would change starts. A launcher of interpreters,
    such as pyenv's, would be asked at each start: it comes after the interpreter's own folder.
    """
    own = Path(sys.prefix, "bin").resolve()
    given = os.environ.get("PATH", os.defpath).split(os.pathsep)
    is_environment = sys.prefix != sys.base_prefix
    folders = [one for one in given if not (is_environment and Path(one).resolve() == own)]
    first = next(filter(None, (_python_in(folder) for folder in folders)), None)
    if first is None or not is_interpreter(os.path.realpath(first)):
        folders.insert(0, f"{sys.base_prefix}/bin")
    return os.pathsep.join(folders)


def _python_in(folder: str) -> str | None:
    program = os.path.join(folder, "python3")
    return program if os.access(program, os.X_OK) else None
