"""Recognition of Python interpreters by their files, without starting them. Stateless."""

import os
import re
from pathlib import Path

PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)?t?)?")
"""Names of the program."""
_ELF = b"\x7fELF"


def is_interpreter(program: str) -> bool:
    """Return whether a program without links is an interpreter: neither a script nor a launcher."""
    if not PYTHON.fullmatch(os.path.basename(program)):
        return False
    try:
        with Path(program).open("rb") as file:
            return file.read(len(_ELF)) == _ELF
    except OSError:
        return False
