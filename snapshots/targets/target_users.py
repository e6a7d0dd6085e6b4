"""Which processes of this node run on the targets of set-ups, however these were put in place.

Alone owns the folders of their notes, beside the locks of the targets. Only jobs that `bootseer
run` becomes are noted: when what follows a `snapshot run` ends is not known. The caller
holds the targets' locks.
"""

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from bootseer.errors import BootseerError, BusyError
from bootseer.linux.private_files import private_directory
from bootseer.linux.processes import living_ids, note_process, notes, own_line
from bootseer.snapshots.targets.lock import record_path

logger = logging.getLogger(__name__)

_SUFFIX = ".users"
# In a target's folder, a link that says which target that is.
_TARGET = "target"


def note_user(run_dir: Path, targets: Iterable[Path]) -> None:
    """This process uses the targets (host paths) from now on. Never raises."""
    for target in targets:
        folder = _folder(run_dir, target)
        try:
            with contextlib.suppress(FileExistsError):
                os.symlink(target, private_directory(folder) / _TARGET)
            note_process(folder, os.getpid())
        except (BootseerError, OSError) as error:
            logger.warning("cannot note that this job uses %s: %s", target, error)
            continue
        _forget_ended(folder)


def other_users(run_dir: Path, targets: Iterable[Path]) -> dict[Path, int]:
    """The targets that other jobs' processes use, or that lie in or hold what they use, each with
    one of these. What this process descends from is of the same job."""
    users = {}
    ours = own_line()
    used = {}
    for name in notes(record_path(run_dir, Path()).parent):
        folder = record_path(run_dir, Path()).with_name(name)
        if folder.suffix == _SUFFIX:
            with contextlib.suppress(OSError):
                used[Path(os.readlink(folder / _TARGET))] = folder
    for target in targets:
        for path, folder in used.items():
            if path.is_relative_to(target) or target.is_relative_to(path):
                for pid in living_ids(folder):
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
    return record_path(run_dir, target).with_suffix(_SUFFIX)


def _forget_ended(folder: Path) -> None:
    living = set(map(str, living_ids(folder)))
    for name in notes(folder):
        if name != _TARGET and name.partition("-")[0] not in living:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
