"""The kernel's table of mounts (/proc/self/mountinfo).

Mounts are looked up here rather than touched, since a stat of a stuck FUSE mount hangs and cannot
be killed. Stateless; any thread.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

# Compiled when they are needed, since every start with a store in a folder loads this module.
_ESCAPED = rb"\\([0-7]{3})"
_USER = rb"\buser_id=(\d+)"


class FuseMount(Struct, frozen=True):
    """A FUSE mount in the mount namespace of this process."""

    path: Path
    device_minor: int
    """Number of the connection: `/sys/fs/fuse/connections/<device_minor>`."""
    subtype: str
    name: str
    read_only: bool
    user: int = 0
    """User id of the user who mounted it."""


class MountInfoLine(NamedTuple):
    """A line of a mountinfo file."""

    number: bytes
    parent: bytes
    major: int
    minor: int
    path: bytes
    options: list[bytes]
    kind: bytes
    source: bytes
    super_options: bytes


def _unescape(field: bytes) -> bytes:
    if b"\\" not in field:
        return field
    return re.sub(_ESCAPED, lambda m: bytes([int(m[1], 8)]), field)


def parse_lines(text: bytes) -> Iterator[MountInfoLine]:
    """Parse the text of a mountinfo file, oldest mount first. Pure."""
    for line in text.splitlines():
        # id parent major:minor root mountpoint options optional... - type source super-options
        fields, _, rest = line.partition(b" - ")
        head, tail = fields.split(b" "), rest.split(b" ")
        if len(head) < 6 or len(tail) < 3:
            continue
        major, _, minor = head[2].partition(b":")
        numbers = (head[0], head[1], int(major), int(minor))
        yield MountInfoLine(*numbers, _unescape(head[4]), head[5].split(b","), *tail[:3])


def parse_mountinfo(text: bytes) -> Iterator[FuseMount]:
    """Yield the FUSE mounts in the text of a mountinfo file, oldest first. Pure."""
    for line in parse_lines(text):
        kind, _, subtype = line.kind.partition(b".")
        if kind == b"fuse":
            user = re.search(_USER, line.super_options)
            yield FuseMount(
                path=Path(os.fsdecode(line.path)),
                device_minor=line.minor,
                subtype=os.fsdecode(_unescape(subtype)),
                name=os.fsdecode(_unescape(line.source)),
                read_only=b"ro" in line.options,
                user=int(user[1]) if user else 0,
            )


class MountPoint(NamedTuple):
    """A mount of any file system."""

    path: bytes
    device: int
    """Equal to `st_dev` of most files in it; some file systems give files other numbers."""
    kind: bytes


def parse_mount_points(text: bytes) -> list[MountPoint]:
    """Return all mounts in the text of a mountinfo file, oldest first. Pure."""
    return [
        MountPoint(line.path, os.makedev(line.major, line.minor), line.kind)
        for line in parse_lines(text)
    ]


def mount_points() -> list[MountPoint]:
    """Return all mounts of this mount namespace, oldest first. Raises: OSError."""
    return parse_mount_points(Path("/proc/self/mountinfo").read_bytes())


def fuse_mounts() -> list[FuseMount]:
    """Return the FUSE mounts of this mount namespace, oldest first."""
    return list(parse_mountinfo(Path("/proc/self/mountinfo").read_bytes()))


def find_mounts(subtype_prefix: str) -> list[FuseMount]:
    """Return the FUSE mounts whose subtype starts with `subtype_prefix`, oldest first."""
    return [mount for mount in fuse_mounts() if mount.subtype.startswith(subtype_prefix)]


def absolute(path: Path) -> Path:
    """Return `path` as mountinfo spells it, without touching the last component, which may hang."""
    # Path.resolve() would stat it.
    parent, name = os.path.split(os.path.abspath(path))
    return Path(os.path.realpath(parent)) / name if name else Path(parent)


def find_mount(path: Path) -> FuseMount | None:
    """Return the topmost FUSE mount on exactly `path`; None if another mount hides it.

    After a mount namespace has got another /tmp, mounts in the old one are still listed.
    """
    wanted = absolute(path)
    text = Path("/proc/self/mountinfo").read_bytes()
    found = [mount for mount in parse_mountinfo(text) if mount.path == wanted]
    return found[-1] if found and not is_hidden(text, os.fsencode(wanted)) else None


def is_hidden(text: bytes, path: bytes) -> bool:
    """Return whether a mount above `path` hides the mount on `path`, by a mountinfo file. Pure."""
    lines = {line.number: line for line in parse_lines(text)}
    beside = list(lines.values())
    below = next((line for line in reversed(beside) if line.path == path), None)
    while below is not None:
        above = {one.path for one in beside if one.parent == below.parent} - {below.path}
        if any(below.path.startswith(path.rstrip(b"/") + b"/") for path in above):
            return True
        below = lines.pop(below.parent, None)
    return False
