"""Which processes of this node run on the targets of set-ups, however these were put in place.

Alone owns the folders of their notes, beside the locks of the targets. Only jobs that `bootseer
run` becomes are noted: of what follows a `snapshot run`, nobody knows when it ends. The caller
holds the targets' locks.
"""

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from bootseer.errors import BootseerError, BusyError
from bootseer.linux.processes import living_processes, note_process, notes, own_line
from bootseer.snapshots.targets.lock import record_path

logger = logging.getLogger(__name__)


def note_user(run_dir: Path, targets: Iterable[Path]) -> None:
    """This process uses the targets (host paths) from now on. Never raises."""
    for target in targets:
        folder = _folder(run_dir, target)
        try:
            note_process(folder, os.getpid())
        except (BootseerError, OSError) as error:
            logger.warning("cannot note that this job uses %s: %s", target, error)
            continue
        _forget_ended(folder)


def other_users(run_dir: Path, targets: Iterable[Path]) -> dict[Path, int]:
    """The targets that other jobs' processes use, each with one of these. What this process
    descends from is of the same job."""
    users = {}
    ours = own_line()
    for target in targets:
        for pid in living_processes(_folder(run_dir, target)):
            if pid not in ours:
                users[target] = pid
    return users


def check_unused(run_dir: Path, targets: Iterable[Path]) -> None:
    """Raises: BusyError where a job uses one of the targets."""
    for target, pid in other_users(run_dir, targets).items():
        raise BusyError(
            f"{target} is in use by process {pid}, a job on this node; wait for its end, or choose "
            "another directory"
        )


def _folder(run_dir: Path, target: Path) -> Path:
    return record_path(run_dir, target).with_suffix(".users")


def _forget_ended(folder: Path) -> None:
    living = {str(pid) for pid in living_processes(folder)}
    for name in notes(folder):
        if name.partition("-")[0] not in living:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
