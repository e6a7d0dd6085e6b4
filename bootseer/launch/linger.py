"""What a job has used stays for a while after it, so that its next start finds it live.

A process of its own is noted as a user of all that this start has mounted (`cover_users`), and ends
some time after the job. Nothing depends on it: where it is killed, what is served goes with the
job. The next start ends it, once it uses itself what it needs of that. Alone owns that process.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import from_line
from bootseer.errors import BootseerError, UnavailableError
from bootseer.linux.processes import ProcessId, wait_readable
from bootseer.served import cover_users
from bootseer.served.ending import remove_ended_scratch, sweep
from bootseer.served.folders import (
    LINGER,
    MountState,
    live_mounts,
    new_mount_dir,
    read_state,
    write_state,
)
from bootseer.served.life import living
from bootseer.served.processes import LINGERER, Process, Report, serve, start
from bootseer.settings.config import Settings

_LOOK_FIRST_S, _LOOK_MAX_S = 0.5, 16.0


class _Plan(Struct, frozen=True):
    folder: Path
    job: str
    job_process: ProcessId
    """The process that is going to be the job."""
    linger_s: float


class Lingering:
    """The process for which this start's mounts linger, if the settings say so: it loads its code
    beside the start. Main thread only: it is forked."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._process: Process | None = None
        if settings.linger_s:
            try:
                self._process = start(LINGERER, settings.run_dir, copy=True)
            except (BootseerError, OSError) as error:
                self._complain(error)

    def begin(self) -> None:
        """Keep what this process uses for a while after its end; what lingers since earlier starts
        of the job goes, but for what this one uses."""
        try:
            let_go(self._settings, but=self._serve())
        except (BootseerError, OSError) as error:
            self._complain(error)

    def _serve(self) -> int:
        """Returns the process; 0: there is none."""
        if self._process is None:
            return 0
        settings = self._settings
        folder = new_mount_dir(settings.run_dir, self._process.identity)
        plan = _Plan(folder, settings.job, ProcessId.of(os.getpid()), settings.linger_s)
        self._process.tell(plan)
        self._process.wait()
        state = read_state(folder)
        if state is None:
            raise UnavailableError(f"{LINGERER.title} has ended")
        cover_users.linger(settings.run_dir, state.pid)
        return state.pid

    def abandon(self) -> None:
        """There will be no job: what has not begun does not."""
        if self._process is not None:
            self._process.abandon()

    def _complain(self, error: Exception) -> None:
        self._say(f"warning: nothing lingers after this job: {error}")


def let_go(settings: Settings, but: int = 0) -> None:
    """End what lingers for the job, without the process `but`. Raises: OSError."""
    for _, state in live_mounts(settings.run_dir):
        is_left = state.purpose == LINGER and state.reference == settings.job
        # One whose job lives goes some time after that.
        if is_left and state.pid != but and not (state.user and state.user.lives()):
            state.process.kill(signal.SIGTERM)
    if (settings.run_dir / "preload").is_dir():
        from bootseer.served.preload import launching

        launching.let_go(settings)


# ---- that process -----------------------------------------------------------------------------


def _serve(line: bytes, report: Report) -> None:
    plan = from_line(line, _Plan)
    job = plan.job_process.open()
    state = MountState(
        id=plan.folder.name,
        reference=plan.job,
        index_digest="",
        workload="",
        directory="",
        pid=0,
        started_ns=time.time_ns(),
        purpose=LINGER,
        user=plan.job_process,
    )
    signal.signal(signal.SIGTERM, _end)
    with living(plan.folder, state, sweeps=False) as life:
        # Ended meanwhile, it would leave what is dead to a later start.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        report.ready()
        # The start does not wait for that.
        run_dir = plan.folder.parent.parent
        sweep(run_dir)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        wait_readable([job], None)
        until_ns = time.time_ns() + int(plan.linger_s * 1e9)
        write_state(plan.folder, replace(life.state, until_ns=until_ns))
        _stay(run_dir, time.monotonic() + plan.linger_s)


def _stay(run_dir: Path, until_s: float) -> None:
    """What containers wrote that are over goes before."""
    pause_s = _LOOK_FIRST_S
    # Processes that a job has left may use it yet.
    while not remove_ended_scratch(run_dir) and time.monotonic() + pause_s < until_s:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_MAX_S)
    time.sleep(max(until_s - time.monotonic(), 0))


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def main() -> int:
    """The exit code: 0 at its end."""
    return serve(LINGERER, _serve)


if __name__ == "__main__":
    sys.exit(main())
