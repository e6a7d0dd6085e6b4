"""What prolog and epilog of Slurm do on a node for the user of a job; see docs/slurm.md.

Slurm kills the servers of a job with the job, so their mounts are left dead. Runs as the job's
user: what this user's folders say can cost this user alone. Edge module; main thread.
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
from bootseer.linux.processes import ProcessId, living_processes
from bootseer.served.ending import sweep
from bootseer.served.folders import (
    CHECKPOINT,
    MountState,
    attendants,
    dead_mounts,
    live_mounts,
    wait_released,
)
from bootseer.settings.config import Settings

_END_S = 5.0
_WISH = ["bootseer", "standby"]
_WISHED_MAX = 4


def tidy(settings: Settings, job: str, say: Callable[[str], None]) -> None:
    """Take off what servers that were killed have mounted, and end those of the job `job`.

    What other jobs of the user use stays. `say` hears what was lost, and what cannot be done.
    """
    run_dir = settings.run_dir
    ended = [
        (folder, state)
        for folder, state in live_mounts(run_dir)
        if job and state.process.lives() and job_of(state.pid) == job
    ]
    for _, state in attendants(run_dir):
        if job and state.process.lives() and job_of(state.pid) == job:
            state.process.kill(signal.SIGTERM)
    for folder, state in ended:
        # A server ends by itself when its last user has; one that hangs is ended as Slurm does it.
        if not wait_released(folder, _END_S) and not _is_used(folder, state, job):
            _kill_session(state.process)
            wait_released(folder, _END_S)
    for folder, state in dead_mounts(run_dir):
        # What a job has mounted in a /tmp of its own went with that; here it is another's.
        is_here = state.mount_namespace in ("", mount_namespace())
        if is_here and not _is_used(folder, state, job):
            _unmount(run_dir, state, say)
    sweep(run_dir)


def job_of(pid: int) -> str:
    """The number of the Slurm job in which a process of this user was started; empty for none."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"SLURM_JOB_ID":
                return os.fsdecode(value)
    return ""


def _kill_session(server: ProcessId) -> None:
    """Kill a server's processes: their session is theirs alone."""
    with contextlib.suppress(ProcessLookupError):
        session = os.getsid(server.pid)
        if session == os.getsid(0) or not server.lives():
            return
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                process = ProcessId.of(int(entry.name))
                if os.getsid(process.pid) == session:
                    process.kill(signal.SIGKILL)


def _is_used(folder: Path, state: MountState, job: str) -> bool:
    """By another job than `job`, which is over: what lives of it, nobody was left to kill."""
    users = [*living_processes(folder / "users")]
    if state.user is not None and state.user.lives():
        users.append(state.user)
    return any(not job or job_of(process.pid) != job for process in users)


def _unmount(run_dir: Path, state: MountState, say: Callable[[str], None]) -> None:
    directory = Path(state.directory)
    if state.purpose != CHECKPOINT or find_mount(directory) is None:
        return  # `sweep` does it
    try:
        for name in unmount_checkpoints(run_dir, directory, timeout_s=_END_S):
            say(f"{directory}/{name} was being written, and is lost")
    except BootseerError as error:
        # Where it is gone, the epilog of another job of the user has done it.
        if find_mount(directory) is not None:
            say(str(error))


def wished_checkpoints(comment: str) -> list[str]:
    """The checkpoint folders that a job's comment asks to have mounted before the job, as
    `bootseer standby --checkpoint URL:DIR`. Pure. Raises: InvalidInputError."""
    try:
        words = shlex.split(comment)
    except ValueError:
        words = []
    if words[:2] != _WISH:
        return []  # It is about something else.
    options, wished = words[2::2], words[3::2]
    # A set-up would run what the user wants outside the job, and its limits.
    if set(options) != {"--checkpoint"} or len(options) != len(wished) or len(wished) > _WISHED_MAX:
        raise InvalidInputError(
            "the comment of the job asks for more than `bootseer standby --checkpoint URL:DIR`"
        )
    return wished
