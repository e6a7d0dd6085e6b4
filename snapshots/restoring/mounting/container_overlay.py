"""Shows a snapshot in an image's root as an overlay over this node's extracted tree.

Alone owns the order of these steps. The overlays are in the mount namespace of a container, and go
with it; so does what is written to them. The job keeps the trees from being removed: it inherits
the descriptors of their locks.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bootseer.blob.tree import Tree
from bootseer.errors import from_oserror
from bootseer.linux import namespaces
from bootseer.linux.private_files import make_private_directory
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue.admission import admit_tree
from bootseer.snapshots.catalogue.catalogue import load_tree
from bootseer.snapshots.catalogue.manifest import Target
from bootseer.snapshots.restoring.linking.node_trees import NodeTrees
from bootseer.snapshots.restoring.mounting.layers import cover_target
from bootseer.snapshots.restoring.restore import Placed
from bootseer.store import Store

Build = Callable[[Target, Tree, Path], None]
"""Extracts a target's tree to a path that does not exist, whole or not at all."""


def overlay_snapshot(
    settings: Settings,
    store: Store,
    trees: NodeTrees,
    placed: Sequence[Placed],
    scratch: Path,
    build: Build,
) -> None:
    """Mount all targets of a snapshot, or none. `scratch`: where what is written goes, a folder of
    the container's own.

    Raises: UnsupportedError where this kernel has no such overlay; BootseerError.
    """
    locks: list[int] = []
    privileges = settings.restore_privileges
    with ExitStack() as undo:
        for item in placed:
            target = item.target
            tree = load_tree(store, target)
            admit_tree(target, tree, privileges=privileges)
            digest = target.index.digest

            def build_one(path: Path, target: Target = target, tree: Tree = tree) -> None:
                build(target, tree, path)

            with trees.using(digest, tree, build_one) as (source, lock):
                locks.append(os.dup(lock))
                undo.callback(os.close, locks[-1])
                own = scratch / f"{os.getpid()}-{digest[-16:]}-{len(locks)}"
                _cover(item, source, own, privileges=privileges)
                undo.callback(namespaces.unmount, item.path)
        for lock in locks:
            # Also in the program that this process becomes.
            os.set_inheritable(lock, True)
        undo.pop_all()


def _cover(item: Placed, source: Path, scratch: Path, *, privileges: bool) -> None:
    try:
        make_private_directory(scratch)
        item.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_oserror(error, f"prepare the mount on {item.path}") from error
    cover_target(
        source,
        item.path,
        scratch,
        is_difference=not item.target.whole,
        deletions=item.target.deletions,
        source="bootseer",
        privileges=privileges,
    )
