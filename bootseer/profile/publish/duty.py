"""Duty of the attendant to publish a start's timeline: when a round is due, and the round itself.

A round runs in a copy of the process that has the duty, and is killed when it takes too long, so
that a store or collector that hangs affects nothing else. One thread.
"""

import contextlib
import logging
import math
import time
from pathlib import Path

from msgspec.structs import replace

from bootseer.base.documents import from_line, to_line
from bootseer.base.redact import redact
from bootseer.errors import BootseerError
from bootseer.linux.processes import run_forked
from bootseer.profile.publish.note import LauncherNote, RoundResult
from bootseer.served.figures_file import FiguresFile, file_name
from bootseer.transfer.policy import random_fraction

_log = logging.getLogger(__name__)

_QUIET_S, _QUIET_S_MAX = 1.0, 10.0
"""Time without new lines before the last round: servers still write after the job's end."""
_ROUND_S = 120.0
_WAIT_SHARE = 0.2
"""Share of a round for one wait for the store; a round has several."""
_FIRST_S = 30.0
_LONGEST_S = 900.0
_SETTLE_S = 2.0
_AFTER_READY_S = 600.0
_AT_MOST_S = 24 * 3600.0


class Schedule:
    """Times of the rounds for one start on one node. Pure: clock and random number are arguments.

    Until the start is ready the waits double: a start that hangs can be explained from elsewhere,
    and ten thousand that hang cause little load. Then the waits begin anew, since other ranks
    follow soon.
    """

    def __init__(self, now_s: float, fraction: float) -> None:
        """Plan the first round; a random `fraction` in [0, 1) spreads nodes that start at once."""
        self._wait_s = _FIRST_S
        self._is_ready = False
        self._until_s = now_s + _AT_MOST_S
        self.next_s = now_s + _FIRST_S * (0.5 + 0.5 * fraction)

    def on_ready(self, now_s: float) -> None:
        """Plan a round soon, since a process of the start is ready."""
        if not self._is_ready:
            self._is_ready = True
            self._wait_s = _SETTLE_S
            self._until_s = now_s + _AFTER_READY_S
            self.next_s = now_s + _SETTLE_S

    def on_round(self, now_s: float) -> None:
        """Plan the next round, since one has ended."""
        self._wait_s = min(2 * self._wait_s, _LONGEST_S)
        self.next_s = now_s + self._wait_s

    @property
    def is_over(self) -> bool:
        """Whether there is no further round."""
        return self.next_s > self._until_s


class TimelineDuty:
    """Publishing of the timelines of one start's launchers on this node."""

    def __init__(self, round_s: float = 0.0) -> None:
        """Limit one round to `round_s`; by default to the sum of all deadlines in it."""
        self._round_s = round_s
        self._notes: list[LauncherNote] = []
        self._published: list[tuple[Path, int]] = []
        """Path and size of each timeline in the last round that succeeded."""
        self._in_progress: list[tuple[Path, int]] = []
        self._sent: dict[str, int] = {}
        self._reported: set[str] = set()
        self._figures: FiguresFile | None = None
        self._schedule = Schedule(time.monotonic(), random_fraction())
        self._quiet_until_s = 0.0
        self._check_s = 0.0
        self._seen: list[tuple[Path, int]] = []
        self._is_done = False

    @property
    def limit_s(self) -> float:
        """Time limit for `work`."""
        return self._round_s or _ROUND_S + max(one.settings.deadline_s for one in self._notes)

    @property
    def is_over(self) -> bool:
        """Whether no launcher's timeline will be published before the launcher ends."""
        return not self._notes or self._schedule.is_over

    def add(self, note: LauncherNote) -> None:
        """Publish the timeline of one more launcher."""
        if self._round_s:
            # Shorten the store's deadline, so that its failure is reported before the round ends.
            wait_s = min(note.settings.deadline_s, _WAIT_SHARE * self._round_s)
            note = replace(note, settings=replace(note.settings, deadline_s=wait_s))
        known = {one.settings.rank for one in self._notes}
        if note.settings.rank in known:
            # The task was restarted. It is another start, unless both have the same submission:
            # then it takes the place of the first one.
            self.publish()
            # In its old place, since the object in the store is named by the first note.
            rank, is_same_start = note.settings.rank, bool(note.settings.submission)
            others = self._notes if is_same_start else []
            self._notes = [note if one.settings.rank == rank else one for one in others] or [note]
        else:
            self._notes.append(note)
        if self._figures is None and note.settings.metrics_dir is not None:
            # In this process, not in the copy: the slot is held as long as the process lives.
            self._figures = FiguresFile(note.settings.metrics_dir)
            self._figures.reserve(file_name("start", note.settings.job))
        self._schedule = Schedule(time.monotonic(), random_fraction())
        self._is_done, self._check_s = False, 0.0

    def on_ready(self) -> None:
        """Plan a round soon, since a launcher's job is ready."""
        self._schedule.on_ready(time.monotonic())

    def on_exit(self) -> None:
        """Plan the last round for when the servers are quiet, since all launchers have ended."""
        now_s = time.monotonic()
        self._seen = self._timelines()
        self._quiet_until_s, self._check_s = now_s + _QUIET_S_MAX, now_s + _QUIET_S

    def due_s(self) -> float:
        """Return when to call `begin`, or this method again, as a time of the monotonic clock."""
        if not self._notes or self._is_done:
            return math.inf
        if not self._check_s:
            return math.inf if self._schedule.is_over else self._schedule.next_s
        now_s = time.monotonic()
        if now_s >= self._check_s:
            timelines = self._timelines()
            if timelines != self._seen and now_s < self._quiet_until_s:
                self._seen, self._check_s = timelines, now_s + _QUIET_S
        return self._check_s

    def work(self) -> bytes:
        """Publish the timelines; return an encoded `RoundResult`. Never raises."""
        try:
            from bootseer.profile.publish.round import publish

            done = publish(self._notes, self._sent, self._figures)
        except Exception as error:
            done = RoundResult(problems={"publishing": f"{type(error).__name__}: {error}"})
        return to_line(done).encode("ascii")

    def begin(self) -> bool:
        """Begin a round. Return whether there are new lines, so that `work` is to run."""
        self._in_progress = self._timelines()
        if self._in_progress == self._published:
            self._plan_next()
            return False
        return True

    def take_result(self, answer: bytes) -> None:
        """Store the result of `work`; empty if the copy was killed."""
        found = RoundResult(
            problems={"publishing": f"the round was killed, or took longer than {self.limit_s:g} s"}
        )
        with contextlib.suppress(ValueError, BootseerError):
            if answer:
                found = from_line(answer, RoundResult)
        self._sent = {**self._sent, **found.sent}
        for source, problem in found.problems.items():
            if source not in self._reported:
                self._reported.add(source)
                _log.warning("%s: %s", source, redact(problem))
        if not found.problems:
            self._published = self._in_progress
        self._plan_next()

    def publish(self) -> None:
        """Publish new lines now, and wait for the end of the round."""
        if self._notes and self.begin():
            self.take_result(run_forked(self.work, self.limit_s))

    def _plan_next(self) -> None:
        if self._check_s:
            self._is_done = True
        else:
            self._schedule.on_round(time.monotonic())

    def _timelines(self) -> list[tuple[Path, int]]:
        """Return path and size of each timeline. A restarted rank has a file of another name."""
        found = []
        for note in self._notes:
            with contextlib.suppress(OSError):
                found.append((note.timeline, note.timeline.stat().st_size))
        return found
