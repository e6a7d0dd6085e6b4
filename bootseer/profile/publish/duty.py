"""The duty to publish the timeline of a start on a node: when it is due, and what is done then.

Publishing runs in a copy of the process that has the duty, and is killed when it takes too long: a
store or a collector that hangs costs nobody else anything. One thread.
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
from bootseer.linux.processes import in_a_copy
from bootseer.profile.publish.note import Note, Round
from bootseer.profile.publish.schedule import Schedule
from bootseer.served.figures_file import FiguresFile, file_name
from bootseer.transfer.policy import dice

_log = logging.getLogger(__name__)

_QUIET_S, _QUIET_S_MAX = 1.0, 10.0
"""Servers note what they did when the job is gone."""
_ROUND_S = 120.0
_SHARE = 0.2
"""Of a round, for one wait for the store: there are several."""


class TimelineDuty:
    """The timelines of one start's launchers on this node, as far as they are published."""

    def __init__(self, round_s: float = 0.0) -> None:
        """`round_s`: what one round may take; by default enough for all deadlines in it."""
        self._round_s = round_s
        self._notes: list[Note] = []
        self._published: list[tuple[Path, int]] = []
        """Path and size of each timeline in the last round that succeeded."""
        self._under_way: list[tuple[Path, int]] = []
        self._sent: dict[str, int] = {}
        self._said: set[str] = set()
        self._figures: FiguresFile | None = None
        self._schedule = Schedule(time.monotonic(), dice())
        self._quiet_until_s = 0.0
        self._look_s = 0.0
        self._seen: list[tuple[Path, int]] = []
        self._is_done = False

    @property
    def limit_s(self) -> float:
        """What `work` may take."""
        return self._round_s or _ROUND_S + max(one.settings.deadline_s for one in self._notes)

    @property
    def is_over(self) -> bool:
        """Whether nothing new is to be expected of launchers that run."""
        return not self._notes or self._schedule.is_over

    def add(self, note: Note) -> None:
        """Publish this launcher's timeline, too."""
        if self._round_s:
            # So that a store that does not answer is said to, before the round ends.
            wait_s = min(note.settings.deadline_s, _SHARE * self._round_s)
            note = replace(note, settings=replace(note.settings, deadline_s=wait_s))
        known = {one.settings.rank for one in self._notes}
        if note.settings.rank in known:
            # A task that was started again: it is another start, or takes the other's place.
            self.publish()
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
        self._is_done, self._look_s = False, 0.0

    def ready(self) -> None:
        """A launcher's job is ready."""
        self._schedule.ready(time.monotonic())

    def over(self) -> None:
        """All launchers have ended: once their servers are quiet, the last round follows."""
        now_s = time.monotonic()
        self._seen = self._timelines()
        self._quiet_until_s, self._look_s = now_s + _QUIET_S_MAX, now_s + _QUIET_S

    def due_s(self) -> float:
        """Return when `work` is due, or this is to be asked again, by the monotonic clock."""
        if not self._notes or self._is_done:
            return math.inf
        if not self._look_s:
            return math.inf if self._schedule.is_over else self._schedule.next_s
        now_s = time.monotonic()
        if now_s >= self._look_s:
            timelines = self._timelines()
            if timelines != self._seen and now_s < self._quiet_until_s:
                self._seen, self._look_s = timelines, now_s + _QUIET_S
        return self._look_s

    def work(self) -> bytes:
        """Publish what there is, in a copy; return a `Round`. Never raises."""
        try:
            from bootseer.profile.publish.round import publish

            done = publish(self._notes, self._sent, self._figures)
        except Exception as error:
            done = Round(problems={"publishing": f"{type(error).__name__}: {error}"})
        return to_line(done).encode("ascii")

    def begin(self) -> bool:
        """Return whether there is something new, for which `work` is to run now."""
        self._under_way = self._timelines()
        if self._under_way == self._published:
            self._looked()
            return False
        return True

    def took(self, answer: bytes) -> None:
        """Take what `work` has returned; empty where it was killed."""
        found = Round(problems={"publishing": f"it ended, or took {self.limit_s:g} s"})
        with contextlib.suppress(ValueError, BootseerError):
            if answer:
                found = from_line(answer, Round)
        self._sent = {**self._sent, **found.sent}
        for whom, problem in found.problems.items():
            if whom not in self._said:
                self._said.add(whom)
                _log.warning("%s: %s", whom, redact(problem))
        if not found.problems:
            self._published = self._under_way
        self._looked()

    def publish(self) -> None:
        """Publish what is new, and wait for that."""
        if self._notes and self.begin():
            self.took(in_a_copy(self.work, self.limit_s))

    def _looked(self) -> None:
        if self._look_s:
            self._is_done = True
        else:
            self._schedule.looked(time.monotonic())

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
