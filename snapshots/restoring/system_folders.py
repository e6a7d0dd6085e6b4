"""Which directories a snapshot is restored to only if the user says so. Pure (no I/O).

A manifest names its targets, and its author decides what: files in these directories run, or
decide what runs, without being asked for.
"""

from collections.abc import Sequence
from pathlib import Path

_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run"),
    *("/sbin", "/sys", "/usr", "/var"),
)
_FREE = ("/dev/shm", "/var/tmp")
"""Directories in these in which nothing runs by itself."""
_FREE_OF_HOME = (".cache", ".conda", ".venv", ".virtualenvs")
"""Names in a home that begin with a dot and hold no settings."""


def why_guarded(path: Path, home: Path) -> str:
    """Why nothing is restored to `path`, which is absolute, unasked; "" if it may be. `home` is
    this user's."""
    if any(_is_in(path, free) for free in _FREE):
        return ""
    for system in map(Path, _SYSTEM):
        if path.is_relative_to(system) or system.is_relative_to(path):
            return "belongs to the system"
    homes = [home, Path("/root"), *_homes_of(path.parts)]
    for one in homes:
        if one.is_relative_to(path):
            return "is, or holds, a home directory"
        if path.is_relative_to(one):
            name = path.relative_to(one).parts[0]
            if name.startswith(".") and name not in _FREE_OF_HOME:
                return "holds a user's settings"
    return ""


def _is_in(path: Path, folder: str) -> bool:
    return path != Path(folder) and path.is_relative_to(folder)


def _homes_of(parts: Sequence[str]) -> list[Path]:
    """The home that a path lies in, where homes lie in /home."""
    if len(parts) > 1 and parts[1] == "home":
        return [Path(*parts[:3])]
    return []
