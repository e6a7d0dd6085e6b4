"""Puts a snapshot in place in the way that fits: mounted, linked or extracted.

Alone decides what happens when the chosen way does not work out: it is extracted, with one
warning. The caller holds the locks of the targets and has recovered them.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, CorruptError, NotFoundError, from_oserror
from bootseer.fuse.kernel.mount import DEVICE, can_mount_directly
from bootseer.linux import mount_table
from bootseer.linux.processes import is_in_user_namespace
from bootseer.served.background import ServerProcess
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue.manifest import Manifest, Target
from bootseer.snapshots.restoring import modes
from bootseer.snapshots.restoring.host_paths import is_entered
from bootseer.snapshots.restoring.linking.node_trees import NodeTrees
from bootseer.snapshots.restoring.modes import Choice, Facts
from bootseer.snapshots.restoring.mounting.lazy_mount import mount_snapshot
from bootseer.snapshots.restoring.restore import Placed, fetch_tree, restore
from bootseer.snapshots.restoring.staging import OnFinished
from bootseer.snapshots.targets.tree_fingerprint import fingerprint_of_restored, names_to_record
from bootseer.store import Store

logger = logging.getLogger(__name__)


class Wish(Struct, frozen=True):
    """What the caller wants of a restore, and what it is for."""

    mode: str
    """One of `config.RESTORE_MODES`."""
    until_exit: bool = False
    """Mounts go when this process ends; else they stay until they are unmounted."""
    is_container: bool = False
    """The targets lie in another root than this host's."""
    scratch: Path | None = None
    """A folder that goes with that root; None: nothing can be mounted in there."""
    process: ServerProcess | None = None
    """Serves a mount, if one was begun; its owner ends it where there is none."""


class Restored(Struct, frozen=True):
    """What `restore_by_choice` did."""

    choice: Choice
    moved_bytes: int
    """Bytes that came from the store; for a mount, those that came by now."""
    ready_names: tuple[str, ...] = ()
    """For BOOTSEER_READY_SOCKETS: who sends "ready" there ends the record of a mount."""
    was_here: bool = False
    """Whether the files are a link to those that this node had already."""


def restore_by_choice(
    settings: Settings,
    store: Store,
    manifest: Manifest,
    placed: Sequence[Placed],
    bases: Mapping[bytes, str],
    wish: Wish,
    *,
    on_finished: OnFinished,
    report: Callable[[str], None],
) -> Restored:
    """Put all targets of a snapshot in place, or change nothing; see `restore.restore`.

    Raises: as `restore.restore`.
    """
    try:
        facts = find_facts(settings, manifest, placed, is_container=wish.is_container)
        if wish.is_container and wish.scratch is None:
            facts = replace(facts, may_mount=False)
    except OSError as error:
        raise from_oserror(error, "look at the targets of a restore") from error
    choice = modes.choose(wish.mode, facts)
    warning = ""
    if choice.is_refusal:
        report(f"warning: {choice.sentence()}")
    elif choice.mode != modes.EXTRACT:
        try:
            if choice.mode == modes.MOUNT:
                done = mount_snapshot(
                    settings,
                    store,
                    manifest,
                    placed,
                    bases,
                    until_exit=wish.until_exit,
                    process=wish.process,
                )
                return Restored(choice, done.moved_bytes, done.ready_names)
            return _link(settings, store, manifest, placed, bases, wish, choice, on_finished)
        except (CorruptError, NotFoundError):
            raise  # the snapshot itself
        except BootseerError as error:
            choice = modes.fallback(str(error))
            warning = f"warning: {choice.sentence()}"
            logger.info("%s", warning)

    moved_bytes = sum(item.target.index.size_bytes for item in placed)

    def extract(target: Target, tree: Tree, directory: Path) -> str:
        nonlocal moved_bytes
        recorded = names_to_record(tree) if target.whole and not wish.is_container else b""
        done = fetch_tree(store, target, tree, directory, settings.deadline_s, recorded=recorded)
        moved_bytes += done.moved_bytes
        return fingerprint_of_restored(tree, recorded, done.records)

    restore(
        manifest,
        placed,
        bases,
        store,
        fill=extract,
        on_finished=on_finished,
        privileges=settings.restore_privileges,
    )
    if warning:
        # Only now: where this fails as well, as with a store that is gone, that is the one warning.
        report(warning)
    return Restored(choice, moved_bytes)


def _link(
    settings: Settings,
    store: Store,
    manifest: Manifest,
    placed: Sequence[Placed],
    bases: Mapping[bytes, str],
    wish: Wish,
    choice: Choice,
    on_finished: OnFinished,
) -> Restored:
    """Restores from the node's extracted trees, which are made where they are missing."""
    from bootseer.snapshots.restoring.linking.hard_links import link_tree
    from bootseer.snapshots.restoring.linking.linked import copy_tree
    from bootseer.snapshots.restoring.linking.linked_mount import link_snapshot
    from bootseer.snapshots.restoring.mounting.container_overlay import overlay_snapshot

    trees = NodeTrees(settings)
    moved_bytes = sum(item.target.index.size_bytes for item in placed)
    was_here = True

    def build(target: Target, tree: Tree, directory: Path) -> None:
        nonlocal moved_bytes, was_here
        was_here = False
        moved_bytes += fetch_tree(store, target, tree, directory, settings.deadline_s).moved_bytes

    def fill(target: Target, tree: Tree, directory: Path) -> str:
        def build_one(path: Path) -> None:
            build(target, tree, path)

        if choice.mode == modes.HARDLINK:
            return link_tree(trees, target.index.digest, tree, build_one, directory)
        with trees.using(target.index.digest, tree, build_one) as (source, _):
            copy_tree(source, directory)
        return ""

    if choice.method == modes.OVERLAY and wish.scratch is not None:
        overlay_snapshot(settings, store, trees, placed, wish.scratch, build)
    elif choice.method == modes.OVERLAY:
        link_snapshot(settings, store, manifest, placed, bases, build, until_exit=wish.until_exit)
    else:
        restore(
            manifest,
            placed,
            bases,
            store,
            fill=fill,
            on_finished=on_finished,
            privileges=settings.restore_privileges,
        )
    return Restored(choice, moved_bytes, was_here=was_here)


def find_facts(
    settings: Settings, manifest: Manifest, placed: Sequence[Placed], *, is_container: bool
) -> Facts:
    """Returns the facts that choose the way of restoring a snapshot. Raises: OSError."""
    trees = NodeTrees(settings)
    table = mount_table.mount_points()
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
        lingers=settings.linger_s > 0,
    )


def existing_parent(path: Path) -> Path:
    """The nearest directory at or above `path` that exists."""
    while not path.is_dir():
        path = path.parent
    return path


def _kind_of(directory: Path, table: Sequence[mount_table.MountPoint]) -> bytes:
    device = os.stat(directory).st_dev
    return next((one.kind for one in table if one.device == device), b"")
