"""Requirements of a test or a benchmark: privileges, programs, Python modules, a Linux release.

A test says `@pytest.mark.needs("root", modules=["torch"], linux=(6, 9))`; a server of the test bed
calls `require`. tests/conftest.py turns `MissingError` into a skip with the error's message.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

_FUSE = "/dev/fuse"
_CAP_SYS_ADMIN = 21


class MissingError(Exception):
    """Error of a test or benchmark that this machine cannot run; the message says why."""


def linux_version() -> tuple[int, int]:
    """Return the first two numbers of the running kernel's version."""
    major, minor = os.uname().release.split("-")[0].split(".")[:2]
    return int(major), int(minor)


def _no_root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def _no_mounts() -> str:
    return "" if _has_sys_admin() else "mounting needs CAP_SYS_ADMIN"


def _no_fuse() -> str:
    if not os.path.exists(_FUSE):
        return f"there is no {_FUSE}"
    if not os.access(_FUSE, os.R_OK | os.W_OK):
        return f"{_FUSE} may not be opened"
    if not _has_sys_admin() and shutil.which("fusermount3") is None:
        return "mounting FUSE without root needs fusermount3"
    return ""


def _has_sys_admin() -> bool:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    effective = next(line for line in lines if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_ADMIN & 1)


_ABILITIES: dict[str, Callable[[], str]] = {
    "root": _no_root,
    "mount": _no_mounts,
    "fuse": _no_fuse,
}
"""Functions that return "" if the machine has the ability, and else the reason why not.

"mount" is the ability to mount any file system, "fuse" the ability to mount a FUSE file system.
"""


def require(
    *abilities: str,
    modules: Sequence[str] = (),
    programs: Sequence[str] = (),
    linux: tuple[int, int] = (0, 0),
) -> None:
    """Raise MissingError if the machine lacks one of the abilities, modules or programs.

    A module counts as present if Python finds it; it is not imported.
    """
    for ability in abilities:
        reason = _ABILITIES[ability]()
        if reason:
            raise MissingError(reason)
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingError(f"the Python module {module} is not installed")
    for program in programs:
        if shutil.which(program) is None:
            raise MissingError(f"the program {program} is not installed")
    if linux_version() < linux:
        raise MissingError("needs Linux {}.{} or newer".format(*linux))
