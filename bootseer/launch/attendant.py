"""Background process of a start: publishes what is new, and keeps mounts and preloaders alive.

A start has one attendant per node, however many launchers (processes of `bootseer run`) it has
there. Each launcher writes a note into the start's folder `run_dir/services/start-ID`. If no
process holds the folder's lock, the launcher also begins the attendant, as a copy of itself, before
any stage. When the launcher becomes its job it writes a second file, the handoff: which caches the
job has, and for how long mounts stay after it.

A *duty* (`profile.publish.duty`, `launch.caches.duty`) decides what to publish when the job is
ready and when the job ends. Its work runs in a copy of the attendant, with a time limit and at low
priority. If the job asked for lingering, the attendant registers as a user of every mount and
preloader that the launcher uses (`served.users`), so that the next start of the job finds them in
place. At its end it ends the preloaders that no later start has taken over.

No job depends on the attendant: if it is killed, the mounts end with the job. SIGTERM ends the
lingering, and the process once its last work is done; SIGHUP makes it read new notes.

Only this module writes to these folders. Main thread only. The launcher's side imports little,
since every start loads it.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import from_builtins, from_line, to_builtins, to_line
from bootseer.base.redact import public_url
from bootseer.base.short_digest import short_digest
from bootseer.errors import BootseerError
from bootseer.launch.job import PreloadHandoff
from bootseer.linux.locks import has_writer, lock_file
from bootseer.linux.private_files import private_directory, write_private_file
from bootseer.linux.processes import ForkedWork, ProcessId, run_forked, wait_readable
from bootseer.profile.publish.note import LauncherNote, is_wanted
from bootseer.served.ready_socket import ReadySocket, add_ready_names, new_ready_name
from bootseer.served.service import (
    ATTENDING,
    START_PREFIX,
    ServiceState,
    attendants,
    read_state,
    services_dir,
    start_folders,
    write_state,
)
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import Timeline

if TYPE_CHECKING:
    # A start without an attendant does not load these.
    from bootseer.launch.caches.duty import CachesDuty
    from bootseer.launch.caches.run import KeptCache
    from bootseer.served.processes import Process, Report

_log = logging.getLogger(__name__)

_LOCK = "lock"
_NOTE, _READ_NOTE, _HANDOFF = ".note", ".taken", ".left"
"""File suffixes. The files stay until all is published: Slurm may kill the attendant with the job.
"""
_NICENESS = 15
_ENDING = frozenset((signal.SIGTERM, signal.SIGINT))
_SWEEP_S = 60.0
_END_S = 5.0
_SCRATCH_PAUSE_FIRST_S, _SCRATCH_PAUSE_MAX_S = 0.5, 16.0
_LOGS_KEPT_S = 2 * 86400.0
_FILE_BYTES_MAX = 1 << 20
_PUBLISH_KILLED_S = 10.0
"""Limit for each start of `publish_killed`."""


class _AttendantPlan(Struct, frozen=True):
    folder: Path
    run_dir: Path
    job: str
    store_url: str
    """URL with its credentials: the notes are files, so they hold the URL without them."""


class _Attending(Struct, frozen=True):
    process: ProcessId


class _Handoff(Struct, frozen=True):
    """Contents of the file that a launcher writes just before it becomes its job."""

    caches: list[dict[str, Any]] = []
    begun_ns: int = 0
    preloads: PreloadHandoff | None = None
    variables: dict[str, str] = {}
    """Environment variables that let the attendant add stages to the start's timeline."""
    linger_s: float = 0.0


# ---- the launcher's side ------------------------------------------------------------------------


class Attendant:
    """The launcher's handle on the attendant of its start."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._folder: Path | None = None
        self._publishes = False
        self._process: Process | None = None

    def begin(self, timeline: Timeline, *, is_needed: bool) -> None:
        """Write this launcher's note, and begin the attendant unless the start has one already.

        Call it before this process has threads or enters a namespace. Never raises: a failure is
        one warning. `is_needed`: whether the start needs an attendant for anything besides
        publishing its timeline.
        """
        settings = self._settings
        publishes = self._publishes = timeline.is_written and is_wanted(settings)
        if not (publishes or is_needed or settings.linger_s):
            return
        from bootseer.served.processes import ATTENDANT, start

        ready_name = new_ready_name()
        shown = replace(settings, store_url=public_url(settings.store_url))
        process = ProcessId.of(os.getpid())
        slurm_job = os.environ.get("SLURM_JOB_ID", "")
        note = LauncherNote(shown, timeline.path, process, ready_name, slurm_job, publishes)
        identity = _identity(settings)
        try:
            folder = private_directory(services_dir(settings.run_dir) / identity)
            _write(folder / f"{process.pid}{_NOTE}", note)
            if _is_attended(folder):
                # Without a state the attendant is only beginning, and will find the note.
                state = read_state(folder)
                if state is not None:
                    state.process.kill(signal.SIGHUP)
            else:
                self._process = start(ATTENDANT, settings.run_dir, identity=identity, copy=True)
                plan = _AttendantPlan(folder, settings.run_dir, settings.job, settings.store_url)
                self._process.tell(plan)
                self._process.go()
        except (BootseerError, OSError) as error:
            self._warn(error)
            return
        self._folder = folder
        add_ready_names(os.environ, ready_name)

    def complete(
        self,
        caches: Sequence["KeptCache"] = (),
        *,
        begun_ns: int = 0,
        preloads: PreloadHandoff | None = None,
    ) -> None:
        """Write the handoff, then end what lingers from earlier starts of the job.

        Mounts that this start uses stay. Never raises: a failure is one warning.
        """
        settings = self._settings
        try:
            attendant = self._write_handoff(caches, begun_ns, preloads)
            if attendant is not None and settings.linger_s:
                from bootseer.served.users import share_services

                share_services(settings.run_dir, attendant.pid)
        except (BootseerError, OSError) as error:
            self._warn(error)
            attendant = None
        with contextlib.suppress(OSError):
            end_lingering(settings, keep=attendant)

    def _write_handoff(
        self, caches: Sequence["KeptCache"], begun_ns: int, preloads: PreloadHandoff | None
    ) -> ProcessId | None:
        if self._folder is None:
            return None
        names = ("BOOTSEER_TIMELINE", "TRACEPARENT")
        handoff = _Handoff(
            [to_builtins(one) for one in caches],
            begun_ns,
            preloads,
            {name: os.environ[name] for name in names if name in os.environ},
            self._settings.linger_s,
        )
        _write(self._folder / f"{os.getpid()}{_HANDOFF}", handoff)
        process, self._process = self._process, None
        if process is not None:
            return process.wait(answer=_Attending).process
        state = read_state(self._folder)
        return state.process if state is not None else None

    def abandon(self) -> None:
        """Publish a failed start's timeline if wanted, and end the attendant. Never raises."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(BootseerError, OSError):
            attendant = process.wait(_END_S, _Attending).process
            if not self._publishes:
                descriptor = attendant.open()
                attendant.kill(signal.SIGTERM)
                wait_readable([descriptor], _END_S)
                os.close(descriptor)

    def _warn(self, error: Exception) -> None:
        lingers = ", and nothing lingers after this job" if self._settings.linger_s else ""
        self._say(f"warning: the timeline of this start stays on this node{lingers}: {error}")


def end_lingering(settings: Settings, keep: ProcessId | None = None) -> None:
    """End the attendants of the job's earlier starts, and so the mounts that linger for the job.

    The attendant `keep` goes on, and so does one whose job still runs. Raises: OSError.
    """
    for _, state in attendants(settings.run_dir):
        is_over = state.user is None or not state.user.lives()
        if state.reference == settings.job and state.process != keep and is_over:
            state.process.kill(signal.SIGTERM)


def _identity(settings: Settings) -> str:
    parts = (settings.job, settings.submission, str(settings.attempt), settings.node)
    return START_PREFIX + short_digest("\0".join(parts).encode())[:16]


def _is_attended(folder: Path) -> bool:
    try:
        os.close(lock_file(folder / _LOCK, 0))
    except TimeoutError:
        return True
    return False


def _write(path: Path, value: Struct) -> None:
    write_private_file(path, to_line(value).encode("ascii"))


# ---- the process --------------------------------------------------------------------------------


class _Duty(Protocol):
    @property
    def limit_s(self) -> float: ...
    def due_s(self) -> float: ...
    def begin(self) -> bool: ...
    def work(self) -> bytes: ...
    def take_result(self, answer: bytes) -> None: ...


class _Launcher(Struct, eq=False):
    note: LauncherNote
    has_handoff: bool = False
    caches: "CachesDuty | None" = None


class _AttendantLoop:
    """The launchers of one start on this node, and the duties for them."""

    def __init__(self, plan: _AttendantPlan) -> None:
        from bootseer.profile.publish.duty import TimelineDuty

        self._plan = plan
        self._folder = plan.folder
        self._timeline = TimelineDuty()
        self._duties: list[_Duty] = [self._timeline]
        self._running: dict[int, _Launcher] = {}
        """Launchers whose process lives, by a pidfd of the process."""
        self._listening: dict[int, tuple[ReadySocket, _Launcher]] = {}
        self._read_paths: list[Path] = []
        self._work: tuple[_Duty, ForkedWork] | None = None
        self._linger_s = 0.0
        self._preloads = False
        self._linger_until_s = 0.0
        self._clear_scratch_at_s = math.inf
        self._scratch_pause_s = _SCRATCH_PAUSE_FIRST_S
        self._state = ServiceState(
            id=plan.folder.name,
            reference=plan.job,
            index_digest="",
            workload="",
            directory="",
            pid=os.getpid(),
            pid_started=ProcessId.of(os.getpid()).started,
            started_ns=time.time_ns(),
            purpose=ATTENDING,
        )

    # ---- launchers ----------------------------------------------------------------------------

    def read_notes(self) -> bool:
        """Add the launchers whose notes are new. Return whether there are any."""
        new = False
        for path in sorted(self._folder.glob(f"*{_NOTE}")):
            with contextlib.suppress(OSError, BootseerError, ValueError):
                path = path.rename(path.with_suffix(f".{len(self._read_paths)}{_READ_NOTE}"))
                self._read_paths.append(path)
                new = True
                self._add_launcher(_read_note(path, self._plan.store_url))
        return new

    def _add_launcher(self, note: LauncherNote) -> None:
        launcher = _Launcher(note)
        with contextlib.suppress(OSError):
            self._running[note.process.open()] = launcher
        if note.publishes:
            self._timeline.add(note)
        listener = ReadySocket(note.ready_name)
        self._listening[listener.fileno()] = listener, launcher

    def _read_handoff(self, launcher: _Launcher) -> None:
        path = self._folder / f"{launcher.note.process.pid}{_HANDOFF}"
        if launcher.has_handoff or not path.exists():
            return
        launcher.has_handoff = True
        self._read_paths.append(path)
        with contextlib.suppress(OSError, BootseerError, ValueError):
            handoff = from_line(path.read_bytes()[:_FILE_BYTES_MAX], _Handoff)
            self._linger_s = max(self._linger_s, handoff.linger_s)
            self._preloads = self._preloads or handoff.preloads is not None
            if handoff.caches or handoff.preloads:
                from bootseer.launch.caches.duty import CachesDuty
                from bootseer.launch.caches.run import KeptCache

                launcher.caches = CachesDuty(
                    launcher.note.settings,
                    from_builtins(handoff.caches, tuple[KeptCache, ...]),
                    handoff.begun_ns,
                    handoff.variables,
                    preloads=handoff.preloads,
                )
                self._duties.append(launcher.caches)

    def _on_ready(self, launcher: _Launcher) -> None:
        self._read_handoff(launcher)
        self._timeline.on_ready()
        if launcher.caches is not None:
            launcher.caches.on_ready()

    def _on_exit(self, descriptor: int) -> None:
        launcher = self._running.pop(descriptor)
        os.close(descriptor)
        self._read_handoff(launcher)
        if launcher.caches is not None:
            launcher.caches.on_exit()
        if not self._running:
            self._on_last_exit()
        elif self._state.user == launcher.note.process:
            self._write_state()

    def _on_last_exit(self) -> None:
        self._timeline.on_exit()
        if self._linger_s:
            now_s = time.monotonic()
            self._linger_until_s = now_s + self._linger_s
            self._clear_scratch_at_s = now_s
        self._write_state()

    def _write_state(self) -> None:
        """Write the state that `bootseer status` and later starts read."""
        user = next((one.note.process for one in self._running.values()), None)
        until_ns = 0
        if self._linger_until_s:
            until_ns = time.time_ns() + int((self._linger_until_s - time.monotonic()) * 1e9)
        self._state = replace(self._state, user=user, until_ns=until_ns)
        with contextlib.suppress(BootseerError):
            write_state(self._folder, self._state)

    def _stop_lingering(self) -> None:
        """Treat every job as ended, so that the process ends after its last work."""
        for descriptor in tuple(self._running):
            self._on_exit(descriptor)
        self._linger_until_s = 0.0

    # ---- the loop -----------------------------------------------------------------------------

    def run(self, report: "Report", wake: int) -> None:
        """Serve the launchers until nothing is left to do or to wait for."""
        self.read_notes()
        self._write_state()
        report.ready(_Attending(self._state.process))
        if not self._running:
            self._on_last_exit()
        while self._goes_on():
            for descriptor in wait_readable(
                [
                    wake,
                    *self._running,
                    *self._listening,
                    *([self._work[1].fileno()] if self._work else []),
                ],
                self._wait_s(),
            ):
                self._handle(descriptor, wake)
            if time.monotonic() >= self._clear_scratch_at_s:
                self._clear_scratch()
            self._begin_or_end_work()

    def _handle(self, descriptor: int, wake: int) -> None:
        if descriptor == wake:
            if not _ENDING.isdisjoint(os.read(wake, 4096)):
                self._stop_lingering()
            elif self.read_notes():
                self._write_state()
        elif descriptor in self._running:
            self._on_exit(descriptor)
        elif descriptor in self._listening:
            listener, launcher = self._listening[descriptor]
            if listener.take():
                del self._listening[descriptor]
                listener.close()
                self._on_ready(launcher)
        elif self._work is not None and self._work[1].read():
            self._take_result()

    def _begin_or_end_work(self) -> None:
        """Begin the next work that is due, or end work that has reached its limit."""
        if self._work is not None:
            if self._work[1].left_s <= 0:
                self._take_result()
            return
        for duty in self._duties:
            if duty.due_s() <= time.monotonic() and duty.begin():
                # A launcher may have failed to send SIGHUP for its note.
                self.read_notes()
                self._work = duty, ForkedWork(partial(_work, duty), duty.limit_s)
                return

    def _take_result(self) -> None:
        assert self._work is not None
        duty, copy = self._work
        self._work = None
        duty.take_result(copy.result())

    def _goes_on(self) -> bool:
        """Return whether anything is left to do or to wait for."""
        is_at_work = self._work is not None or any(one.due_s() < math.inf for one in self._duties)
        if self._running:
            for launcher in self._running.values():
                self._read_handoff(launcher)
            waits = (
                self._linger_s
                or self._preloads
                or any(
                    not one.has_handoff or one.caches is not None for one in self._running.values()
                )
            )
            return is_at_work or bool(waits) or not self._timeline.is_over
        if self._linger_until_s:
            # A copy that is still at work does not need this process: its own limit ends it.
            return time.monotonic() < self._linger_until_s
        return is_at_work

    def _wait_s(self) -> float | None:
        times = [duty.due_s() for duty in self._duties] if self._work is None else []
        times.append(self._clear_scratch_at_s)
        now_s = time.monotonic()
        if self._work is not None:
            times.append(now_s + self._work[1].left_s)
        if self._linger_until_s:
            times.append(self._linger_until_s)
        wait_s = min(times) - now_s
        return None if wait_s == math.inf else max(wait_s, 0.0)

    def _clear_scratch(self) -> None:
        """Remove the files that ended containers wrote; try again later if some are in use."""
        from bootseer.served.ending import remove_ended_scratch

        self._clear_scratch_at_s = math.inf
        if not remove_ended_scratch(self._plan.run_dir):
            self._clear_scratch_at_s = time.monotonic() + self._scratch_pause_s
            self._scratch_pause_s = min(2 * self._scratch_pause_s, _SCRATCH_PAUSE_MAX_S)

    def end_preloaders(self) -> None:
        """End the preloaders of the ended launchers that no later start has taken over."""
        if self._preloads:
            from bootseer.launch.import_records import end_preloaders

            end_preloaders(self._plan.run_dir)

    def forget_notes(self) -> None:
        for path in (*self._read_paths, self._folder / "state.json"):
            path.unlink(missing_ok=True)


def _work(duty: _Duty) -> bytes:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The limit holds even if the attendant, which would enforce it, has died.
    signal.alarm(math.ceil(duty.limit_s))
    return duty.work()


def _run_attendant(line: bytes, report: "Report") -> None:
    plan = from_line(line, _AttendantPlan)
    os.nice(_NICENESS)
    wake, signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in (*_ENDING, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    while True:
        try:
            lock = lock_file(plan.folder / _LOCK, 0)
        except TimeoutError:
            state = read_state(plan.folder)
            report.ready(_Attending(state.process if state else ProcessId(0, "")))
            return
        loop = _AttendantLoop(plan)
        loop.run(report, wake)
        loop.end_preloaders()
        loop.forget_notes()
        (plan.folder / _LOCK).unlink(missing_ok=True)
        os.close(lock)
        try:
            plan.folder.rmdir()
        except OSError:
            # A launcher wrote a note at this moment, and may have seen the lock held.
            if any(plan.folder.glob(f"*{_NOTE}")):
                continue
        break
    run_forked(lambda: _sweep(plan.run_dir), _SWEEP_S)


def publish_killed(settings: Settings, slurm_job: str) -> None:
    """Publish the timelines of attendants that Slurm killed with their job.

    Call it from a process without threads.
    """
    from bootseer.profile.publish.duty import TimelineDuty

    for folder in start_folders(settings.run_dir):
        with contextlib.suppress(OSError):
            lock = lock_file(folder / _LOCK, 0)
            duty = TimelineDuty(_PUBLISH_KILLED_S)
            read_paths = []
            for path in sorted(folder.iterdir()):
                with contextlib.suppress(OSError, BootseerError, ValueError):
                    if path.suffix in (_NOTE, _READ_NOTE):
                        note = _read_note(path, settings.store_url)
                        if note.slurm_job == slurm_job:
                            read_paths.append(path)
                            if note.publishes:
                                duty.add(note)
            duty.publish()
            for path in read_paths:
                path.unlink(missing_ok=True)
            if not any(one.suffix in (_NOTE, _READ_NOTE) for one in folder.iterdir()):
                for path in folder.iterdir():
                    path.unlink()
            os.close(lock)
            folder.rmdir()


def _read_note(path: Path, store_url: str) -> LauncherNote:
    note = from_line(path.read_bytes()[:_FILE_BYTES_MAX], LauncherNote)
    if public_url(store_url) == note.settings.store_url:
        note = replace(note, settings=replace(note.settings, store_url=store_url))
    return note


def _sweep(run_dir: Path) -> bytes:
    """Remove the leftovers of killed processes, and old logs. Never raises."""
    from bootseer.linux.removal import remove_tree
    from bootseer.served.ending import sweep

    sweep(run_dir)
    before_s = time.time() - _LOGS_KEPT_S
    with contextlib.suppress(OSError):
        for old in (*start_folders(run_dir), *(run_dir / "logs").glob("start-*.log")):
            with contextlib.suppress(OSError):
                status = old.stat(follow_symlinks=False)
                if old.suffix == ".log":
                    is_old = status.st_mtime < before_s or not status.st_size
                    if is_old and not has_writer(old):
                        old.unlink()
                elif status.st_mtime < before_s:
                    # A living attendant holds the lock: TimeoutError, and the folder stays.
                    os.close(lock_file(old / _LOCK, 0))
                    remove_tree(old)
    return b""


def main() -> int:
    """Run the attendant of a start; the plan comes on standard input. Return the exit code."""
    from bootseer.served.processes import ATTENDANT, serve

    return serve(ATTENDANT, _run_attendant)


if __name__ == "__main__":
    sys.exit(main())
