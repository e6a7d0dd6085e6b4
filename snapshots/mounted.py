"""Snapshots that are mounted on their targets: found, kept, recovered and unmounted.

`mounting` makes the overlays. Each has the folder of a service, with the record of its snapshot
there. An overlay whose server died, or that has no user since the run that mounted it was killed,
is unmounted by the next run (`recover_mounts`). A start that finds its environment mounted loads
this module and not `mounting`.

The caller holds the locks of the targets. Any thread.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import DocumentFormat
from bootseer.errors import BootseerError, BusyError, InvalidInputError
from bootseer.linux import mount_table
from bootseer.linux.private_files import read_private_file, write_private_file
from bootseer.prefetch.cache.damage import is_damage_known
from bootseer.served.overlays import Overlay, overlay_at, overlays, unmount_overlay
from bootseer.served.service import is_lingering, read_state, services_dir, wait_released
from bootseer.served.users import join, other_users, sweep_overlays, unmount_all_unused
from bootseer.settings.config import Settings
from bootseer.snapshots.layers import is_opaque
from bootseer.snapshots.scan import scan
from bootseer.snapshots.staging import OnFinished

logger = logging.getLogger(__name__)
MOUNT = "mount"
LINK = "link"
_RECORD = "snapshot.json"
_END_S = 10.0


class MountRecord(Struct, frozen=True):
    """Record of a snapshot that is mounted on a target, in the mount's folder."""

    target: str
    fingerprint: str
    base: str
    """Digest of the former contents of the target (`scan.base_digest`)."""
    scratch: str
    """Folder of the overlay's upper directory."""
    file_count: int
    mode: str
    """MOUNT or LINK."""
    ready_name: str


_FORM: DocumentFormat[MountRecord] = DocumentFormat(type=MountRecord, version=1, size_max=64 * 1024)


def write_record(state_dir: Path, record: MountRecord) -> None:
    """Write the record of a mount into its folder. Raises: OSError."""
    write_private_file(state_dir / _RECORD, _FORM.encode(record))


def recover_mounts(settings: Settings, hosts: Iterable[Path]) -> None:
    """Unmount overlays of dead servers and of killed runs on `hosts` and the directories above.

    Raises: BusyError if something else is mounted on top of one.
    """
    sweep_overlays(settings.run_dir)
    paths = {overlay.path for overlay in overlays()}
    for path in paths.intersection(above for host in hosts for above in (host, *host.parents)):
        while (overlay := overlay_at(path)) is not None:
            state_dir = services_dir(settings.run_dir) / overlay.id
            if not state_dir.is_dir() or os.path.isdir(state_dir / "users"):
                break
            logger.warning("unmounting %s, left by a run that was killed", path)
            unmount_overlay(overlay)


def recover_mounts_from(settings: Settings, hosts: Iterable[Path], error: Exception) -> bool:
    """Call `recover_mounts` if `error` on `hosts` shows that a server has ended.

    Return False if it does not. A killed server still holds its lock for a moment, so this waits
    until the lock is free. Raises: as `recover_mounts`.
    """
    from bootseer.fuse.kernel.unmount import is_disconnected  # here: it loads ctypes

    if not is_disconnected(error):
        return False
    for overlay in filter(None, map(overlay_at, hosts)):
        wait_released(services_dir(settings.run_dir) / overlay.id, _END_S)
    recover_mounts(settings, hosts)
    return True


class MountedSnapshot(Struct, frozen=True):
    """Overlay on a target, and its record."""

    overlay: Overlay
    record: MountRecord


def find_mounted(settings: Settings, host: Path) -> MountedSnapshot | None:
    """Return the snapshot that is mounted on `host`, or None.

    None also if anything but bytecode was written there.
    """
    overlay = overlay_at(host)
    if overlay is None:
        return None
    folder = services_dir(settings.run_dir) / overlay.id
    record = read_private_file(folder / _RECORD, _FORM)
    if record is None or record.target != str(host) or _is_changed(record):
        return None
    return MountedSnapshot(overlay, record)


def keep_mounted(
    settings: Settings, mounted: Iterable[MountedSnapshot], *, until_exit: bool
) -> bool:
    """Make this process a user of the mounts; without `until_exit` they stay until unmounted.

    Return False if one of them is being unmounted at the moment.
    """
    user = os.getpid() if until_exit else None
    folder = services_dir(settings.run_dir)
    return all(join(folder / one.overlay.id, one.overlay, user) for one in mounted)


def unmount_lingering(settings: Settings, hosts: Iterable[Path]) -> bool:
    """Unmount the lingering mounts of ended jobs on `hosts`; return whether there were any.

    Raises: BootseerError.
    """
    found = False
    for path in hosts:
        while (overlay := overlay_at(path)) and is_lingering(
            services_dir(settings.run_dir) / overlay.id
        ):
            unmount_overlay(overlay)
            found = True
    return found


def unmount_damaged(settings: Settings, mounted: Iterable[MountedSnapshot]) -> bool:
    """Return whether a server has found the blobs of its snapshot damaged.

    Unmounts such snapshots, unless other jobs use them.
    """
    is_damaged = False
    for one in mounted:
        state_dir = services_dir(settings.run_dir) / one.overlay.id
        state = read_state(state_dir)
        if state is None or not is_damage_known(settings.cache_dir, state.index_digest):
            continue
        is_damaged = True
        logger.warning("the snapshot mounted on %s is damaged in the store", one.overlay.path)
        if not other_users(state_dir):
            unmount_overlay(one.overlay)
    return is_damaged


def _is_changed(record: MountRecord) -> bool:
    """Return whether anything but bytecode and the directories above it was written."""
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


def _busy_advice(path: Path) -> str:
    """Return advice for a mount at `path` that is in use, perhaps by this process."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
        if f" {path}/" in maps:
            return (
                "the Python that runs this command lies in it: unmount it with --lazy, which takes "
                "effect when this command ends, or with a Bootseer that lies elsewhere"
            )
    return "end the processes that use it, or unmount it with --lazy"


def unmount_snapshot(settings: Settings, directory: Path, *, lazy: bool = False) -> bool:
    """Unmount the snapshot on `directory` and drop what was written to it.

    Return whether another snapshot is mounted below: a set-up whose target was written to mounts
    its snapshot on top.

    `lazy`: unmount even if files in the snapshot are open; they stay usable until they are closed.

    Raises: InvalidInputError if no snapshot is mounted; BusyError if files in it are open.
    """
    path = mount_table.absolute(directory)
    overlay = overlay_at(path)
    if overlay is None:
        # `directory` may be a symbolic link, as the target was. A mount point never is.
        overlay = overlay_at(path.resolve())
    if overlay is None:
        raise InvalidInputError(f"no snapshot is mounted on {path}")
    try:
        unmount_overlay(overlay, lazy=lazy)
    except BusyError as error:
        raise BusyError(f"{error}; {_busy_advice(overlay.path)}") from error
    if not lazy and not wait_released(services_dir(settings.run_dir) / overlay.id, _END_S):
        # To make a large cache durable may take a while; no caller needs to wait for that.
        logger.info("the server of %s is still saving its cache", path)
    # Snapshots of ended jobs, which could not be unmounted while this one was on top.
    unmount_all_unused(services_dir(settings.run_dir), overlay.path)
    return overlay_at(overlay.path) is not None


own_targets: set[Path] = set()
"""Targets that this process sees in its own mount namespace, unlike other processes."""


def shared_targets(targets: Iterable[Path]) -> list[Path]:
    """Return the targets that this process sees as all other processes of the node do."""
    return [target for target in targets if target not in own_targets]


def for_shared_targets(note: OnFinished) -> OnFinished:
    """Return `note` without its effect on targets that only this process sees."""

    def save(target: Path, fingerprint: str, base: str, tree_fingerprint: str) -> None:
        if target not in own_targets:
            note(target, fingerprint, base, tree_fingerprint)

    return save
