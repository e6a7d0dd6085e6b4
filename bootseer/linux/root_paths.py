"""Translation of paths inside a root directory to paths on this host.

Only this module does it, for containers and for set-ups inside them: symbolic links are resolved
inside the root, as a process there would see them, and never lead outside. For the root "/" the
result equals realpath. Safe against hostile links, but not against a process that changes the tree
at the same time. Stateless; any thread.
"""

import os
import stat
from pathlib import Path

from msgspec import Struct

from bootseer.errors import InvalidInputError

# The kernel's limit (MAXSYMLINKS).
_LINKS_MAX = 40


def resolve_in_root(root: Path, path: str | bytes) -> Path:
    """Return the host path of `path` inside `root`; components that do not exist are kept by name.

    Every existing component is resolved, including the last. ".." stops at the root, and a relative
    path begins there. Raises: InvalidInputError for a loop of symbolic links; OSError for a link
    that cannot be read.
    """
    top = os.fsencode(root.absolute()).rstrip(b"/")
    todo = os.fsencode(path).split(b"/")[::-1]
    done: list[bytes] = []
    links = 0
    while todo:
        part = todo.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            if done:
                done.pop()
            continue
        here = b"/".join((top, *done, part))
        try:
            is_link = stat.S_ISLNK(os.lstat(here).st_mode)
        except OSError:
            is_link = False
        if not is_link:
            done.append(part)
            continue
        links += 1
        if links > _LINKS_MAX:
            raise InvalidInputError(
                f"cannot resolve {os.fsdecode(path)} in {root}: too many symbolic links"
            )
        target = os.readlink(here)
        if target.startswith(b"/"):
            done.clear()
        todo.extend(target.split(b"/")[::-1])
    return Path(os.fsdecode(b"/".join((top, *done)) or b"/"))


def find_program(root: Path, name: str, search_path: str, directory: str) -> str | None:
    """Return the absolute path, inside `root`, of the program that a shell would run."""
    if "/" in name:
        candidates = [os.path.join(directory, name)]  # a path of the root, not ours
    else:
        candidates = [
            os.path.join(directory, folder, name) for folder in search_path.split(":") if folder
        ]
    for candidate in candidates:
        try:
            host = resolve_in_root(root, candidate)
            if host.is_file() and os.access(host, os.X_OK):
                return candidate
        except (InvalidInputError, OSError):
            continue  # a shell, too, skips folders that it may not search
    return None


class WorkingDirectory(Struct, frozen=True):
    """Working directory inside a root, for translating a command's paths to host paths."""

    root: Path
    directory: str
    """The directory's path inside the root."""

    def absolute(self, path: str) -> str:
        """Return `path` as an absolute path inside the root."""
        return os.path.join(self.directory, path)  # a path of the root, not ours

    def host(self, path: str) -> Path:
        """Return the path on this host. Raises: as `resolve_in_root`."""
        return resolve_in_root(self.root, os.fsencode(self.absolute(path)))
