"""Overlays that cover a directory of the host with a served tree.

Such an overlay holds the tree's mount: when it goes, however it goes, the tree's server ends and
cleans up. Alone owns how one is recognised in the table of mounts: its source names the tree's
mount (`folders`). Who uses it is in `cover_users`.
Stateless; acts on the mount namespace of the caller; any thread.
"""

import logging
import os
from pathlib import Path

from msgspec import Struct

from bootseer.errors import BootseerError, BusyError
from bootseer.fuse.kernel.unmount import detach
from bootseer.linux import mount_table

_log = logging.getLogger(__name__)

_SOURCE = "bootseer-cover:"


class Cover(Struct, frozen=True):
    """One overlay, as the table of mounts has it."""

    path: Path
    id: str
    """The identity of the mount whose tree it shows."""
    is_topmost: bool
    """Nothing else is mounted on it."""


def source_of(identity: str) -> str:
    """What to give as the source of an overlay over the mount of this identity."""
    return _SOURCE + identity


def container_source(scratch: Path) -> str:
    """What to give as the source of a container's root that is written to `scratch`."""
    return f"bootseer-container:{scratch.name}"


def parse_covers(mountinfo: bytes) -> list[Cover]:
    """The covers in the text of a mountinfo file, oldest first. Pure."""
    lines = list(mount_table.parse_lines(mountinfo))
    # The path of each mount that lies on another one, with that one's number. Their order does not
    # tell: what comes in from another namespace lies below what is there already.
    covered = {(line.parent, line.path) for line in lines}
    return [
        Cover(
            Path(os.fsdecode(line.path)),
            line.source.decode("ascii", "replace").removeprefix(_SOURCE),
            (line.number, line.path) not in covered,
        )
        for line in lines
        if line.kind == b"overlay" and line.source.startswith(_SOURCE.encode())
    ]


def covers() -> list[Cover]:
    """The covers in this mount namespace, oldest first."""
    return parse_covers(Path("/proc/self/mountinfo").read_bytes())


def cover_at(path: Path) -> Cover | None:
    """What covers exactly `path`, which is absolute and without symbolic links, if one does."""
    return next((one for one in covers() if one.path == path and one.is_topmost), None)


def uncover(cover: Cover, *, lazy: bool = True) -> None:
    """Take a cover off; `lazy` also while files in it are open (they live on until closed).

    Raises: BusyError where something lies on top of it, or is open and `lazy` is False;
    BootseerError.
    """
    if cover not in covers():
        return
    if not cover.is_topmost:
        raise BusyError(f"cannot unmount {cover.path}: something else is mounted on top of it")
    detach(cover.path, lazy=lazy)


def uncover_all(identity: str) -> None:
    """Take off whatever covers anything with this mount's tree. Never raises."""
    for cover in reversed(covers()):
        if cover.id == identity:
            try:
                uncover(cover)
            except BootseerError as error:
                _log.warning("cannot take a dead mount off %s: %s", cover.path, error)
