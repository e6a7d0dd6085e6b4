"""Work of Slurm's prolog and epilog on a node, for the user of a job; see docs/slurm.md.

Slurm kills a job's servers with the job, so that their mounts stay without a server. This code runs
as the job's user: wrong contents of the user's folders can harm only that user. Edge; main thread.
"""

import contextlib
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

from bootseer.errors import BootseerError, InvalidInputError
from bootseer.fuse.striped.mounted.mount import unmount_checkpoints
from bootseer.linux.mount_table import find_mount
from bootseer.linux.namespaces import mount_namespace
from bootseer.linux.processes import ProcessId
from bootseer.served.ending import sweep
from bootseer.served.service import (
    CHECKPOINT,
    Service,
    ServiceState,
    attendants,
    dead_mounts,
    live_mounts,
    wait_released,
)
from bootseer.settings.config import Settings

_END_S = 5.0
_REQUEST = ["bootseer", "standby"]
_REQUESTED_MAX = 4


def tidy(settings: Settings, job: str, say: Callable[[str], None]) -> None:
    """Unmount what killed servers have left mounted, and end the servers of the Slurm job `job`.

    Mounts that other jobs of the user use stay. `say` gets one sentence per lost file or failure.
    """
    run_dir = settings.run_dir

    def is_of_job(service: Service) -> bool:
        process = service.state.process
        return bool(job) and process.lives() and job_of(process.pid) == job

    ended = [*filter(is_of_job, live_mounts(run_dir))]
    for attendant in filter(is_of_job, attendants(run_dir)):
        attendant.state.process.kill(signal.SIGTERM)
    for service in ended:
        # A server ends by itself after its last user; one that hangs is killed, as Slurm would.
        if not wait_released(service.folder, _END_S) and not _is_used(service, job):
            _kill_session(service.state.process)
            wait_released(service.folder, _END_S)
    for service in dead_mounts(run_dir):
        # A mount in a job's private /tmp went with that namespace; here the same path is another
        # directory.
        is_here = service.state.mount_namespace in ("", mount_namespace())
        if is_here and not _is_used(service, job):
            _unmount(run_dir, service.state, say)
    sweep(run_dir)


def job_of(pid: int) -> str:
    """Return the number of the Slurm job that started a process of this user; empty for none."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"SLURM_JOB_ID":
                return os.fsdecode(value)
    return ""


def _kill_session(server: ProcessId) -> None:
    """Kill all processes in the session of a server. A server has a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        session = os.getsid(server.pid)
        if session == os.getsid(0) or not server.lives():
            return
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                process = ProcessId.of(int(entry.name))
                if os.getsid(process.pid) == session:
                    process.kill(signal.SIGKILL)


def _is_used(service: Service, job: str) -> bool:
    """Return whether a process that does not belong to the Slurm job `job` uses the mount."""
    return any(not job or job_of(pid) != job for pid in service.users())


def _unmount(run_dir: Path, state: ServiceState, say: Callable[[str], None]) -> None:
    directory = Path(state.directory)
    if state.purpose != CHECKPOINT or find_mount(directory) is None:
        return  # `sweep` unmounts the others
    try:
        for name in unmount_checkpoints(run_dir, directory, timeout_s=_END_S):
            say(f"{directory}/{name} was being written, and is lost")
    except BootseerError as error:
        # If the mount is gone, the epilog of another job of the user has unmounted it.
        if find_mount(directory) is not None:
            say(str(error))


def requested_checkpoints(comment: str) -> list[str]:
    """Return the checkpoint folders, as URL:DIR, that a job's comment asks to mount before the job.

    The comment reads `bootseer standby --checkpoint URL:DIR ...`. Pure. Raises: InvalidInputError.
    """
    try:
        words = shlex.split(comment)
    except ValueError:
        words = []
    if words[:2] != _REQUEST:
        return []  # The comment is about something else.
    options, folders = words[2::2], words[3::2]
    # Only checkpoints: a set-up would run the user's command outside the job and its limits.
    if set(options) != {"--checkpoint"} or not len(options) == len(folders) <= _REQUESTED_MAX:
        raise InvalidInputError(
            "the comment of the job asks for more than `bootseer standby --checkpoint URL:DIR`"
        )
    return folders
