"""Overlays that show a served tree over a directory of the host.

Such an overlay keeps the tree's mount in use: when the overlay goes, in whatever way, the tree's
server ends and cleans up. Only this module recognises these overlays in the table of mounts: their
source names the tree's mount (`source_of`). `users` has the processes that use one. Stateless; acts
on the mount namespace of the caller; any thread.
"""

import logging
import os
from pathlib import Path

from msgspec import Struct

from bootseer.errors import BootseerError, BusyError
from bootseer.linux import mount_table

_log = logging.getLogger(__name__)

_SOURCE = "bootseer-cover:"


class Overlay(Struct, frozen=True):
    """An overlay over a directory, from the table of mounts."""

    path: Path
    id: str
    """Identity of the mount whose tree the overlay shows."""
    is_topmost: bool
    """Whether nothing else is mounted on the overlay."""


def source_of(identity: str) -> str:
    """Return the mount source that marks an overlay as showing mount `identity`."""
    return _SOURCE + identity


def container_source(scratch: Path) -> str:
    """Return the mount source of a container's root that is written to `scratch`."""
    return f"bootseer-container:{scratch.name}"


def parse_overlays(mountinfo: bytes) -> list[Overlay]:
    """Return the overlays in the text of a mountinfo file, oldest first. Pure."""
    lines = list(mount_table.parse_lines(mountinfo))
    # (Number of the mount below, path) of each mount that lies on another. The order of lines does
    # not tell: a mount that propagates from another namespace goes below the present ones.
    covered = {(line.parent, line.path) for line in lines}
    return [
        Overlay(
            Path(os.fsdecode(line.path)),
            line.source.decode("ascii", "replace").removeprefix(_SOURCE),
            (line.number, line.path) not in covered,
        )
        for line in lines
        if line.kind == b"overlay" and line.source.startswith(_SOURCE.encode())
    ]


def overlays() -> list[Overlay]:
    """Return the overlays in this mount namespace, oldest first."""
    return parse_overlays(Path("/proc/self/mountinfo").read_bytes())


def overlay_at(path: Path) -> Overlay | None:
    """Return the topmost overlay on exactly `path` (absolute, without links), or None."""
    return next((one for one in overlays() if one.path == path and one.is_topmost), None)


def unmount_overlay(overlay: Overlay, *, lazy: bool = True) -> None:
    """Unmount an overlay; with `lazy` also if files in it are open, which stay usable until closed.

    Raises: BusyError if something is mounted on it, or open and `lazy` is False; BootseerError.
    """
    if overlay not in overlays():
        return
    if not overlay.is_topmost:
        raise BusyError(f"cannot unmount {overlay.path}: something else is mounted on top of it")
    from bootseer.fuse.kernel.unmount import detach  # here: ctypes; most callers only look

    detach(overlay.path, lazy=lazy)


def unmount_overlays(identity: str) -> None:
    """Unmount every overlay that shows this mount's tree. Never raises."""
    for overlay in reversed(overlays()):
        if overlay.id == identity:
            try:
                unmount_overlay(overlay)
            except BootseerError as error:
                _log.warning("cannot unmount %s: %s", overlay.path, error)
