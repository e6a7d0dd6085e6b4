"""A checkpoint folder mounted for a start: the mount of the last start taken over, or a new one.

`JobMount` is what a start tells this process (JOB_MOUNT), and `Mounted` is its answer. It writes
the stage "checkpoint" of the start. Where it mounts it becomes the mount's server; where it takes a
mount over, another process serves that, and this one ends. Light: what a start does not need is
loaded in the process. Main thread.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.base.documents import from_line
from bootseer.errors import BusyError, UnavailableError, from_oserror
from bootseer.linux.mount_table import find_mount
from bootseer.linux.private_files import make_directory
from bootseer.linux.processes import ProcessId, wait_readable
from bootseer.served.processes import JOB_MOUNT, Report, serve
from bootseer.settings.config import Settings
from bootseer.timeline.otlp import LIVE
from bootseer.timeline.recorder import stage

BUSY_S = 5.0
"""A job that starts again at once finds the mount of its previous start still being taken down."""
_POLL_S = 0.1
_ABANDONED_S = 3600.0


class JobMount(Struct, frozen=True, kw_only=True):
    """A checkpoint folder that a start needs."""

    settings: Settings
    url: str
    directory: Path
    """Where it is mounted, if none that lingers is taken over."""
    identity: str
    """The identity of a new mount."""
    user: ProcessId
    """The process that is going to be the job."""
    aside: Path | None = None
    """The folder with mounts that are bound into containers later; None: the job sees the mount
    itself."""
    inside: tuple[Path, ...] = ()
    """Mount points of the same start that it lies below: they are mounted first."""
    sweeps: bool = False
    """Whether mount points of starts that have ended are removed from `aside`."""

    @property
    def limit_s(self) -> float:
        """Within this it succeeds or fails, by deadlines of its own, once nothing it waits for is
        left."""
        return BUSY_S + 2 * self.settings.deadline_s

    @property
    def choices(self) -> dict[str, Any]:
        """Options of the mount."""
        is_shared = self.aside is not None and os.geteuid() == 0
        return {
            # The command in a container may be of another user than this process. Nobody else gets
            # into the folder that these mounts are in.
            "allow_other": is_shared,
            "everyone_writes": is_shared,
            "user": self.user,
            "read_newest": True,
        }


class Mounted(Struct, frozen=True):
    """Mounted checkpoint folder of a start, and the way the start got it."""

    directory: Path
    how: str
    """LIVE: as it has lingered since the last start; "changed": instead of that; "mounted"."""
    made: bool = False
    """Whether the remote folder was missing, and was made."""


def _mount(wanted: JobMount, report: Report) -> None:
    """Take over the mount that the last start left, or serve a new mount until it ends.

    `report` receives a `Mounted` once the folder is there. Raises: BootseerError.
    """
    from bootseer.fuse.striped.mounted.mount import (
        mount_spec,
        take_off_dead_mounts,
        take_over,
        unchecked_spec,
    )
    from bootseer.fuse.striped.mounted.options import CheckpointPlan
    from bootseer.fuse.striped.mounted.server import serve_plan
    from bootseer.served.folders import new_mount_dir, read_state

    settings = wanted.settings
    with contextlib.ExitStack() as until_mounted:
        span = until_mounted.enter_context(stage("checkpoint"))

        def mounted(directory: Path, how: str, *, made: bool = False) -> Mounted:
            span.set("bootseer.how", how)
            until_mounted.close()
            return Mounted(directory, how, made)

        if wanted.sweeps and wanted.aside is not None:
            _sweep(settings, wanted.aside)
        for path in wanted.inside:
            _wait(path, True, wanted.limit_s, report)
        directory = _lingering(wanted) or wanted.directory
        # Before the folder is made: a dead mount answers nobody, mkdir included.
        found = take_over(unchecked_spec(settings, wanted.url, directory, **wanted.choices))
        if found == LIVE:
            report.ready(mounted(directory, found))
            return
        take_off_dead_mounts(settings.run_dir, directory)
        try:
            make_directory(directory)
        except OSError as error:
            raise from_oserror(error, f"make the mount point {directory}") from error
        _wait(directory, False, BUSY_S, report)
        try:
            spec = mount_spec(settings, wanted.url, directory, **wanted.choices)
        except BusyError as error:
            raise BusyError(
                f"{error}. A job that runs several processes on one node mounts once: let "
                "`bootseer run` start the launcher (torchrun), not each process"
            ) from error
        plan = CheckpointPlan(spec, new_mount_dir(settings.run_dir, wanted.identity))

        def answer() -> Mounted:
            state = read_state(plan.state_dir)
            made = state is not None and state.root_was_made
            return mounted(directory, found or "mounted", made=made)

        serve_plan(plan, report, answer)


def _wait(path: Path, is_mounted: bool, limit_s: float, report: Report) -> None:
    """Wait at most `limit_s` until `path` is a mount point (`is_mounted`) or is none.

    Raises: UnavailableError once the process that asked for the mount no longer waits for it.
    """
    deadline_s = time.monotonic() + limit_s
    while (find_mount(path) is not None) is not is_mounted and time.monotonic() < deadline_s:
        if wait_readable([report.fileno()], _POLL_S):
            raise UnavailableError("nobody waits for the mount any more")


def _sweep(settings: Settings, aside: Path) -> None:
    """Remove mount points of starts that have ended; a mounted one is busy and stays."""
    from bootseer.fuse.striped.mounted.mount import take_off_dead_mounts

    for old in aside.iterdir() if aside.is_dir() else ():
        take_off_dead_mounts(settings.run_dir, old)
        with contextlib.suppress(OSError):
            # A young one may be another start's that is about to mount there.
            if not os.path.ismount(old) and time.time() - old.stat().st_mtime > _ABANDONED_S:
                old.rmdir()


def _lingering(wanted: JobMount) -> Path | None:
    """Return where it is mounted aside since a job that has ended, as it would be now."""
    if wanted.aside is None:
        return None
    from bootseer.fuse.striped.mounted.mount import unchecked_spec
    from bootseer.served.folders import CHECKPOINT
    from bootseer.served.users import lingering_mounts

    settings = wanted.settings
    for _, state in lingering_mounts(settings.run_dir, CHECKPOINT):
        directory = Path(state.directory)
        spec = unchecked_spec(settings, wanted.url, directory, **wanted.choices)
        if spec.fingerprint == state.fingerprint:
            return directory
    return None


def _mount_told(line: bytes, report: Report) -> None:
    _mount(from_line(line, JobMount), report)


def main() -> int:
    """The exit code: 0 after an unmount, or where another process serves."""
    return serve(JOB_MOUNT, _mount_told)


if __name__ == "__main__":
    sys.exit(main())
