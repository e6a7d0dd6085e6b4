"""A job's own view of targets on which another job of the node runs: in a new mount namespace.

Alone decides what such a target shows: what another job has mounted there is off, a directory that
another set-up has made whole is empty, and whatever is written goes to a layer of this job's own,
which ends with it. The other job sees nothing of this. One thread, the main one, of a process that
becomes the job: a process does not leave its view.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bootseer.errors import BootseerError, BusyError
from bootseer.linux import namespaces
from bootseer.linux.private_files import make_private_directory
from bootseer.served.background import end_early
from bootseer.served.cover_users import add_user, is_others_only
from bootseer.served.covers import cover_at, covers, source_of, uncover
from bootseer.served.folders import mounts_dir
from bootseer.settings.config import Settings
from bootseer.snapshots.restoring.host_paths import is_entered
from bootseer.snapshots.restoring.mounting.layers import copy_attributes, cover_target
from bootseer.snapshots.restoring.mounting.mounted import scratch_of
from bootseer.snapshots.restoring.staging import OnFinished
from bootseer.snapshots.targets.state import was_empty

_own: set[Path] = set()
"""The targets of which this process has a view of its own."""


def shared(targets: Iterable[Path]) -> list[Path]:
    """The host paths that this process sees as every other one of the node does."""
    return [target for target in targets if target not in _own]


def of_shared(note: OnFinished) -> OnFinished:
    """`note`, but nothing for targets that no other process sees."""

    def save(target: Path, fingerprint: str, base: str, tree_fingerprint: str) -> None:
        if target not in _own:
            note(target, fingerprint, base, tree_fingerprint)

    return save


def enter(settings: Settings, used: Mapping[Path, int], before: Callable[[], None]) -> None:
    """Have an own view of the targets that other processes use, `used`. `before` is called when it
    is sure that this process enters a mount namespace: what is mounted for it must be there.

    Raises: BusyError where that cannot be.
    """
    try:
        if threading.current_thread() is not threading.main_thread():
            raise BusyError("only a process's main thread can")
        before()
        end_early()
        if not _own:
            namespaces.unshare(namespaces.CLONE_NEWNS)
            # What is mounted on the host later, as by an automounter, comes in.
            namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_SLAVE)
        for target in used:
            _cover(settings, target)
            _own.add(target)
    except (BootseerError, OSError) as error:
        target, pid = next(iter(used.items()))
        raise BusyError(
            f"{target} is in use by process {pid}, another job on this node, and this set-up would "
            "change it; wait for that job's end, or set up another directory; this job cannot have "
            f"{target} in a mount namespace of its own: {error}"
        ) from error


def _cover(settings: Settings, target: Path) -> None:
    """Show what there is without other jobs, with a layer for what this one writes."""
    # Here: no other start needs it.
    from bootseer.snapshots.restoring.linking.linked_mount import hold

    is_mounted = _take_off_used(settings, target)
    state_dir = hold(settings, target)
    scratch = scratch_of(settings, state_dir)
    make_private_directory(scratch)
    lower = target
    if not is_mounted and was_empty(settings.cache_dir, target):
        lower = scratch / "empty"
        lower.mkdir(mode=0o700)
        copy_attributes(target, lower)
    cover_target(
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
    folder = mounts_dir(settings.run_dir)
    is_mounted = False
    while any(one.path == target and is_others_only(folder / one.id) for one in covers()):
        cover = cover_at(target)
        if cover is None:
            raise BusyError(f"something else is mounted on {target}")
        uncover(cover)
        is_mounted = True
    return is_mounted
