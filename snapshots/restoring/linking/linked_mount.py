"""Snapshots that are shown as overlays over the node's extracted trees.

Alone owns the order of these steps: each target's tree gets a process that keeps it (`hold`), then
the trees are shown on the targets (`mounted`). The caller holds the locks.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bootseer.base.documents import to_line
from bootseer.blob.tree import Tree
from bootseer.linux.processes import ProcessId
from bootseer.served.background import begin_server
from bootseer.served.ending import give_up
from bootseer.served.folders import LINK, MountState, new_mount_dir
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue.admission import admit_tree
from bootseer.snapshots.catalogue.catalogue import load_tree
from bootseer.snapshots.catalogue.manifest import Manifest, Target
from bootseer.snapshots.restoring import modes
from bootseer.snapshots.restoring.linking.linked_holder import HolderPlan
from bootseer.snapshots.restoring.linking.node_trees import NodeTrees
from bootseer.snapshots.restoring.mounting.mounted import MountedTree, cover_all, scratch_of
from bootseer.snapshots.restoring.restore import Placed
from bootseer.snapshots.targets.paths import text_of
from bootseer.store import Store

Build = Callable[[Target, Tree, Path], None]
"""Extracts a target's tree to a path that does not exist, whole or not at all."""


def link_snapshot(
    settings: Settings,
    store: Store,
    manifest: Manifest,
    placed: Sequence[Placed],
    bases: Mapping[bytes, str],
    build: Build,
    *,
    until_exit: bool,
) -> None:
    """Show all targets of a snapshot from extracted trees, which `build` makes where they are
    missing. See `mounted.cover_all`."""
    trees = NodeTrees(settings)
    served: list[MountedTree] = []
    with ExitStack() as undo:
        for item in placed:
            tree = load_tree(store, item.target)
            admit_tree(item.target, tree, privileges=settings.restore_privileges)

            def build_one(path: Path, target: Target = item.target, tree: Tree = tree) -> None:
                build(target, tree, path)

            with trees.using(item.target.index.digest, tree, build_one) as (source, _):
                state_dir = hold(settings, item.path, item.target)
            served.append(MountedTree(state_dir, source))
            undo.callback(give_up, state_dir, 0)
        cover_all(settings, manifest, placed, served, bases, mode=modes.LINK, until_exit=until_exit)
        undo.pop_all()


def hold(settings: Settings, path: Path, target: Target | None = None) -> Path:
    """Start the process that keeps the extracted tree of a target, if any, and what is written to
    the overlay on `path`; its folder. Raises: BootseerError."""
    state_dir = new_mount_dir(settings.run_dir)
    state = MountState(
        id=state_dir.name,
        reference=text_of(target.path if target else os.fsencode(path)),
        index_digest=target.index.digest if target else "",
        workload=settings.workload,
        # No image that could be unmounted as one.
        directory=str(state_dir / "tree"),
        pid=0,
        started_ns=time.time_ns(),
        purpose=LINK,
        scratch=str(scratch_of(settings, state_dir)),
    )
    process = begin_server(
        settings.run_dir,
        "bootseer.snapshots.restoring.linking.linked_holder",
        f"the holder of {path}",
        identity=state_dir.name,
    )
    process.serve(to_line(HolderPlan(settings, state, state_dir, ProcessId.of(os.getpid()))))
    return state_dir
