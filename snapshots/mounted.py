"""Snapshots shown on their targets by overlays: on the host, in a container, in an own view.

A process keeps the tree below an overlay: a server of `prefetch` that fetches files as they are
read (`mount_snapshot`), or a holder of an extracted tree (`link_snapshot`). The overlay goes onto
the target in one step and makes it writable; then it gets its first user. A process that is killed
before that leaves an overlay without users: the process behind the overlay watches its maker and
takes it off, and so does the next run (`recover_mounts`).

The caller holds the locks of the targets. Main thread: `enter_own_view` changes the mount
namespace.
"""

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import DocumentFormat
from bootseer.blob.tree import Tree
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    from_oserror,
)
from bootseer.fuse.kernel.unmount import detach, is_disconnected
from bootseer.linux import mount_table, namespaces
from bootseer.linux.overlay import copy_directory_attributes, cover_directory
from bootseer.linux.private_files import (
    make_private_directory,
    read_private_file,
    write_private_file,
)
from bootseer.linux.processes import ProcessId
from bootseer.prefetch.cache.indexes import (
    check_known_damage,
    is_damage_known,
    read_or_fetch_index,
)
from bootseer.prefetch.serve.plan import ENVIRONMENT, ServeOptions, Serving, begin_serving
from bootseer.served import processes
from bootseer.served.ending import give_up
from bootseer.served.overlays import Overlay, overlay_at, overlays, source_of, unmount_overlay
from bootseer.served.service import LINK as HOLDER
from bootseer.served.service import (
    ServiceState,
    new_service_dir,
    read_state,
    services_dir,
    wait_released,
)
from bootseer.served.users import (
    add_user,
    is_lingering,
    is_others_only,
    join,
    other_users,
    sweep_overlays,
    unmount_all_unused,
)
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue import admit_tree, find_cut_blob, read_encoded_tree
from bootseer.snapshots.layers import is_opaque
from bootseer.snapshots.manifest import Target
from bootseer.snapshots.staging import OnFinished, Placed, Restoration, is_entered
from bootseer.snapshots.scan import scan, text_of
from bootseer.snapshots.targets import was_empty
from bootseer.snapshots.node_trees import NodeTrees
from bootseer.store import Store

logger = logging.getLogger(__name__)
MOUNT = "mount"
LINK = "link"
_RECORD = "snapshot.json"
_END_S = 10.0


class Mounted(Struct, frozen=True):
    """A target on which a snapshot is mounted, as its mount's folder has it."""

    target: str
    fingerprint: str
    base: str
    """What was there before (`scan.base_digest`)."""
    scratch: str
    """The folder that takes what is written to the mount."""
    file_count: int
    mode: str
    """The mode of restoring (`modes`) that put it there."""
    ready_name: str


_FORM: DocumentFormat[Mounted] = DocumentFormat(type=Mounted, versions=(1,), size_max=64 * 1024)


class _MountedTree(Struct, frozen=True):
    """A tree that is mounted or linked, ready to be shown on a target by an overlay.

    The process behind `state_dir` keeps the tree for as long as the overlay is there.
    """

    state_dir: Path
    """The mount's folder."""
    tree: Path
    ready_name: str = ""
    """The name for BOOTSEER_READY_SOCKETS, where a start is recorded."""


def _cover_all(
    work: Restoration, trees: Sequence[_MountedTree], *, mode: str, until_exit: bool
) -> None:
    """Show `trees` on the targets of a restore. On an error nothing is mounted.

    With `until_exit` the mounts go when this process ends, otherwise they stay until
    `unmount_snapshot`. Raises: UnsupportedError and other BootseerErrors.
    """
    with ExitStack() as undo:
        for item, one in zip(work.placed, trees, strict=True):
            record = Mounted(
                target=str(item.path),
                fingerprint=work.manifest.fingerprint,
                base=work.bases[item.target.path],
                scratch=str(_scratch_of(work.settings, one.state_dir)),
                file_count=item.target.file_count,
                mode=mode,
                ready_name=one.ready_name,
            )

            def note(one: _MountedTree = one, record: Mounted = record) -> None:
                # By now a process lives that will remove the folder.
                write_private_file(one.state_dir / _RECORD, _FORM.encode(record))

            _cover(work, item, one.tree, Path(record.scratch), source_of(one.state_dir.name), note)
            undo.callback(_uncover, item.path, one.state_dir.name)
        for one in trees:
            # From here on it is finished, and stays.
            add_user(one.state_dir, os.getpid() if until_exit else None)
        undo.pop_all()


def _scratch_of(settings: Settings, state_dir: Path) -> Path:
    """Return the folder that takes the writes to a mount."""
    return settings.cache_dir / "containers" / state_dir.name


def _cover(
    work: Restoration,
    item: Placed,
    tree: Path,
    scratch: Path,
    source: str,
    note: Callable[[], None] = lambda: None,
) -> None:
    """Show a tree on a target; `note` is called right before."""
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


def _uncover(path: Path, identity: str) -> None:
    cover = overlay_at(path)
    if cover is not None and cover.id == identity:
        with contextlib.suppress(BootseerError):
            unmount_overlay(cover)


# ---- what is mounted already ------------------------------------------------------------------
def recover_mounts(settings: Settings, hosts: Iterable[Path]) -> None:
    """Take off what dead servers, and runs that were killed, have left on `hosts` or above them.

    Raises: BusyError where something has been mounted on top of it.
    """
    sweep_overlays(settings.run_dir)
    paths = {cover.path for cover in overlays()}
    for path in paths.intersection(above for host in hosts for above in (host, *host.parents)):
        while (cover := overlay_at(path)) is not None:
            state_dir = services_dir(settings.run_dir) / cover.id
            if not state_dir.is_dir() or os.path.isdir(state_dir / "users"):
                break
            logger.warning("taking off %s, left by a run that was killed", path)
            unmount_overlay(cover)


def recover_mounts_from(settings: Settings, hosts: Iterable[Path], error: Exception) -> bool:
    """Call `recover` after a failure on `hosts`, if a server has ended.

    Return False if the failure had another cause. A server that is being killed still holds its
    lock for moments. Raises: as `recover`.
    """
    if not is_disconnected(error):
        return False
    for cover in filter(None, map(overlay_at, hosts)):
        wait_released(services_dir(settings.run_dir) / cover.id, _END_S)
    recover_mounts(settings, hosts)
    return True


class Found(Struct, frozen=True):
    """Cover on a target, and its record."""

    cover: Overlay
    record: Mounted


def find_mounted(settings: Settings, host: Path) -> Found | None:
    """The snapshot that is mounted on `host`, if nothing was written there since but bytecode."""
    cover = overlay_at(host)
    if cover is None:
        return None
    record = _read(settings, cover)
    if record is None or record.target != str(host) or _is_touched(record):
        return None
    return Found(cover, record)


def keep_mounted(settings: Settings, found: Iterable[Found], *, until_exit: bool) -> bool:
    """Keep a mount that `find_mounted` found, for this process as well or for all times.

    Return False if the mount is being removed just now.
    """
    user = os.getpid() if until_exit else None
    return all(
        join(services_dir(settings.run_dir) / one.cover.id, one.cover, user) for one in found
    )


def take_off_lingering(settings: Settings, hosts: Iterable[Path]) -> bool:
    """Unmount the lingering mounts of ended jobs on `hosts`; return whether there were any.

    Raises: BootseerError.
    """
    found = False
    for path in hosts:
        while (cover := overlay_at(path)) and is_lingering(
            services_dir(settings.run_dir) / cover.id
        ):
            unmount_overlay(cover)
            found = True
    return found


def drop_damaged(settings: Settings, found: Iterable[Found]) -> bool:
    """Return whether a mount's server has found its blobs damaged.

    Such mounts are unmounted then, unless other jobs use them.
    """
    is_damaged = False
    for one in found:
        state_dir = services_dir(settings.run_dir) / one.cover.id
        state = read_state(state_dir)
        if state is None or not is_damage_known(settings.cache_dir, state.index_digest):
            continue
        is_damaged = True
        logger.warning("what is mounted on %s is damaged in the store", one.cover.path)
        if not other_users(state_dir):
            unmount_overlay(one.cover)
    return is_damaged


def _read(settings: Settings, cover: Overlay) -> Mounted | None:
    return read_private_file(services_dir(settings.run_dir) / cover.id / _RECORD, _FORM)


def _is_touched(record: Mounted) -> bool:
    """Whether anything but bytecode and the directories above it was written."""
    upper = Path(record.scratch) / "upper"
    try:
        written = scan(upper)
    except BootseerError:
        return True
    return any(
        is_opaque(os.path.join(os.fsencode(upper), path))
        if stat.S_ISDIR(entry.mode)
        else not path.endswith(b".pyc")
        for path, entry in written.items()
        if path
    )


def _way_out(path: Path) -> str:
    """Return advice for a busy mount at `path`: this very process may use it."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
        if f" {path}/" in maps:
            return (
                "the Python that runs this command lies in it: unmount it with --lazy, which takes "
                "effect when this command ends, or with a Bootseer that lies elsewhere"
            )
    return "end the processes that use it, or unmount it with --lazy"


def unmount_snapshot(settings: Settings, directory: Path, *, lazy: bool = False) -> bool:
    """Take the snapshot off `directory`; writes to it are gone. Return whether another is below.

    A set-up that finds its target written to mounts another one on top.

    `lazy`: also while files in it are open; they live on until they are closed.

    Raises: InvalidInputError if none is mounted; BusyError if files in it are open.
    """
    path = mount_table.absolute(directory)
    cover = overlay_at(path)
    if cover is None:
        # It may be called by a symbolic link, as the target was. What is mounted is never a link.
        cover = overlay_at(path.resolve())
    if cover is None:
        raise InvalidInputError(f"no snapshot is mounted on {path}")
    try:
        unmount_overlay(cover, lazy=lazy)
    except BusyError as error:
        raise BusyError(f"{error}; {_way_out(cover.path)}") from error
    if not lazy and not wait_released(services_dir(settings.run_dir) / cover.id, _END_S):
        # It may take a while to make a large cache durable; no caller needs to wait for that.
        logger.info("the server of %s still tidies up", path)
    # That of a job which has ended, and could not take off what lay below another one.
    unmount_all_unused(services_dir(settings.run_dir), cover.path)
    return overlay_at(cover.path) is not None


class MountOutcome(Struct, frozen=True):
    """Result of `mount_snapshot`."""

    moved_bytes: int
    """Bytes that had to come from the store before the first read."""
    ready_names: tuple[str, ...]
    """The names for BOOTSEER_READY_SOCKETS."""


def name_of(target: bytes) -> str:
    """Return the name of a target's tree, in place of an image's reference.

    Bundles of environments at the same path may serve each other.
    """
    return f"snapshot/{text_of(target).strip('/')}"


def mount_snapshot(
    work: Restoration, *, until_exit: bool, process: processes.Process | None = None
) -> MountOutcome:
    """Mount all targets of a snapshot; they work when this returns. See `_cover_all`.

    `process`, if one was begun, serves one of them.
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
            indexes.append(have_index(settings, work.store, item.target))
            serving.go()
        # Meanwhile: half of what a server would take until it can serve.
        for item, index in zip(work.placed, indexes, strict=True):
            admit_tree(item.target, index.data, privileges=settings.restore_privileges)
        for serving in all_serving:
            serving.wait()
        served = [
            _MountedTree(one.plan.state_dir, Path(one.plan.state.directory), one.plan.ready_name)
            for one in all_serving
        ]
        _cover_all(work, served, mode=MOUNT, until_exit=until_exit)
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
    """Bring the target's index into the node's cache, for its server. Raises: BootseerError."""
    # Better known now than at a read of the job.
    check_known_damage(settings.cache_dir, store, target.index.digest)
    if blob := find_cut_blob(store, target):
        raise CorruptError(f"the blob {blob.digest} in {store.url} does not have its size")
    data, is_fetched = read_or_fetch_index(
        settings.cache_dir,
        target.index.digest,
        lambda: read_encoded_tree(store, target),
        run_dir=settings.run_dir,
    )
    return Index(data, is_fetched)


def _begin_serving(settings: Settings, item: Placed, process: processes.Process | None) -> Serving:
    """Begin to serve the target's tree in a new mount folder. Raises: BootseerError."""
    state_dir = new_service_dir(settings.run_dir, process.identity if process else None)
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
    give_up(serving.plan.state_dir, 0)


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
    """Show all targets of a snapshot from extracted trees. See `_cover_all`.

    `build` makes the trees that are missing.
    """
    served: list[_MountedTree] = []
    with ExitStack() as undo:
        for item in work.placed:
            with kept_tree(work, item.target, build) as (source, _):
                state_dir = hold(work.settings, item.path, item.target)
            served.append(_MountedTree(state_dir, source))
            undo.callback(give_up, state_dir, 0)
        _cover_all(work, served, mode=LINK, until_exit=until_exit)
        undo.pop_all()


def hold(settings: Settings, path: Path, target: Target | None = None) -> Path:
    """Start the process that keeps an extracted tree and the overlay on `path`.

    Returns the folder of the mount. Raises: BootseerError.
    """
    state_dir = new_service_dir(settings.run_dir)
    state = ServiceState(
        id=state_dir.name,
        reference=text_of(target.path if target else os.fsencode(path)),
        index_digest=target.index.digest if target else "",
        workload=settings.workload,
        # No image that could be unmounted as one.
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
    """Show all targets of a snapshot in a container's root from extracted trees, or none.

    The overlays and what is written to them go with the container; `scratch` is a folder of its
    own. The job keeps the trees from being removed: it inherits the descriptors of their locks.

    Raises: UnsupportedError where this kernel has no such overlay; BootseerError.
    """
    locks: list[int] = []
    with ExitStack() as undo:
        for item in work.placed:
            with kept_tree(work, item.target, build) as (source, lock):
                locks.append(os.dup(lock))
                undo.callback(os.close, locks[-1])
                digest = item.target.index.digest
                own = scratch / f"{os.getpid()}-{digest[-16:]}-{len(locks)}"
                _cover(work, item, source, own, "bootseer")
                undo.callback(namespaces.unmount, item.path)
        for lock in locks:
            # Also in the program that this process becomes.
            os.set_inheritable(lock, True)
        undo.pop_all()


_own: set[Path] = set()
"""The targets of which this process has a view of its own."""


def shared_targets(targets: Iterable[Path]) -> list[Path]:
    """The host paths that this process sees as every other one of the node does."""
    return [target for target in targets if target not in _own]


def noting_shared(note: OnFinished) -> OnFinished:
    """`note`, but nothing for targets that no other process sees."""

    def save(target: Path, fingerprint: str, base: str, tree_fingerprint: str) -> None:
        if target not in _own:
            note(target, fingerprint, base, tree_fingerprint)

    return save


def enter_own_view(
    settings: Settings, used: Mapping[Path, int], before: Callable[[], None]
) -> None:
    """Enter a mount namespace with an own view of `used`, the targets that other processes use.

    `before` is called before the process enters it: the mounts that it needs must be there.

    Raises: BusyError if that is not possible.
    """
    try:
        if threading.current_thread() is not threading.main_thread():
            raise BusyError("only a process's main thread can")
        before()
        if not _own:
            namespaces.unshare(namespaces.CLONE_NEWNS)
            # What is mounted on the host later, as by an automounter, comes in.
            namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_SLAVE)
        for target in used:
            _cover_own(settings, target)
            _own.add(target)
    except (BootseerError, OSError) as error:
        target, pid = next(iter(used.items()))
        raise BusyError(
            f"{target} is in use by process {pid}, another job on this node, and this set-up would "
            "change it; wait for that job's end, or set up another directory; this job cannot have "
            f"{target} in a mount namespace of its own: {error}"
        ) from error


def _cover_own(settings: Settings, target: Path) -> None:
    """Show what there is without other jobs, with a layer for what this one writes."""
    # Here: no other start needs it.

    is_mounted = _take_off_used(settings, target)
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
        # It shows what is there.
        privileges=True,
    )
    add_user(state_dir, os.getpid())
    if is_entered(target):
        with contextlib.suppress(OSError):
            # This process would stay below.
            os.chdir(os.getcwd())


def _take_off_used(settings: Settings, target: Path) -> bool:
    """Whether another job's mounts were on it."""
    folder = services_dir(settings.run_dir)
    is_mounted = False
    while any(one.path == target and is_others_only(folder / one.id) for one in overlays()):
        cover = overlay_at(target)
        if cover is None:
            raise BusyError(f"something else is mounted on {target}")
        unmount_overlay(cover)
        is_mounted = True
    return is_mounted
