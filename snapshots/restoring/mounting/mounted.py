"""Snapshots that are mounted on their targets as overlays, and how long they stay.

Alone owns these steps. A process keeps a target's tree (`served`, `held`); an overlay over it goes
onto the target in one step and makes it writable; then it gets its first user. A process that is
killed before that leaves covers without users: their servers, which watch that process, take them
off, and so does the next run. The caller holds the targets' locks.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import Form
from bootseer.errors import (
    BootseerError,
    BusyError,
    InvalidInputError,
    from_oserror,
)
from bootseer.fuse.kernel.unmount import is_disconnected
from bootseer.linux import mount_table
from bootseer.linux.private_files import (
    make_private_directory,
    read_private_file,
    write_private_file,
)
from bootseer.prefetch.cache.damage import is_damage_known
from bootseer.served.cover_users import (
    add_user,
    join,
    only_lingers,
    other_users,
    sweep_covers,
    take_off_all_unused,
)
from bootseer.served.covers import Cover, cover_at, covers, source_of, uncover
from bootseer.served.folders import mounts_dir, read_state, wait_released
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue.manifest import Manifest
from bootseer.snapshots.restoring.mounting.layers import cover_target
from bootseer.snapshots.restoring.restore import Placed
from bootseer.snapshots.targets.scan import scan
from bootseer.snapshots.targets.upper_layer import is_opaque

logger = logging.getLogger(__name__)

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


_FORM: Form[Mounted] = Form(type=Mounted, versions=(1,), size_max=64 * 1024)


class MountedTree(Struct, frozen=True):
    """A tree that is mounted or linked, ready to be shown on a target by an overlay.

    The process behind `state_dir` keeps the tree for as long as the overlay is there.
    """

    state_dir: Path
    """The mount's folder."""
    tree: Path
    ready_name: str = ""
    """The name for BOOTSEER_READY_SOCKETS, where a start is recorded."""


def cover_all(
    settings: Settings,
    manifest: Manifest,
    placed: Sequence[Placed],
    trees: Sequence[MountedTree],
    bases: Mapping[bytes, str],
    *,
    mode: str,
    until_exit: bool,
) -> None:
    """Shows `trees` on their targets; finished when this returns.

    The caller has found that they fit on what lies there (`bases`). With `until_exit` they go when
    this process ends, otherwise they stay until `unmount_snapshot`. On an error nothing is mounted.
    Raises: UnsupportedError and other BootseerErrors.
    """
    with ExitStack() as undo:
        for item, one in zip(placed, trees, strict=True):
            record = Mounted(
                target=str(item.path),
                fingerprint=manifest.fingerprint,
                base=bases[item.target.path],
                scratch=str(scratch_of(settings, one.state_dir)),
                file_count=item.target.file_count,
                mode=mode,
                ready_name=one.ready_name,
            )
            _cover(item, one, record, privileges=settings.restore_privileges)
            undo.callback(_uncover, item.path, one.state_dir.name)
        for one in trees:
            # From here on it is finished, and stays.
            add_user(one.state_dir, os.getpid() if until_exit else None)
        undo.pop_all()


def scratch_of(settings: Settings, state_dir: Path) -> Path:
    """Returns the folder that takes what is written to a mount."""
    return settings.cache_dir / "containers" / state_dir.name


def _cover(item: Placed, tree: MountedTree, record: Mounted, *, privileges: bool) -> None:
    try:
        # By now a process lives that will remove it.
        make_private_directory(Path(record.scratch))
        item.path.mkdir(parents=True, exist_ok=True)
        write_private_file(tree.state_dir / _RECORD, _FORM.encode(record))
    except OSError as error:
        raise from_oserror(error, f"prepare the mount on {item.path}") from error
    cover_target(
        tree.tree,
        item.path,
        Path(record.scratch),
        is_difference=not item.target.whole,
        deletions=item.target.deletions,
        source=source_of(tree.state_dir.name),
        privileges=privileges,
    )


def _uncover(path: Path, identity: str) -> None:
    cover = cover_at(path)
    if cover is not None and cover.id == identity:
        with contextlib.suppress(BootseerError):
            uncover(cover)


# ---- what is mounted already ------------------------------------------------------------------


def recover(settings: Settings, hosts: Iterable[Path]) -> None:
    """Take off what dead servers, and runs that were killed, have left on `hosts` or above them.

    Raises: BusyError where something has been mounted on top of it.
    """
    sweep_covers(settings.run_dir)
    paths = {cover.path for cover in covers()}
    for path in paths.intersection(above for host in hosts for above in (host, *host.parents)):
        while (cover := cover_at(path)) is not None:
            state_dir = mounts_dir(settings.run_dir) / cover.id
            if not state_dir.is_dir() or os.path.isdir(state_dir / "users"):
                break
            logger.warning("taking off %s, left by a run that was killed", path)
            uncover(cover)


def recover_from(settings: Settings, hosts: Iterable[Path], error: Exception) -> bool:
    """`recover`, after a failure on `hosts`; False where that had another cause than the end of a
    server. One that is being killed still holds its lock for moments. Raises: as `recover`."""
    if not is_disconnected(error):
        return False
    for cover in filter(None, map(cover_at, hosts)):
        wait_released(mounts_dir(settings.run_dir) / cover.id, _END_S)
    recover(settings, hosts)
    return True


class Found(Struct, frozen=True):
    """A cover, and what is known of it."""

    cover: Cover
    record: Mounted


def find_mounted(settings: Settings, host: Path) -> Found | None:
    """The snapshot that is mounted on `host`, if nothing was written there since but bytecode."""
    cover = cover_at(host)
    if cover is None:
        return None
    record = _read(settings, cover)
    if record is None or record.target != str(host) or _is_touched(record):
        return None
    return Found(cover, record)


def keep_mounted(settings: Settings, found: Iterable[Found], *, until_exit: bool) -> bool:
    """Keep what `find_mounted` found for this process, too, or for all times. False where it is
    going just now."""
    user = os.getpid() if until_exit else None
    return all(join(mounts_dir(settings.run_dir) / one.cover.id, one.cover, user) for one in found)


def take_off_lingering(settings: Settings, hosts: Iterable[Path]) -> bool:
    """Take off what lingers on `hosts` since jobs that have ended; whether anything did. Raises:
    BootseerError."""
    found = False
    for path in hosts:
        while (cover := cover_at(path)) and only_lingers(mounts_dir(settings.run_dir) / cover.id):
            uncover(cover)
            found = True
    return found


def drop_damaged(settings: Settings, found: Iterable[Found]) -> bool:
    """Whether a mount's server has found its blobs damaged; such mounts are off then, unless other
    jobs use them."""
    is_damaged = False
    for one in found:
        state_dir = mounts_dir(settings.run_dir) / one.cover.id
        state = read_state(state_dir)
        if state is None or not is_damage_known(settings.cache_dir, state.index_digest):
            continue
        is_damaged = True
        logger.warning("what is mounted on %s is damaged in the store", one.cover.path)
        if not other_users(state_dir):
            uncover(one.cover)
    return is_damaged


def _read(settings: Settings, cover: Cover) -> Mounted | None:
    return read_private_file(mounts_dir(settings.run_dir) / cover.id / _RECORD, _FORM)


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
    """What to do where something at `path` is in use: perhaps by this very process."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
        if f" {path}/" in maps:
            return (
                "the Python that runs this command lies in it: unmount it with --lazy, which takes "
                "effect when this command ends, or with a Bootseer that lies elsewhere"
            )
    return "end the processes that use it, or unmount it with --lazy"


def unmount_snapshot(settings: Settings, directory: Path, *, lazy: bool = False) -> bool:
    """Take the snapshot off `directory`; what was written there is gone. Returns whether another
    one is below it: a set-up that found something written has mounted on top of that.

    `lazy`: also while files in it are open; they live on until they are closed.
    Raises: InvalidInputError where none is mounted; BusyError where files in it are open.
    """
    path = mount_table.absolute(directory)
    cover = cover_at(path)
    if cover is None:
        # It may be called by a symbolic link, as the target was. What is mounted is never a link.
        cover = cover_at(path.resolve())
    if cover is None:
        raise InvalidInputError(f"no snapshot is mounted on {path}")
    try:
        uncover(cover, lazy=lazy)
    except BusyError as error:
        raise BusyError(f"{error}; {_way_out(cover.path)}") from error
    if not lazy and not wait_released(mounts_dir(settings.run_dir) / cover.id, _END_S):
        # It may take a while to make a large cache durable; no caller needs to wait for that.
        logger.info("the server of %s still tidies up", path)
    # That of a job which has ended, and could not take off what lay below another one.
    take_off_all_unused(mounts_dir(settings.run_dir), cover.path)
    return cover_at(cover.path) is not None
