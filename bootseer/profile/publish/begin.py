"""Has the timeline of a start published, by a process that is nobody's child: the launcher becomes
the job. One such process serves all launchers of a start on a node; they leave it notes.

Alone owns `run_dir/timelines`. Light, since every start loads it. Main thread.
"""

import logging
import os
import sys
from hashlib import sha256
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import to_line
from bootseer.base.redact import public_url
from bootseer.errors import BootseerError
from bootseer.linux.locks import lock_file, open_log
from bootseer.linux.private_files import private_directory, write_private_file
from bootseer.linux.processes import KILLED_S, reap, start_time
from bootseer.linux.scripts import python_environment
from bootseer.profile.publish.endpoints import endpoints
from bootseer.served.folders import log_path
from bootseer.served.ready_socket import add_ready_names, new_ready_name
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import Timeline

_log = logging.getLogger(__name__)

LOCK = "lock"
NOTE_SUFFIX = ".json"
TAKEN_SUFFIX = ".taken"
"""Of a note that a worker has read: it stays until the worker has published all."""
STORE_VARIABLE = "BOOTSEER_STORE"
"""By this the worker is told the store's URL, as it is: notes are files."""
_WORKER = "bootseer.profile.publish.worker"


class Note(Struct, frozen=True):
    """What a launcher says of itself."""

    settings: Settings
    """But for user, password and query of the store's URL: the worker's environment has them."""
    timeline: Path
    pid: int
    """Of the launcher, and of the job that it becomes."""
    pid_started: str
    ready_name: str
    slurm_job: str = ""
    """The job of Slurm whose end kills the worker."""


class Round(Struct, frozen=True):
    """What one round of publishing has done."""

    sent: dict[str, int] = {}
    """How much of each file the collector has."""
    problems: dict[str, str] = {}
    """What went wrong, by who it went wrong with."""


def begin_publisher(settings: Settings, timeline: Timeline) -> None:
    """Have the timeline that this process begins published when the start is ready, now and then
    until then, and at the end. Never raises, and waits for nobody: one warning where that fails."""
    if not timeline.is_written or not _is_wanted(settings):
        return
    ready_name = new_ready_name()
    pid = os.getpid()
    shown = replace(settings, store_url=public_url(settings.store_url))
    job = os.environ.get("SLURM_JOB_ID", "")
    note = Note(shown, timeline.path, pid, start_time(pid), ready_name, job)
    identity = _identity(settings)
    try:
        folder = private_directory(notes_dir(settings.run_dir) / identity)
        write_private_file(folder / f"{pid}{NOTE_SUFFIX}", to_line(note).encode("ascii"))
        # Else another launcher's sees the note.
        if not _is_served(folder):
            _start(folder, log_path(settings.run_dir, f"timeline-{identity}"), settings.store_url)
    except (BootseerError, OSError) as error:
        _log.warning("warning: the timeline of this start stays on this node: %s", error)
        return
    add_ready_names(os.environ, ready_name)


def _is_wanted(settings: Settings) -> bool:
    return is_stored(settings) or settings.metrics_dir is not None or bool(endpoints(os.environ))


def is_stored(settings: Settings) -> bool:
    """Whether the timeline goes to the store. What lies beside an image in a registry is no place
    for what each start adds."""
    return settings.publish_timelines and not settings.store_url.startswith("oci:")


def _identity(settings: Settings) -> str:
    parts = (settings.job, settings.submission, str(settings.attempt), settings.node)
    return sha256("\0".join(parts).encode()).hexdigest()[:16]


def notes_dir(run_dir: Path) -> Path:
    """Where the folders of the starts of this node are, while they are published."""
    return run_dir / "timelines"


def _is_served(folder: Path) -> bool:
    try:
        os.close(lock_file(folder / LOCK, 0))
    except TimeoutError:
        return True
    return False


def _start(folder: Path, log: Path, store_url: str) -> None:
    private_directory(log.parent)
    # Not by `subprocess`, which other starts do without: loading it takes longer than all this.
    sink = open_log(log)
    try:
        pid = os.posix_spawn(
            "/bin/sh",
            # The shell ends at once, and what it began has no parent any more.
            ["sh", "-c", 'cd / && "$@" &', "sh", sys.executable, "-m", _WORKER, str(folder)],
            {**python_environment(), STORE_VARIABLE: store_url},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, sink, 1),
                (os.POSIX_SPAWN_DUP2, sink, 2),
            ],
            setsid=True,
        )
        reap(pid, KILLED_S)
    finally:
        os.close(sink)
