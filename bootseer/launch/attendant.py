"""The process beside a start: it publishes the start's timeline, keeps its caches, and lingers.

One attends each start on a node, however many launchers the start has there: a launcher leaves a
note in the start's folder, and begins the process, as a copy of itself before any stage, unless
one holds the folder's lock. A launcher is starting; then it is its job, and what it has left says
what its caches are and whether it lingers; then the job is ready, and then over. What is to be
done at each of these is a duty's (`profile.publish.duty`, `launch.caches.duty`), whose work runs in
a copy of the process, with a limit and low priority. Where mounts linger the process is a user of
all that the launcher uses (`served.cover_users`), so that the next start of the job finds it live.

Nothing depends on it: where it is killed, what is served goes with the job. SIGTERM ends the
lingering, and the process once the last work is done; SIGHUP has it look for notes. Alone owns
`run_dir/starts`. Main thread. The caller's side is light, since every start loads it.
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
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import from_builtins, from_line, to_builtins, to_line
from bootseer.base.redact import public_url
from bootseer.errors import BootseerError
from bootseer.linux.locks import is_written, lock_file
from bootseer.linux.private_files import private_directory, write_private_file
from bootseer.linux.processes import Copy, ProcessId, in_a_copy, wait_readable
from bootseer.profile.publish.note import Note, is_wanted
from bootseer.served.folders import (
    ATTENDING,
    MountState,
    attendants,
    read_state,
    starts_dir,
    write_state,
)
from bootseer.served.ready_socket import ReadySocket, add_ready_names, new_ready_name
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import Timeline

if TYPE_CHECKING:
    # A start that nobody attends needs none of it.
    from bootseer.launch.caches.duty import CachesDuty
    from bootseer.launch.caches.run import Kept
    from bootseer.served.processes import Process, Report

_log = logging.getLogger(__name__)

_LOCK = "lock"
_NOTE, _TAKEN, _LEFT = ".note", ".taken", ".left"
"""Suffixes of a launcher's note, of one that was read, and of what a launcher has left. They stay
until all is published: Slurm may kill this process with the job."""
_NICENESS = 15
_ENDING = frozenset((signal.SIGTERM, signal.SIGINT))
_SWEEP_S = 60.0
_END_S = 5.0
_LOOK_FIRST_S, _LOOK_MAX_S = 0.5, 16.0
_KEPT_S = 2 * 86400.0
_FILE_BYTES_MAX = 1 << 20


class _Plan(Struct, frozen=True):
    folder: Path
    run_dir: Path
    job: str
    store_url: str
    """As it is: notes are files, and have no secret."""


class _Attending(Struct, frozen=True):
    """The attendant's answer."""

    process: ProcessId


class _Left(Struct, frozen=True):
    """What a launcher leaves when it becomes its job."""

    caches: list[dict[str, Any]] = []
    begun_ns: int = 0
    preloads: bool = False
    variables: dict[str, str] = {}
    """By these, stages get on the timeline of the start."""
    linger_s: float = 0.0


# ---- the launcher's side ------------------------------------------------------------------------


class Attendant:
    """The attendant of the start that this process is a launcher of, if it has one."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._folder: Path | None = None
        self._publishes = False
        self._process: Process | None = None

    def begin(self, timeline: Timeline, *, keeps: bool) -> None:
        """Leave a note, and begin the process unless one attends the start. `keeps`: whether there
        may be caches to be published. Before this process has threads, or enters a namespace.

        Never raises: one warning where that fails.
        """
        settings = self._settings
        publishes = self._publishes = timeline.is_written and is_wanted(settings)
        if not (publishes or keeps or settings.linger_s):
            return
        from bootseer.served.processes import ATTENDANT, start

        ready_name = new_ready_name()
        shown = replace(settings, store_url=public_url(settings.store_url))
        process = ProcessId.of(os.getpid())
        slurm_job = os.environ.get("SLURM_JOB_ID", "")
        note = Note(shown, timeline.path, process, ready_name, slurm_job, publishes)
        identity = _identity(settings)
        try:
            folder = private_directory(starts_dir(settings.run_dir) / identity)
            _write(folder / f"{process.pid}{_NOTE}", note)
            if _is_attended(folder):
                # Else it sees the note by itself.
                state = read_state(folder)
                if state is not None:
                    state.process.kill(signal.SIGHUP)
            else:
                self._process = start(
                    ATTENDANT, settings.run_dir, identity=f"start-{identity}", copy=True
                )
                plan = _Plan(folder, settings.run_dir, settings.job, settings.store_url)
                self._process.tell(plan)
                self._process.go()
        except (BootseerError, OSError) as error:
            self._complain(error)
            return
        self._folder = folder
        add_ready_names(os.environ, ready_name)

    def complete(
        self, caches: Sequence["Kept"] = (), *, begun_ns: int = 0, preloads: bool = False
    ) -> None:
        """Hand over what is to be done for the job that this process becomes now; what lingers
        since earlier starts of the job goes, but for what this one uses. Never raises."""
        settings = self._settings
        try:
            attendant = self._hand_over(caches, begun_ns, preloads)
            if attendant is not None and settings.linger_s:
                from bootseer.served.cover_users import linger

                linger(settings.run_dir, attendant.pid)
        except (BootseerError, OSError) as error:
            self._complain(error)
            attendant = None
        if _has_left(settings.run_dir):
            with contextlib.suppress(OSError):
                release(settings, but=attendant)

    def _hand_over(
        self, caches: Sequence["Kept"], begun_ns: int, preloads: bool
    ) -> ProcessId | None:
        if self._folder is None:
            return None
        names = ("BOOTSEER_TIMELINE", "TRACEPARENT")
        left = _Left(
            [to_builtins(one) for one in caches],
            begun_ns,
            preloads,
            {name: os.environ[name] for name in names if name in os.environ},
            self._settings.linger_s,
        )
        _write(self._folder / f"{os.getpid()}{_LEFT}", left)
        process, self._process = self._process, None
        if process is not None:
            return process.wait(answer=_Attending).process
        state = read_state(self._folder)
        return state.process if state is not None else None

    def abandon(self) -> None:
        """The start has failed. What it leaves on its timeline is published all the same; where
        that is not wanted, nothing is left to be done. Never raises."""
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

    def _complain(self, error: Exception) -> None:
        lingers = ", and nothing lingers after this job" if self._settings.linger_s else ""
        self._say(f"warning: the timeline of this start stays on this node{lingers}: {error}")


def release(settings: Settings, but: ProcessId | None = None) -> None:
    """End what lingers for the job, but for what the process `but` keeps. Raises: OSError."""
    for _, state in attendants(settings.run_dir):
        # One whose job lives goes some time after that.
        is_over = state.user is None or not state.user.lives()
        if state.reference == settings.job and state.process != but and is_over:
            state.process.kill(signal.SIGTERM)
    if (settings.run_dir / "preload").is_dir():
        from bootseer.served.preload import launching

        launching.let_go(settings)


def _has_left(run_dir: Path) -> bool:
    """Return whether anything may linger on this node."""
    for name in ("mounts", "preload"):
        with contextlib.suppress(OSError):
            if os.listdir(run_dir / name):
                return True
    return False


def _identity(settings: Settings) -> str:
    parts = (settings.job, settings.submission, str(settings.attempt), settings.node)
    return sha256("\0".join(parts).encode()).hexdigest()[:16]


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
    def took(self, answer: bytes) -> None: ...


class _Launcher(Struct, eq=False):
    note: Note
    has_left: bool = False
    caches: "CachesDuty | None" = None


class _Attendance:
    """The launchers of one start on this node, and what is to be done for them."""

    def __init__(self, plan: _Plan) -> None:
        from bootseer.profile.publish.duty import TimelineDuty

        self._plan = plan
        self._folder = plan.folder
        self._timeline = TimelineDuty()
        self._duties: list[_Duty] = [self._timeline]
        self._running: dict[int, _Launcher] = {}
        """By a descriptor of the process."""
        self._listening: dict[int, tuple[ReadySocket, _Launcher]] = {}
        self._taken: list[Path] = []
        self._work: tuple[_Duty, Copy] | None = None
        self._linger_s = 0.0
        self._until_s = 0.0
        self._scratch_s = math.inf
        self._pause_s = _LOOK_FIRST_S
        self._state = MountState(
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

    def take_notes(self) -> bool:
        """Take in launchers that came since. Return whether there are any."""
        new = False
        for path in sorted(self._folder.glob(f"*{_NOTE}")):
            with contextlib.suppress(OSError, BootseerError, ValueError):
                path = path.rename(path.with_suffix(f".{len(self._taken)}{_TAKEN}"))
                self._taken.append(path)
                new = True
                self._take(_read_note(path, self._plan.store_url))
        return new

    def _take(self, note: Note) -> None:
        launcher = _Launcher(note)
        with contextlib.suppress(OSError):
            self._running[note.process.open()] = launcher
        if note.publishes:
            self._timeline.add(note)
        listener = ReadySocket(note.ready_name)
        self._listening[listener.fileno()] = listener, launcher

    def _look_at_left(self, launcher: _Launcher) -> None:
        path = self._folder / f"{launcher.note.process.pid}{_LEFT}"
        if launcher.has_left or not path.exists():
            return
        launcher.has_left = True
        self._taken.append(path)
        with contextlib.suppress(OSError, BootseerError, ValueError):
            left = from_line(path.read_bytes()[:_FILE_BYTES_MAX], _Left)
            self._linger_s = max(self._linger_s, left.linger_s)
            if left.caches or left.preloads:
                from bootseer.launch.caches.duty import CachesDuty
                from bootseer.launch.caches.run import Kept

                launcher.caches = CachesDuty(
                    launcher.note.settings,
                    from_builtins(left.caches, tuple[Kept, ...]),
                    left.begun_ns,
                    left.variables,
                    preloads=left.preloads,
                )
                self._duties.append(launcher.caches)

    def _ready(self, launcher: _Launcher) -> None:
        self._look_at_left(launcher)
        self._timeline.ready()
        if launcher.caches is not None:
            launcher.caches.ready()

    def _ended(self, descriptor: int) -> None:
        launcher = self._running.pop(descriptor)
        os.close(descriptor)
        self._look_at_left(launcher)
        if launcher.caches is not None:
            launcher.caches.over()
        if not self._running:
            self._over()
        elif self._state.user == launcher.note.process:
            self._tell()

    def _over(self) -> None:
        """All jobs have ended."""
        self._timeline.over()
        if self._linger_s:
            now_s = time.monotonic()
            self._until_s = now_s + self._linger_s
            self._scratch_s = now_s
        self._tell()

    def _tell(self) -> None:
        """Write what `bootseer status` shows, and later starts act upon."""
        user = next((one.note.process for one in self._running.values()), None)
        until_ns = 0
        if self._until_s:
            until_ns = time.time_ns() + int((self._until_s - time.monotonic()) * 1e9)
        self._state = replace(self._state, user=user, until_ns=until_ns)
        with contextlib.suppress(BootseerError):
            write_state(self._folder, self._state)

    def _released(self) -> None:
        """Somebody wants what lingers to go: the last work is done, and then it does."""
        for descriptor in tuple(self._running):
            self._ended(descriptor)
        self._until_s = 0.0

    # ---- the loop -----------------------------------------------------------------------------

    def run(self, report: "Report", wake: int) -> None:
        """Until all is done that is to be expected."""
        self.take_notes()
        self._tell()
        report.ready(_Attending(self._state.process))
        if not self._running:
            self._over()
        while self._goes_on():
            for one in wait_readable(
                [
                    wake,
                    *self._running,
                    *self._listening,
                    *([self._work[1].fileno()] if self._work else []),
                ],
                self._wait_s(),
            ):
                self._hear(one, wake)
            if time.monotonic() >= self._scratch_s:
                self._clear_scratch()
            self._work_on()

    def _hear(self, one: int, wake: int) -> None:
        if one == wake:
            if not _ENDING.isdisjoint(os.read(wake, 4096)):
                self._released()
            elif self.take_notes():
                self._tell()
        elif one in self._running:
            self._ended(one)
        elif one in self._listening:
            listener, launcher = self._listening[one]
            if listener.take():
                del self._listening[one]
                listener.close()
                self._ready(launcher)
        elif self._work is not None and self._work[1].hear():
            self._take_result()

    def _work_on(self) -> None:
        if self._work is not None:
            if self._work[1].left_s <= 0:
                self._take_result()
            return
        for duty in self._duties:
            if duty.due_s() <= time.monotonic() and duty.begin():
                # Of launchers whose note nobody has told of.
                self.take_notes()
                self._work = duty, Copy(partial(_work, duty), duty.limit_s)
                return

    def _take_result(self) -> None:
        assert self._work is not None
        duty, copy = self._work
        self._work = None
        duty.took(copy.result())

    def _goes_on(self) -> bool:
        is_at_work = self._work is not None or any(one.due_s() < math.inf for one in self._duties)
        if self._running:
            for launcher in self._running.values():
                self._look_at_left(launcher)
            waits = self._linger_s or any(
                not one.has_left or one.caches is not None for one in self._running.values()
            )
            return is_at_work or bool(waits) or not self._timeline.is_over
        if self._until_s:
            # A copy that works ends by itself.
            return time.monotonic() < self._until_s
        return is_at_work

    def _wait_s(self) -> float | None:
        times = [duty.due_s() for duty in self._duties] if self._work is None else []
        times.append(self._scratch_s)
        now_s = time.monotonic()
        if self._work is not None:
            times.append(now_s + self._work[1].left_s)
        if self._until_s:
            times.append(self._until_s)
        wait_s = min(times) - now_s
        return None if wait_s == math.inf else max(wait_s, 0.0)

    def _clear_scratch(self) -> None:
        """Remove what containers wrote that are over; processes that a job has left may use it
        yet."""
        from bootseer.served.ending import remove_ended_scratch

        self._scratch_s = math.inf
        if not remove_ended_scratch(self._plan.run_dir):
            self._scratch_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LOOK_MAX_S)

    def forget_notes(self) -> None:
        """Remove the notes: all is published, or will not be."""
        for path in (*self._taken, self._folder / "state.json"):
            path.unlink(missing_ok=True)


def _work(duty: _Duty) -> bytes:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Whatever becomes of who waits for it.
    signal.alarm(math.ceil(duty.limit_s))
    return duty.work()


def _attend(line: bytes, report: "Report") -> None:
    plan = from_line(line, _Plan)
    os.nice(_NICENESS)
    wake, told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in (*_ENDING, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    while True:
        try:
            lock = lock_file(plan.folder / _LOCK, 0)
        except TimeoutError:
            state = read_state(plan.folder)
            report.ready(_Attending(state.process if state else ProcessId(0, "")))
            return
        attendance = _Attendance(plan)
        attendance.run(report, wake)
        attendance.forget_notes()
        (plan.folder / _LOCK).unlink(missing_ok=True)
        os.close(lock)
        try:
            plan.folder.rmdir()
        except OSError:
            # A launcher came this moment, and may have found the lock taken.
            if any(plan.folder.glob(f"*{_NOTE}")):
                continue
        break
    in_a_copy(lambda: _sweep(plan.run_dir), _SWEEP_S)


def publish_left(settings: Settings, slurm_job: str, limit_s: float) -> None:
    """Publish the timelines of a job of Slurm that is over, as far as its end has killed who would
    have done so; for at most so long each. For a process without threads."""
    from bootseer.profile.publish.duty import TimelineDuty

    with contextlib.suppress(FileNotFoundError):
        for folder in starts_dir(settings.run_dir).iterdir():
            with contextlib.suppress(OSError):
                lock = lock_file(folder / _LOCK, 0)
                duty = TimelineDuty(limit_s)
                taken = []
                for path in sorted(folder.iterdir()):
                    with contextlib.suppress(OSError, BootseerError, ValueError):
                        if path.suffix in (_NOTE, _TAKEN):
                            note = _read_note(path, settings.store_url)
                            if note.slurm_job == slurm_job:
                                taken.append(path)
                                if note.publishes:
                                    duty.add(note)
                duty.publish()
                for path in taken:
                    path.unlink(missing_ok=True)
                if not any(one.suffix in (_NOTE, _TAKEN) for one in folder.iterdir()):
                    for path in folder.iterdir():
                        path.unlink()
                os.close(lock)
                folder.rmdir()


def _read_note(path: Path, store_url: str) -> Note:
    """Raises: OSError, CorruptError, ValueError."""
    note = from_line(path.read_bytes()[:_FILE_BYTES_MAX], Note)
    if public_url(store_url) == note.settings.store_url:
        note = replace(note, settings=replace(note.settings, store_url=store_url))
    return note


def _sweep(run_dir: Path) -> bytes:
    """Remove what killed processes left, and logs that nobody has read. Never raises."""
    from bootseer.linux.removal import remove_tree
    from bootseer.served.ending import sweep

    sweep(run_dir)
    before_s = time.time() - _KEPT_S
    with contextlib.suppress(OSError):
        for old in (*starts_dir(run_dir).iterdir(), *(run_dir / "logs").glob("start-*.log")):
            with contextlib.suppress(OSError):
                status = old.stat(follow_symlinks=False)
                if old.suffix == ".log":
                    is_old = status.st_mtime < before_s or not status.st_size
                    if is_old and not is_written(old):
                        old.unlink()
                elif status.st_mtime < before_s:
                    # The process that serves it holds the lock.
                    os.close(lock_file(old / _LOCK, 0))
                    remove_tree(old)
    return b""


def main() -> int:
    """The exit code: 0 at its end."""
    from bootseer.served.processes import ATTENDANT, serve

    return serve(ATTENDANT, _attend)


if __name__ == "__main__":
    sys.exit(main())
