"""Notes what a Python process does on the timeline, by wrapping functions that `frameworks` names.

Runs in the training process, with nothing but the standard library. A function is wrapped when its
module has been loaded; each wrapper calls the original whatever goes wrong in its own part, and
does nothing else once the process is ready. Main thread only: others call the originals at once.
"""

import atexit
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootseer.profile.collect.frameworks import HOOKS
from bootseer.timeline.figures import Sample, difference, sample
from bootseer.timeline.otlp import BARRIER, IMPORTS_EVENT, PARENT, ROLE, Value
from bootseer.timeline.recorder import (
    LAUNCHED_VARIABLE,
    PROCESS_VARIABLE,
    Span,
    Timeline,
    current,
    program_name,
    ready,
)

if TYPE_CHECKING:
    from bootseer.profile.collect.imports import Collector

_TICKS = os.sysconf("SC_CLK_TCK")

_NOTHING: Mapping[str, Value] = {}
# Of a node's processes one says what it imported; the others import the same.
_MODULES_MAX = 150


class Notes:
    """What this process has noted so far."""

    def __init__(self, collector: "Collector") -> None:
        self._collector = collector
        self.is_over = False
        """The process is ready: nothing is noted any more."""
        self._open: list[Span] = []
        self._counts: dict[str, int] = {}
        self._wrapped: set[str] = set()
        self._timeline = _join()
        self._figures: Sample = {}
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.finish)
        self._since = time.perf_counter_ns() - time.time_ns()
        began = _began_ns() or collector.began_ns
        # With all that it did before anything was worth noting.
        until = collector.quiet_until_ns or time.time_ns()
        self._timeline.note("python start", began, max(0, until - began))

    def _forked(self) -> None:
        """A child by fork is another process, which begins with nothing open."""
        self._timeline = _join()
        self._open.clear()

    # -- imports

    def begin_import(self, package: str, began_ns: int) -> Span | None:
        return self.begin(f"import {package}", since_ns=began_ns)

    def end_import(self, span: Span) -> None:
        self.end(span)

    def note_import(self, package: str, begin_ns: int, took_ns: int) -> None:
        """An import that turned out to be slow."""
        # Nobody knew when it began: what was counted since the last stage, which is a little more.
        before, self._figures = self._figures, sample()
        figures = difference(before, self._figures)
        self._place().note(f"import {package}", begin_ns - self._since, took_ns, figures)

    def _place(self) -> Timeline:
        """The timeline, below the stage that is open."""
        return self._timeline.below(self._open[-1]) if self._open else self._timeline

    # -- stages

    def begin(
        self, name: str, attributes: dict[str, Any] | None = None, since_ns: int = 0
    ) -> Span | None:
        """Begin a stage inside the one that is open, now or `since_ns`; None if not noted."""
        if self.is_over or threading.current_thread() is not threading.main_thread():
            return None
        span = self._place().span(name, attributes, since_ns=since_ns)
        self._open.append(span)
        self._figures = span.figures
        return span

    def end(
        self,
        span: Span | None,
        error: BaseException | None = None,
        attributes: Mapping[str, Value] = _NOTHING,
    ) -> None:
        """End a stage, and those inside it that nobody ended."""
        # A child by fork ends nothing that its parent began.
        if span is None or span not in self._open:
            return
        while self._open.pop() is not span:
            pass
        for key, value in attributes.items():
            span.set(key, value)
        span.end(error=error)
        self._figures = span.figures

    def count(self, name: str) -> int:
        """How often this was asked with this name, with this time."""
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._counts[name]

    def wrap(
        self,
        owner: Any,
        attribute: str,
        name: str,
        barrier: "Callable[..., str | None] | None" = None,
        *,
        first_only: bool = False,
    ) -> None:
        """Make a stage of each call; of the first one only where `barrier` or `first_only` says so.

        `barrier` gets the call's arguments and returns what all who meet there have in common, or
        None where this call is no meeting of its own.
        """
        original = getattr(owner, attribute)
        wrapper = self.noting(original, name, barrier, first_only=first_only)
        setattr(owner, attribute, wrapper)
        # Where it was loaded ahead, its packages have taken the original over already.
        package = owner.__name__
        while package := package.rpartition(".")[0]:
            outer = sys.modules.get(package)
            if getattr(outer, attribute, None) is original:
                setattr(outer, attribute, wrapper)

    def noting(
        self,
        original: Callable[..., Any],
        name: str,
        barrier: "Callable[..., str | None] | None" = None,
        *,
        first_only: bool = False,
    ) -> Callable[..., Any]:
        """The function whose calls are stages; see `wrap`."""
        has_run = False

        @functools.wraps(original)
        def wrapper(*args: Any, **named: Any) -> Any:
            nonlocal has_run
            if self.is_over or (first_only and has_run):
                return original(*args, **named)
            has_run = True
            span = None
            try:
                key = barrier(*args, **named) if barrier is not None else ""
                if key is not None:
                    span = self.begin(name, {BARRIER: key} if key else None)
            except Exception:
                span = None
            try:
                result = original(*args, **named)
            except BaseException as error:
                self.end(span, error)
                raise
            self.end(span)
            return result

        return wrapper

    # -- frameworks

    def loaded(self, name: str, module: Any) -> None:
        """A module was imported; never raises."""
        hook = HOOKS.get(name)
        if hook is None or self.is_over or name in self._wrapped:
            return
        # What is imported by the way is the module, not its package.
        module = sys.modules.get(name, module)
        if getattr(module.__spec__, "_initializing", False):
            return  # another module of a circle has asked for it; it is loaded later
        self._wrapped.add(name)
        try:
            hook(self, module)
        except Exception:
            return

    def look(self) -> None:
        """Modules may have been loaded unseen: in a fork of a preloader many are at once."""
        for name in HOOKS:
            if name in sys.modules:
                self.loaded(name, sys.modules[name])

    # -- the end

    def ready(self) -> None:
        """The first step is done: nothing is noted from here on."""
        ready()

    def finish(self) -> None:
        """Write the imports, and let go of what was wrapped."""
        if self.is_over:
            return
        self.is_over = True
        self._collector.end()
        self._collector.record()
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        slowest = sorted(self._collector.modules, key=lambda one: -one[3])[:_MODULES_MAX]
        modules = sorted(slowest, key=lambda one: one[2])
        rows = [
            [name, depth, (begin - self._since) // 1000, took // 1000]
            for name, depth, begin, took in modules
        ]
        self._timeline.event(IMPORTS_EVENT, json.dumps(rows, separators=(",", ":")))


def _join() -> Timeline:
    """The timeline, for a process that is a new one; child processes find their parent by it."""
    parent = os.environ.get(PROCESS_VARIABLE, "")
    os.environ[PROCESS_VARIABLE] = os.urandom(6).hex()
    timeline = current()
    if timeline is None:
        raise LookupError("there is no timeline")
    return timeline.with_resource({PARENT: parent, ROLE: program_name()})


def _began_ns() -> int | None:
    """When this process began to be what it is, ns since 1970.

    The launcher that became this process says when; of others the kernel says when they were
    started, in ticks. Source: proc(5), starttime.
    """
    pid, _, launched = os.environ.get(LAUNCHED_VARIABLE, "").partition(":")
    if pid == str(os.getpid()):
        return int(launched)
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError):
        return None
    # The end of the tick: who started this process had then done what it did before.
    return time.time_ns() - max(0, since_boot_ns - (ticks + 1) * 1_000_000_000 // _TICKS)
