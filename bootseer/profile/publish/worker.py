"""The process that publishes the timeline of a start on a node: `python -m ... FOLDER`.

It waits until the start is ready or over, holding little memory. Each time that it publishes, a
copy of it does so and is killed when it takes too long: a store or a collector that hangs costs
nobody else anything. It ends by itself. `begin` says what it is handed.
"""

import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from bootseer.base.documents import from_line, to_line
from bootseer.base.redact import public_url, redact
from bootseer.errors import BootseerError
from bootseer.linux.locks import is_written, lock_file
from bootseer.linux.processes import ProcessId, in_a_copy, wait_readable
from bootseer.profile.publish.begin import (
    LOCK,
    NOTE_SUFFIX,
    STORE_VARIABLE,
    TAKEN_SUFFIX,
    Note,
    Round,
    notes_dir,
)
from bootseer.profile.publish.schedule import Schedule
from bootseer.served.figures_file import FiguresFile, file_name
from bootseer.served.ready_socket import ReadySocket
from bootseer.transfer.policy import dice

_log = logging.getLogger(__name__)

_NICENESS = 15
_QUIET_S, _QUIET_S_MAX = 1.0, 10.0
"""Servers note what they did when the job is gone."""
_ROUND_S = 120.0
_SHARE = 0.2
"""Of a round, for one wait for the store: there are several."""
_KEPT_S = 2 * 86400.0
_NOTE_BYTES_MAX = 1 << 20


class _Follower:
    """The launchers of one start on this node, as far as they have come."""

    def __init__(self, folder: Path, round_s: float = 0.0) -> None:
        self._folder = folder
        self._round_s = round_s
        self._taken: list[Path] = []
        self._notes: list[Note] = []
        self._running: dict[int, Note] = {}
        """By a descriptor of the process."""
        self._listening: dict[int, ReadySocket] = {}
        self._published: list[tuple[Path, int]] = []
        """Path and size of each timeline in the last round that succeeded."""
        self._sent: dict[str, int] = {}
        self._said: set[str] = set()
        self._figures: FiguresFile | None = None
        self._schedule = Schedule(time.monotonic(), dice())

    def take_notes(self) -> bool:
        """Take in launchers that came since; False where there are none."""
        new = False
        for path in sorted(self._folder.glob(f"*{NOTE_SUFFIX}")):
            with contextlib.suppress(OSError, BootseerError, ValueError):
                path = path.rename(path.with_suffix(f".{len(self._taken)}{TAKEN_SUFFIX}"))
                new = True
                self._taken.append(path)
                self._take(_read_note(path))
        return new

    def publish_left(self, slurm_job: str) -> None:
        """Publish once what launchers of this job of Slurm have left, who are gone."""
        for path in sorted(self._folder.iterdir()):
            with contextlib.suppress(OSError, BootseerError, ValueError):
                if path.suffix in (NOTE_SUFFIX, TAKEN_SUFFIX):
                    note = _read_note(path)
                    if note.slurm_job == slurm_job:
                        self._taken.append(path)
                        # So that a store that does not answer is said to, before the round ends.
                        wait_s = min(note.settings.deadline_s, _SHARE * self._round_s)
                        self._take(
                            replace(note, settings=replace(note.settings, deadline_s=wait_s))
                        )
        if self._notes:
            self._publish()

    def forget_notes(self) -> None:
        """Remove them: all is published, or will not be."""
        for path in self._taken:
            path.unlink(missing_ok=True)

    def _take(self, note: Note) -> None:
        url = os.environ.get(STORE_VARIABLE, "")
        if public_url(url) == note.settings.store_url:
            note = replace(note, settings=replace(note.settings, store_url=url))
        known = {one.settings.rank for one in self._notes}
        if note.settings.rank in known:
            # A task that was started again: it is another start, or takes the other's place.
            self._publish()
            # The object keeps the name of the first rank.
            rank, is_same_start = note.settings.rank, bool(note.settings.submission)
            others = self._notes if is_same_start else []
            self._notes = [note if one.settings.rank == rank else one for one in others] or [note]
        else:
            self._notes.append(note)
        if self._figures is None and note.settings.metrics_dir is not None:
            # Here, since the slot is to be held for as long as this process lives.
            self._figures = FiguresFile(note.settings.metrics_dir)
            self._figures.take(file_name("start", note.settings.job))
        self._schedule = Schedule(time.monotonic(), dice())
        with contextlib.suppress(OSError):
            self._running[ProcessId(note.pid, note.pid_started).open()] = note
        listener = ReadySocket(note.ready_name)
        self._listening[listener.fileno()] = listener

    def _forget(self, process: int) -> None:
        del self._running[process]
        os.close(process)

    def follow(self) -> None:
        """Until all launchers' jobs are over, or nothing new is to be expected."""
        while self._running and not self._schedule.is_over:
            left_s = self._schedule.next_s - time.monotonic()
            for one in wait_readable([*self._running, *self._listening], max(0.0, left_s)):
                if one in self._running:
                    self._forget(one)
                elif self._listening[one].take():
                    self._listening.pop(one).close()
                    self._schedule.ready(time.monotonic())
            if time.monotonic() >= self._schedule.next_s:
                self.take_notes()
                self._publish()
                self._schedule.looked(time.monotonic())
        self._wait_quiet()
        self._publish()

    def _wait_quiet(self) -> None:
        deadline_s = time.monotonic() + _QUIET_S_MAX
        before: list[tuple[Path, int]] = []
        while (timelines := self._timelines()) != before and time.monotonic() < deadline_s:
            before = timelines
            time.sleep(_QUIET_S)

    def _timelines(self) -> list[tuple[Path, int]]:
        """Return the path and the size of each timeline that is there.

        Sizes alone do not tell whether there is something new: a rank that is started again
        has another file, which may have as many bytes as its first one.
        """
        found = []
        for note in self._notes:
            with contextlib.suppress(OSError):
                found.append((note.timeline, note.timeline.stat().st_size))
        return found

    def _publish(self) -> None:
        """Publish what there is, if there is something new."""
        timelines = self._timelines()
        if timelines == self._published:
            return
        notes, sent, figures = self._notes, self._sent, self._figures

        def work() -> Round:
            from bootseer.profile.publish.round import publish

            return publish(notes, sent, figures)

        found = round_in_a_copy(work, self._round_s or _ROUND_S + notes[0].settings.deadline_s)
        self._sent = {**self._sent, **found.sent}
        for whom, problem in found.problems.items():
            if whom not in self._said:
                self._said.add(whom)
                _log.warning("%s: %s", whom, redact(problem))
        if not found.problems:
            self._published = timelines


def round_in_a_copy(work: Callable[[], Round], limit_s: float) -> Round:
    """What `work` returns in a copy of this process, which is killed after `limit_s`."""

    def line() -> bytes:
        try:
            return to_line(work()).encode("ascii")
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            return to_line(Round(problems={"publishing": problem})).encode("ascii")

    with contextlib.suppress(ValueError, BootseerError):
        if data := in_a_copy(line, limit_s):
            return from_line(data, Round)
    problem = f"it ended without a word, or took {limit_s:g} s"
    return Round(problems={"publishing": problem})


def main(arguments: Sequence[str]) -> int:
    """Entry point of the process."""
    os.nice(_NICENESS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s timeline: %(message)s")
    folder = Path(arguments[0])
    while True:
        try:
            lock = lock_file(folder / LOCK, 0)
        except TimeoutError:
            return 0
        follower = _Follower(folder)
        while follower.take_notes():
            follower.follow()
        follower.forget_notes()
        (folder / LOCK).unlink(missing_ok=True)
        os.close(lock)
        try:
            folder.rmdir()
        except OSError:
            # A launcher came this moment, and may have found the lock taken.
            if any(folder.glob(f"*{NOTE_SUFFIX}")):
                continue
        _sweep(folder.parent)
        return 0


def publish_left(run_dir: Path, slurm_job: str, limit_s: float) -> None:
    """Publish the timelines of a job of Slurm that is over, as far as its end has killed who would
    have done so; for at most so long each. For a process without threads; STORE_VARIABLE is as a
    worker has it."""
    with contextlib.suppress(FileNotFoundError):
        for folder in notes_dir(run_dir).iterdir():
            with contextlib.suppress(OSError):
                lock = lock_file(folder / LOCK, 0)
                follower = _Follower(folder, limit_s)
                follower.publish_left(slurm_job)
                follower.forget_notes()
                (folder / LOCK).unlink(missing_ok=True)
                os.close(lock)
                folder.rmdir()


def _read_note(path: Path) -> Note:
    """Raises: OSError, CorruptError, ValueError."""
    return from_line(path.read_bytes()[:_NOTE_BYTES_MAX], Note)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left, and logs that nobody has read. Never raises."""
    before_s = time.time() - _KEPT_S
    with contextlib.suppress(OSError):
        for old in (*folder.iterdir(), *(folder.parent / "logs").glob("timeline-*.log")):
            with contextlib.suppress(OSError):
                status = old.stat(follow_symlinks=False)
                if old.suffix == ".log":
                    is_old = status.st_mtime < before_s or not status.st_size
                    if is_old and not is_written(old):
                        old.unlink()
                elif status.st_mtime < before_s:
                    # The process that serves it holds the lock, for a day at most.
                    os.close(lock_file(old / LOCK, 0))
                    shutil.rmtree(old)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
