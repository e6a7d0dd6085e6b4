"""Snapshots whose files are fetched as they are read: their trees, served as images are.

Alone owns the order of these steps: each target gets a server of its own (`prefetch`), which serves
the snapshot's tree in the mount's folder; the trees are shown on the targets (`mounted`); then
their own mount points go, so that the overlays alone hold them. The caller holds the locks.
"""

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path

from msgspec import Struct

from bootseer.errors import BootseerError, CorruptError, from_oserror
from bootseer.fuse.kernel.unmount import detach
from bootseer.linux.private_files import make_private_directory
from bootseer.prefetch.cache.damage import check_known_damage
from bootseer.prefetch.cache.kept_indexes import keep_index, read_index
from bootseer.prefetch.serve.serve_plan import ENVIRONMENT, ServeOptions
from bootseer.prefetch.serve.start_server import Serving, begin_serving
from bootseer.served.background import ServerProcess
from bootseer.served.ending import give_up
from bootseer.served.folders import new_mount_dir
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue.admission import admit_tree
from bootseer.snapshots.catalogue.catalogue import decode_tree, find_cut_blob, read_encoded_tree
from bootseer.snapshots.catalogue.manifest import Manifest, Target
from bootseer.snapshots.restoring import modes
from bootseer.snapshots.restoring.mounting.mounted import MountedTree, cover_all, scratch_of
from bootseer.snapshots.restoring.restore import Placed
from bootseer.snapshots.targets.paths import text_of
from bootseer.store import Store

logger = logging.getLogger(__name__)


class MountOutcome(Struct, frozen=True):
    """What `mount_snapshot` did."""

    moved_bytes: int
    """Bytes that had to come from the store before the first read."""
    ready_names: tuple[str, ...]
    """The names for BOOTSEER_READY_SOCKETS."""


def name_of(target: bytes) -> str:
    """What a target's tree is called where images have references: bundles of environments at the
    same path may serve each other."""
    return f"snapshot/{text_of(target).strip('/')}"


def mount_snapshot(
    settings: Settings,
    store: Store,
    manifest: Manifest,
    placed: Sequence[Placed],
    bases: Mapping[bytes, str],
    *,
    until_exit: bool,
    process: ServerProcess | None = None,
) -> MountOutcome:
    """Mount all targets of a snapshot; they work when this returns. See `mounted.cover_all`.

    `process`, if one was begun, serves one of them."""
    with ExitStack() as undo:
        all_serving = []
        for item, begun in zip(placed, [process, *repeat(None, len(placed) - 1)], strict=True):
            all_serving.append(_begin_serving(settings, item, begun))
            undo.callback(_give_up, all_serving[-1])
        indexes = []
        for item, serving in zip(placed, all_serving, strict=True):
            indexes.append(have_index(settings, store, item.target))
            serving.go()
        # Meanwhile: half of what a server would take until it can serve.
        for item, index in zip(placed, indexes, strict=True):
            tree = decode_tree(item.target, index.data)
            admit_tree(item.target, tree, privileges=settings.restore_privileges)
        for serving in all_serving:
            serving.wait()
        served = [
            MountedTree(one.plan.state_dir, Path(one.plan.state.directory), one.plan.ready_name)
            for one in all_serving
        ]
        cover_all(
            settings, manifest, placed, served, bases, mode=modes.MOUNT, until_exit=until_exit
        )
        undo.pop_all()
    for one in served:
        # The overlay has a mount of its own by now.
        with contextlib.suppress(BootseerError):
            detach(one.tree, lazy=True)
    moved = sum(len(index.data) for index in indexes if index.is_fetched)
    return MountOutcome(moved, tuple(one.ready_name for one in served))


class Index(Struct, frozen=True):
    """The encoded tree of a target."""

    data: bytes
    """Verified against its digest."""
    is_fetched: bool


def have_index(settings: Settings, store: Store, target: Target) -> Index:
    """Have the target's index where its server looks for it. Raises: BootseerError."""
    # Better known now than at a read of the job.
    check_known_damage(settings.cache_dir, store, target.index.digest)
    if blob := find_cut_blob(store, target):
        raise CorruptError(f"the blob {blob.digest} in {store.url} does not have its size")
    digest = target.index.digest
    with contextlib.suppress(BootseerError):
        # A damaged copy is no fault of the snapshot's.
        return Index(
            read_index(settings.cache_dir, digest, run_dir=settings.run_dir), is_fetched=False
        )
    data = read_encoded_tree(store, target)
    keep_index(settings.cache_dir, digest, data, run_dir=settings.run_dir)
    return Index(data, is_fetched=True)


def _begin_serving(settings: Settings, item: Placed, process: ServerProcess | None) -> Serving:
    """Have the target's tree served in a new mount folder. Raises: BootseerError."""
    state_dir = new_mount_dir(settings.run_dir, process.identity if process else None)
    tree = state_dir / "tree"
    try:
        make_private_directory(tree)
    except OSError as error:
        raise from_oserror(error, f"prepare the mount of {item.path}") from error
    return begin_serving(
        settings,
        name_of(item.target.path),
        item.target.index.digest,
        tree,
        ServeOptions(
            purpose=ENVIRONMENT,
            scratch=str(scratch_of(settings, state_dir)),
            watch_pid=os.getpid(),
            checks_index=False,
        ),
        state_dir=state_dir,
        process=process,
    )


def _give_up(serving: Serving) -> None:
    """End a server whose tree is not needed. Never raises."""
    with contextlib.suppress(BootseerError):
        serving.wait()
    give_up(serving.plan.state_dir, 0)
