"""Mounting of snapshots on their targets: on the host, in a container, in a namespace.

The lower directory of an overlay is a tree that another process keeps: a server of `prefetch`,
which fetches files as they are read (`mount_snapshot`), or the holder of an extracted tree
(`link_snapshot`). The overlay appears on the target in one step, makes it writable, and then gets
its first user. If this process is killed before that, the overlay has no user: the process that
keeps the tree notices the death and unmounts it, or the next run does (`mounted.recover_mounts`).

The caller holds the locks of the targets. Main thread: `enter_own_view` changes the mount
namespace.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, BusyError, CorruptError, from_oserror
from bootseer.fuse.kernel.unmount import detach
from bootseer.linux import namespaces
from bootseer.linux.overlay import copy_directory_attributes, cover_directory
from bootseer.linux.private_files import make_private_directory
from bootseer.linux.processes import ProcessId
from bootseer.prefetch.cache.damage import check_known_damage
from bootseer.prefetch.cache.indexes import read_or_fetch_index
from bootseer.prefetch.serve.plan import ENVIRONMENT, ServeOptions, Serving, begin_serving
from bootseer.served import processes
from bootseer.served.ending import discard_server
from bootseer.served.overlays import overlay_at, overlays, source_of, unmount_overlay
from bootseer.served.service import LINK as HOLDER
from bootseer.served.service import ServiceState, new_service_dir, services_dir
from bootseer.served.users import add_user, is_others_only
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue import (
    admit_tree,
    decline_index,
    find_cut_blob,
    read_encoded_tree,
)
from bootseer.snapshots.manifest import Target
from bootseer.snapshots.mounted import LINK, MOUNT, MountRecord, own_targets, write_record
from bootseer.snapshots.node_trees import NodeTrees
from bootseer.snapshots.scan import text_of
from bootseer.snapshots.staging import Placed, Restoration, is_entered
from bootseer.snapshots.targets import was_empty
from bootseer.store import Store


class _LowerTree(Struct, frozen=True):
    """Tree for the lower directory of an overlay, served by a mount or extracted on the node.

    The process behind `state_dir` keeps the tree for as long as the overlay is mounted.
    """

    state_dir: Path
    """Folder of the mount."""
    tree: Path
    ready_name: str = ""
    """Name for BOOTSEER_READY_SOCKETS; empty unless the start is recorded."""


def _mount_overlays(
    work: Restoration, trees: Sequence[_LowerTree], *, mode: str, until_exit: bool
) -> None:
    """Mount an overlay over one of `trees` on each target of a restore, or on none.

    With `until_exit` the overlays are unmounted when this process ends, otherwise by
    `mounted.unmount_snapshot`. Raises: UnsupportedError and other BootseerErrors.
    """
    with ExitStack() as undo:
        for item, one in zip(work.placed, trees, strict=True):
            record = MountRecord(
                target=str(item.path),
                fingerprint=work.manifest.fingerprint,
                base=work.bases[item.target.path],
                scratch=str(_scratch_of(work.settings, one.state_dir)),
                file_count=item.target.file_count,
                mode=mode,
                ready_name=one.ready_name,
            )

            def note(one: _LowerTree = one, record: MountRecord = record) -> None:
                # Only a folder whose process has started is removed when the mount ends.
                write_record(one.state_dir, record)

            _mount_overlay(
                work, item, one.tree, Path(record.scratch), source_of(one.state_dir.name), note
            )
            undo.callback(_unmount_if_ours, item.path, one.state_dir.name)
        for one in trees:
            # An overlay with a user outlives a failure of this process.
            add_user(one.state_dir, os.getpid() if until_exit else None)
        undo.pop_all()


def _scratch_of(settings: Settings, state_dir: Path) -> Path:
    """Return the folder of a mount's upper directory."""
    return settings.cache_dir / "containers" / state_dir.name


def _mount_overlay(
    work: Restoration,
    item: Placed,
    tree: Path,
    scratch: Path,
    source: str,
    note: Callable[[], None] = lambda: None,
) -> None:
    """Mount an overlay over `tree` on a target; `note` is called right before."""
    try:
        make_private_directory(scratch)
        item.path.mkdir(parents=True, exist_ok=True)
        note()
    except OSError as error:
        raise from_oserror(error, f"prepare the mount on {item.path}") from error
    cover_directory(
        tree,
        item.path,
        scratch,
        is_difference=not item.target.whole,
        deletions=item.target.deletions,
        source=source,
        privileges=work.settings.restore_privileges,
    )


def _unmount_if_ours(path: Path, identity: str) -> None:
    overlay = overlay_at(path)
    if overlay is not None and overlay.id == identity:
        with contextlib.suppress(BootseerError):
            unmount_overlay(overlay)


class MountOutcome(Struct, frozen=True):
    """Result of `mount_snapshot`."""

    moved_bytes: int
    """Bytes that were fetched from the store before the first read."""
    ready_names: tuple[str, ...]
    """Names for BOOTSEER_READY_SOCKETS."""


def record_name_of(target: bytes) -> str:
    """Return the name under which a target's tree is recorded, like the reference of an image.

    Bundles of environments at the same path may serve each other.
    """
    return f"snapshot/{text_of(target).strip('/')}"


def mount_snapshot(
    work: Restoration, *, until_exit: bool, process: processes.Process | None = None
) -> MountOutcome:
    """Mount all targets of a snapshot, or none. The targets can be read when this returns.

    Args:
        work: The restore.
        until_exit: Whether the mounts end with this process.
        process: Server that was started early, for the first target.

    Raises: as `_mount_overlays`.
    """
    settings = work.settings
    with ExitStack() as undo:
        all_serving = []
        for item in work.placed:
            all_serving.append(_begin_serving(settings, item, process))
            process = None
            undo.callback(_give_up, all_serving[-1])
        indexes = []
        for item, serving in zip(work.placed, all_serving, strict=True):
            indexes.append(
                cache_index(settings, work.store, item.target, checks_store=work.checks_store)
            )
            serving.go()
        # Checked here while the servers start, which takes them twice as long.
        for item, index in zip(work.placed, indexes, strict=True):
            admit_tree(item.target, index.data, privileges=settings.restore_privileges)
        for serving in all_serving:
            serving.wait()
        served = [
            _LowerTree(one.plan.state_dir, Path(one.plan.state.directory), one.plan.ready_name)
            for one in all_serving
        ]
        _mount_overlays(work, served, mode=MOUNT, until_exit=until_exit)
        undo.pop_all()
    for one in served:
        # The overlay holds the tree's mount by now.
        with contextlib.suppress(BootseerError):
            detach(one.tree, lazy=True)
    moved = sum(len(index.data) for index in indexes if index.is_fetched)
    return MountOutcome(moved, tuple(one.ready_name for one in served))


class CachedIndex(Struct, frozen=True):
    """Encoded tree of a target, verified against its digest."""

    data: bytes
    is_fetched: bool


def cache_index(
    settings: Settings, store: Store, target: Target, *, checks_store: bool = True
) -> CachedIndex:
    """Bring the target's index into the node's cache, for its server.

    `checks_store`: see `Restoration`. Raises: BootseerError.
    """
    # Damage that is known now would otherwise be an error of the job's reads.
    check_known_damage(settings.cache_dir, store, target.index.digest)
    if checks_store and (blob := find_cut_blob(store, target)):
        raise CorruptError(f"the blob {blob.digest} in {store.url} does not have its size")
    data, is_fetched = read_or_fetch_index(
        settings.cache_dir,
        target.index.digest,
        lambda: read_encoded_tree(store, target, settings),
        run_dir=settings.run_dir,
    )
    if not is_fetched:
        decline_index(settings, target)
    return CachedIndex(data, is_fetched)


def _begin_serving(settings: Settings, item: Placed, process: processes.Process | None) -> Serving:
    """Start to serve the target's tree in a new mount folder. Raises: BootseerError."""
    state_dir = new_service_dir(settings.run_dir, process.identity if process else None)
    tree = state_dir / "tree"
    try:
        make_private_directory(tree)
    except OSError as error:
        raise from_oserror(error, f"prepare the mount of {item.path}") from error
    return begin_serving(
        settings,
        record_name_of(item.target.path),
        item.target.index.digest,
        tree,
        ServeOptions(
            purpose=ENVIRONMENT,
            scratch=str(_scratch_of(settings, state_dir)),
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
    discard_server(serving.plan.state_dir, 0)


Build = Callable[[Target, Tree, Path], object]
"""Function that extracts a target's tree to a path that does not exist, whole or not at all."""


@contextlib.contextmanager
def kept_tree(work: Restoration, target: Target, build: Build) -> Iterator[tuple[Path, int]]:
    """Yield the path of a target's extracted tree and the descriptor of its lock.

    `build` makes the tree where it is missing or damaged. See `NodeTrees.using`.
    """
    tree, _ = work.load(target)
    digest = target.index.digest
    trees = NodeTrees(work.settings)
    is_built = False

    def build_here(path: Path) -> None:
        nonlocal is_built
        is_built = True
        build(target, tree, path)

    with trees.using(digest, tree, build_here) as found:
        if work.settings.fanout and not is_built:
            from bootseer.snapshots.fetch import decline_tree  # here: most starts need none of it

            decline_tree(work.settings, tree)
        yield found


def link_snapshot(work: Restoration, build: Build, *, until_exit: bool) -> None:
    """Mount overlays over extracted trees on all targets of a snapshot, or on none.

    `build` makes the trees that are missing. Raises: as `_mount_overlays`.
    """
    served: list[_LowerTree] = []
    with ExitStack() as undo:
        for item in work.placed:
            with kept_tree(work, item.target, build) as (source, _):
                state_dir = hold(work.settings, item.path, item.target)
            served.append(_LowerTree(state_dir, source))
            undo.callback(discard_server, state_dir, 0)
        _mount_overlays(work, served, mode=LINK, until_exit=until_exit)
        undo.pop_all()


def hold(settings: Settings, path: Path, target: Target | None = None) -> Path:
    """Start the process that keeps an extracted tree for the overlay on `path`.

    Return the folder of the mount. Raises: BootseerError.
    """
    state_dir = new_service_dir(settings.run_dir)
    state = ServiceState(
        id=state_dir.name,
        reference=text_of(target.path if target else os.fsencode(path)),
        index_digest=target.index.digest if target else "",
        workload=settings.workload,
        # `bootseer unmount` finds images by their directory, and this is none.
        directory=str(state_dir / "tree"),
        pid=0,
        started_ns=time.time_ns(),
        purpose=HOLDER,
        scratch=str(_scratch_of(settings, state_dir)),
    )
    process = processes.start(processes.HOLDER, settings.run_dir, identity=state_dir.name)
    from bootseer.snapshots.holder import HolderPlan

    process.tell(HolderPlan(settings, state, state_dir, ProcessId.of(os.getpid())))
    process.wait()
    return state_dir


def link_in_container(work: Restoration, build: Build, scratch: Path) -> None:
    """Mount overlays over extracted trees on all targets in a container's root, or on none.

    The overlays and their upper directories, in the container's folder `scratch`, are removed with
    the container. The job inherits the descriptors of the trees' locks, so that no other process
    removes the trees.

    Raises: UnsupportedError if the kernel has no such overlay; BootseerError.
    """
    locks: list[int] = []
    with ExitStack() as undo:
        for item in work.placed:
            with kept_tree(work, item.target, build) as (source, lock):
                locks.append(os.dup(lock))
                undo.callback(os.close, locks[-1])
                digest = item.target.index.digest
                own = scratch / f"{os.getpid()}-{digest[-16:]}-{len(locks)}"
                _mount_overlay(work, item, source, own, "bootseer")
                undo.callback(namespaces.unmount, item.path)
        for lock in locks:
            # The program that this process becomes holds the lock, too.
            os.set_inheritable(lock, True)
        undo.pop_all()


def enter_own_view(
    settings: Settings, used: Mapping[Path, int], before: Callable[[], None]
) -> None:
    """Enter a mount namespace and mount an overlay there over each of `used`.

    `used` are the targets that other processes use. `before` is called first, to finish the mounts
    that this process needs.

    Raises: BusyError if this is not possible.
    """
    try:
        if threading.current_thread() is not threading.main_thread():
            raise BusyError("only a process's main thread can")
        before()
        if not own_targets:
            namespaces.unshare(namespaces.CLONE_NEWNS)
            # Later mounts of the host, such as an automounter's, appear here, too.
            namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_SLAVE)
        for target in used:
            _mount_own_overlay(settings, target)
            own_targets.add(target)
    except (BootseerError, OSError) as error:
        target, pid = next(iter(used.items()))
        raise BusyError(
            f"{target} is in use by process {pid}, another job on this node, and this set-up would "
            "change it; wait for that job's end, or set up another directory; this job cannot have "
            f"{target} in a mount namespace of its own: {error}"
        ) from error


def _mount_own_overlay(settings: Settings, target: Path) -> None:
    """Mount an overlay over the target's own files, for the writes of this job.

    Overlays of other jobs are unmounted first, in this namespace only.
    """
    is_mounted = _unmount_used(settings, target)
    state_dir = hold(settings, target)
    scratch = _scratch_of(settings, state_dir)
    make_private_directory(scratch)
    lower = target
    if not is_mounted and was_empty(settings.cache_dir, target):
        lower = scratch / "empty"
        lower.mkdir(mode=0o700)
        copy_directory_attributes(target, lower)
    cover_directory(
        lower,
        target,
        scratch,
        is_difference=False,
        deletions=(),
        source=source_of(state_dir.name),
        # These are files of this node, not of a snapshot.
        privileges=True,
    )
    add_user(state_dir, os.getpid())
    if is_entered(target):
        with contextlib.suppress(OSError):
            # The working directory would stay in the directory below the overlay.
            os.chdir(os.getcwd())


def _unmount_used(settings: Settings, target: Path) -> bool:
    """Unmount other jobs' overlays on the target; return whether there were any."""
    folder = services_dir(settings.run_dir)
    is_mounted = False
    while any(one.path == target and is_others_only(folder / one.id) for one in overlays()):
        overlay = overlay_at(target)
        if overlay is None:
            raise BusyError(f"something else is mounted on {target}")
        unmount_overlay(overlay)
        is_mounted = True
    return is_mounted
