"""Process that mounts a checkpoint folder for a start, or takes over the mount of the last start.

A start sends a `JobMount` to this process (JOB_MOUNT) and gets a `JobMounted`. The process writes
the stage "checkpoint" of the start. If it mounts the folder, it becomes the mount's server; if it
takes over a mount, which another process serves, it ends. Starts import this module, so other
modules are imported late. Main thread.
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
"""Longest wait for the unmount of the job's previous start."""
_POLL_S = 0.1
_MOUNT_POINT = "tree"
"""Mount point in the folder of a service."""


class JobMount(Struct, frozen=True, kw_only=True):
    """Checkpoint folder that a start needs."""

    settings: Settings
    url: str
    directory: Path | None
    """Mount point of a new mount; None: in the folder of the service, for a container's root."""
    identity: str
    """Identity of a new mount."""
    user: ProcessId
    """Process that will become the job."""
    inside: tuple[Path, ...] = ()
    """Mount points of the same start above this one, which are mounted first."""

    @property
    def limit_s(self) -> float:
        """Return the time in which the mount succeeds or fails, without waits for other mounts."""
        return BUSY_S + 2 * self.settings.deadline_s

    @property
    def choices(self) -> dict[str, Any]:
        """Return options of the mount."""
        is_shared = self.directory is None and os.geteuid() == 0
        return {
            # The command in a container may run as another user than this process. The folder of
            # the service is closed to other users.
            "allow_other": is_shared,
            "everyone_writes": is_shared,
            "user": self.user,
            "read_newest": True,
            # Workers that a launcher restarts on this node read the checkpoint again.
            "page_cache": True,
        }


class JobMounted(Struct, frozen=True):
    """Answer to a `JobMount`."""

    directory: Path
    how: str
    """LIVE: the mount of the last start was taken over; "changed": it was replaced; "mounted"."""
    made: bool = False
    """Whether the remote folder was missing, and was made."""


def _mount(wanted: JobMount, report: Report) -> None:
    """Take over the mount of the last start, or serve a new mount until it ends.

    `report` gets a `JobMounted` once the folder is mounted. Raises: BootseerError.
    """
    from bootseer.fuse.striped.mounted.mount import (
        describe_mount,
        mount_spec,
        note_fanout,
        take_over,
        unmount_dead_mounts,
    )
    from bootseer.fuse.striped.mounted.options import CheckpointPlan
    from bootseer.fuse.striped.mounted.server import serve_plan
    from bootseer.served.service import new_service_dir, read_state, services_dir

    settings, fanout = wanted.settings, b""
    if settings.fanout:
        from bootseer.fanout.local import fanout_address

        fanout = fanout_address(settings)
    with contextlib.ExitStack() as until_mounted:
        span = until_mounted.enter_context(stage("checkpoint"))

        def mounted(directory: Path, how: str, *, made: bool = False) -> JobMounted:
            span.set("bootseer.how", how)
            until_mounted.close()
            return JobMounted(directory, how, made)

        for path in wanted.inside:
            _wait(path, True, wanted.limit_s, report)
        new = wanted.directory or services_dir(settings.run_dir) / wanted.identity / _MOUNT_POINT
        directory = _lingering(wanted) or new
        # Before the folder is made, because mkdir would wait for a dead mount.
        spec = describe_mount(settings, wanted.url, directory, **wanted.choices)
        found = take_over(spec, fanout)
        if found == LIVE:
            report.ready(mounted(directory, found))
            return
        directory = new
        unmount_dead_mounts(settings.run_dir, directory)
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
        plan = CheckpointPlan(spec, new_service_dir(settings.run_dir, wanted.identity))
        note_fanout(plan.state_dir, fanout)

        def answer() -> JobMounted:
            state = read_state(plan.state_dir)
            made = state is not None and state.root_was_made
            return mounted(directory, found or "mounted", made=made)

        serve_plan(plan, report, answer)


def _wait(path: Path, is_mounted: bool, limit_s: float, report: Report) -> None:
    """Wait at most `limit_s` until `path` is a mount point, or no longer one.

    Raises: UnavailableError if the start no longer waits for this process.
    """
    deadline_s = time.monotonic() + limit_s
    while (find_mount(path) is not None) is not is_mounted and time.monotonic() < deadline_s:
        if wait_readable([report.fileno()], _POLL_S):
            raise UnavailableError("the start does not wait for the mount any more")


def _lingering(wanted: JobMount) -> Path | None:
    """Return the directory of a lingering mount for containers with the same options, or None."""
    if wanted.directory is not None:
        return None
    from bootseer.fuse.striped.mounted.mount import describe_mount
    from bootseer.served.service import CHECKPOINT, lingering_services

    settings = wanted.settings
    for _, state in lingering_services(settings.run_dir, CHECKPOINT):
        directory = Path(state.directory)
        spec = describe_mount(settings, wanted.url, directory, **wanted.choices)
        if spec.fingerprint == state.fingerprint:
            return directory
    return None


def _mount_line(line: bytes, report: Report) -> None:
    _mount(from_line(line, JobMount), report)


def main() -> int:
    """Run the process. Return the exit code: 0 after an unmount, or if another process serves."""
    return serve(JOB_MOUNT, _mount_line)


if __name__ == "__main__":
    sys.exit(main())
