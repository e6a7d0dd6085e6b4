"""What this node allows, and what lies where targets are to be: the facts behind `modes.choose`.

Looks, and changes nothing but a probe file in the node's cache. Stateless; any thread.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from bootseer.fuse.kernel.mounting import mounts
from bootseer.fuse.kernel.mounting.mount import DEVICE, can_mount_directly
from bootseer.linux.processes import is_in_user_namespace
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue.manifest import Manifest
from bootseer.snapshots.restoring.host_paths import is_entered
from bootseer.snapshots.restoring.linking.node_trees import NodeTrees
from bootseer.snapshots.restoring.modes import Facts
from bootseer.snapshots.restoring.restore import Placed


def find_facts(
    settings: Settings, manifest: Manifest, placed: Sequence[Placed], *, is_container: bool
) -> Facts:
    """Returns the facts that choose the way of restoring a snapshot. Raises: OSError."""
    trees = NodeTrees(settings)
    table = mounts.mount_points()
    paths = [item.path for item in placed]
    places = [existing_parent(path) for path in paths]
    return Facts(
        may_mount=can_mount_directly() and not is_in_user_namespace(),
        has_fuse=os.access(DEVICE, os.R_OK | os.W_OK),
        is_container=is_container,
        is_throwaway=all(_kind_of(place, table) == b"overlay" for place in places),
        all_whole=all(item.target.whole for item in placed),
        has_mounts_inside=any(
            one.path.startswith(os.fsencode(path) + b"/") for path in paths for one in table
        ),
        is_entered=not is_container and any(map(is_entered, paths)),
        has_trees=all(trees.has(item.target.index.digest) for item in placed),
        can_reflink=all(trees.can_reflink_to(place) for place in places),
        can_hard_link=all(trees.can_link_to(place) for place in places),
        target_count=len(placed),
        file_count=manifest.file_count,
        content_bytes=manifest.content_bytes,
    )


def existing_parent(path: Path) -> Path:
    """The nearest directory at or above `path` that exists."""
    while not path.is_dir():
        path = path.parent
    return path


def _kind_of(directory: Path, table: Sequence[mounts.MountPoint]) -> bytes:
    device = os.stat(directory).st_dev
    return next((one.kind for one in table if one.device == device), b"")
