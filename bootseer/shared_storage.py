"""Whether a folder is on a disk of this node, or where other nodes may have it, too."""

import os
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.store.paths import local_root, split_scheme

# Of file systems that are one node's alone; of others nobody can say.
_LOCAL = frozenset(
    (
        *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "overlay", "ramfs"),
        *("reiserfs", "tmpfs", "vfat", "xfs", "zfs"),
    )
)


def is_of_one_node(store_url: str) -> bool:
    """Whether a store is a folder that no other node can see; False where that is not known."""
    try:
        if split_scheme(store_url) not in ("", "file"):
            return False
        return _file_system_of(local_root(store_url)) in _LOCAL
    except (BootseerError, OSError):
        return False


def _file_system_of(path: Path) -> str:
    """The kind of the mount that `path` is on, or would be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    from bootseer.fuse.kernel.mounting.mounts import mount_points

    device = os.stat(path).st_dev
    kinds = {point.device: os.fsdecode(point.kind) for point in mount_points()}
    if device in kinds:
        return kinds[device]
    # Of btrfs and overlays, files may have other numbers than the mount.
    place = os.fsencode(os.path.realpath(path))
    found = [
        point
        for point in mount_points()
        if place == point.path or place.startswith(point.path.rstrip(b"/") + b"/")
    ]
    return os.fsdecode(max(found, key=lambda point: len(point.path)).kind) if found else ""
