"""The layers of a root that is an overlay, and how the upper one tells what was written.

Alone knows what overlayfs leaves in an upper directory (Documentation/filesystems/overlayfs.rst in
Linux): copies of what was changed, whiteouts, and attributes of directories. Reads only, and
follows no symbolic links. Stateless; any thread.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from bootseer.blob.tree import Tree

# The second where an ordinary user mounted it ("userxattr").
_PREFIXES = ("trusted.overlay.", "user.overlay.")
# Those that do not make what a directory shows differ from what layers of the same path hold.
_HARMLESS = {"opaque", "origin", "impure", "nlink", "upper", "uuid", "protattr"}


class CannotTellError(Exception):
    """What was written cannot be told by the layers; a scan tells."""


class Layers(Struct, frozen=True):
    """The overlay that a container's root is."""

    root: Path
    """The directory on which the overlay is mounted."""
    upper: Path
    """What was written since, by whomever."""
    lower: Path
    """What it showed at first. It is not written to."""
    tree: Callable[[], Tree] | None = None
    """What is in `lower`, for whom it costs less than asking its file system. May raise a
    BootseerError."""


class Written(NamedTuple):
    """One name in an upper directory."""

    mode: int
    uid: int
    gid: int
    inode: int
    ctime_ns: int
    """0 for a directory: it moves with what is in it."""
    is_opaque: bool = False
    """Nothing of the lower directory shows."""
    is_empty: bool = False
    """A directory without anything, ignored names included."""


WHITEOUT = Written(stat.S_IFCHR, 0, 0, 0, 0)
"""The name is gone. Overlayfs makes all of these one file, which any of them changes."""


def check_directory(upper: bytes) -> None:
    """Whether what is not in this upper directory shows from the lower one of the same path.

    Raises: CannotTellError where it may not: where a directory was renamed ("redirect"), or by an
    attribute of another kernel's; OSError.
    """
    for name in _attributes(upper):
        for prefix in _PREFIXES:
            if name.startswith(prefix) and name.removeprefix(prefix) not in _HARMLESS:
                raise CannotTellError(f"{os.fsdecode(upper)} has the attribute {name}")


def _attributes(path: bytes) -> list[str]:
    return os.listxattr(path, follow_symlinks=False)


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(directory: bytes) -> bool:
    """Whether a directory stands in for a deleted one: nothing of the lower directory shows. False
    where it cannot be read."""
    for prefix in _PREFIXES:
        with contextlib.suppress(OSError):
            if os.getxattr(directory, f"{prefix}opaque", follow_symlinks=False) == b"y":
                return True
    return False


def written(
    upper: Path, is_ignored: Callable[[bytes], bool], *, names_max: int
) -> tuple[dict[bytes, Written], bool]:
    """Path -> what was written there, but for what is ignored and what is below that; and whether
    that is all: no more than about `names_max` are looked at. Parents come before what is in them.

    What goes while we look is left out.
    """
    top = os.fsencode(upper)
    found: dict[bytes, Written] = {}
    stack = [b""]
    while stack:
        if len(found) > names_max:
            return found, False
        above = stack.pop()
        names = 0
        for path, info in _entries(top, above):
            names += 1
            if is_ignored(path):
                continue
            if stat.S_ISDIR(info.st_mode):
                opaque = is_opaque(os.path.join(top, path))
                found[path] = Written(
                    info.st_mode, info.st_uid, info.st_gid, info.st_ino, 0, is_opaque=opaque
                )
                stack.append(path)
            elif _is_whiteout(info):
                found[path] = WHITEOUT
            else:
                found[path] = Written(
                    info.st_mode, info.st_uid, info.st_gid, info.st_ino, info.st_ctime_ns
                )
        if not names and above:
            found[above] = found[above]._replace(is_empty=True)
    return found, True


def _entries(top: bytes, above: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    try:
        with os.scandir(os.path.join(top, above)) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    path = above + b"/" + entry.name if above else entry.name
                    yield path, entry.stat(follow_symlinks=False)
    except OSError:
        return
