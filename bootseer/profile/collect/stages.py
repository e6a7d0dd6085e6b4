"""Recording of a Python process's stages, by wrapping the functions that `frameworks` names.

Runs in the training process and uses only the standard library. A function is wrapped when its
module has been loaded. A wrapper always calls the original, whatever fails in its own part, and
does nothing else after the process is ready. Records calls of the main thread only.
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
from bootseer.timeline.kernel_figures import Sample, difference, sample
from bootseer.timeline.otlp import BARRIER, IMPORTS_EVENT, PARENT, ROLE, Value
from bootseer.timeline.recorder import (
    LAUNCHED_VARIABLE,
    PROCESS_VARIABLE,
    Span,
    Timeline,
    current,
    program_name,
)

if TYPE_CHECKING:
    from bootseer.profile.collect.imports import ImportCollector

_TICKS = os.sysconf("SC_CLK_TCK")

_NOTHING: Mapping[str, Value] = {}
# Longest list of slow imports. One process per node writes it, since all import the same.
_MODULES_MAX = 150


class ProcessStages:
    """Stages of this process, written to its timeline."""

    def __init__(self, collector: "ImportCollector") -> None:
        self._collector = collector
        self.is_finished = False
        """Whether recording has ended, since the process is ready."""
        self._open: list[Span] = []
        self._counts: dict[str, int] = {}
        self._wrapped: set[str] = set()
        self._timeline = _process_timeline()
        self._figures: Sample = {}
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.finish)
        self._since = time.perf_counter_ns() - time.time_ns()
        began = _began_ns() or collector.began_ns
        # The stage covers everything before the first recorded import.
        until = collector.first_noted_ns or time.time_ns()
        self._timeline.note("python start", began, max(0, until - began))

    def _forked(self) -> None:
        self._timeline = _process_timeline()
        self._open.clear()

    # -- imports

    def begin_import(self, package: str, began_ns: int) -> Span | None:
        return self.begin(f"import {package}", since_ns=began_ns)

    def note_import(self, package: str, begin_ns: int, took_ns: int) -> None:
        """Write an import that turned out to be slow."""
        # There is no sample from its begin: use the last stage's, which counts a little more.
        before, self._figures = self._figures, sample()
        figures = difference(before, self._figures)
        self._current().note(f"import {package}", begin_ns - self._since, took_ns, figures)

    def _current(self) -> Timeline:
        return self._timeline.below(self._open[-1]) if self._open else self._timeline

    # -- stages

    def begin(
        self, name: str, attributes: dict[str, Any] | None = None, since_ns: int = 0
    ) -> Span | None:
        """Begin a stage in the innermost open one, at `since_ns`; None if nothing is recorded."""
        if self.is_finished or threading.current_thread() is not threading.main_thread():
            return None
        span = self._current().span(name, attributes, since_ns=since_ns)
        self._open.append(span)
        self._figures = span.figures
        return span

    def end(
        self,
        span: Span | None,
        error: BaseException | None = None,
        attributes: Mapping[str, Value] = _NOTHING,
    ) -> None:
        """End a stage, and the stages inside it that are still open."""
        # A forked child must not end stages of its parent.
        if span is None or span not in self._open:
            return
        while self._open.pop() is not span:
            pass
        for key, value in attributes.items():
            span.set(key, value)
        span.end(error=error)
        self._figures = span.figures

    def count(self, name: str) -> int:
        """Return how often this was called with `name`, this call included."""
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
        """Replace a function by one that records each call, or only the first, as stage `name`.

        `barrier` gets the call's arguments; it returns a name that is equal for all processes that
        wait for each other in the call, or None if the call is not to be recorded.
        """
        original = getattr(owner, attribute)
        wrapper = self.recorded(original, name, barrier, first_only=first_only)
        setattr(owner, attribute, wrapper)
        # A preloaded package may have imported the original already: replace it there, too.
        package = owner.__name__
        while package := package.rpartition(".")[0]:
            outer = sys.modules.get(package)
            if getattr(outer, attribute, None) is original:
                setattr(outer, attribute, wrapper)

    def recorded(
        self,
        original: Callable[..., Any],
        name: str,
        barrier: "Callable[..., str | None] | None" = None,
        *,
        first_only: bool = False,
    ) -> Callable[..., Any]:
        """Return a function that calls `original` and records the call; see `wrap`."""
        has_run = False

        @functools.wraps(original)
        def wrapper(*args: Any, **named: Any) -> Any:
            nonlocal has_run
            if self.is_finished or (first_only and has_run):
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

    def on_loaded(self, name: str, module: Any) -> None:
        """Wrap the functions of a module that was imported. Never raises."""
        hook = HOOKS.get(name)
        if hook is None or self.is_finished or name in self._wrapped:
            return
        # The import system may return the top package instead of the module `name`.
        module = sys.modules.get(name, module)
        if getattr(module.__spec__, "_initializing", False):
            return  # in a circular import: this is called again when it is loaded
        self._wrapped.add(name)
        try:
            hook(self, module)
        except Exception:
            return

    def find_loaded(self) -> None:
        """Wrap modules that were loaded without a call, as in a process forked from a preloader."""
        for name in HOOKS:
            if name in sys.modules:
                self.on_loaded(name, sys.modules[name])

    # -- the end

    def finish(self) -> None:
        """Write the list of slow imports, and record nothing more. Idempotent."""
        if self.is_finished:
            return
        self.is_finished = True
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


def _process_timeline() -> Timeline:
    """Return the timeline for this process, which gets a new id; children inherit it."""
    parent = os.environ.get(PROCESS_VARIABLE, "")
    os.environ[PROCESS_VARIABLE] = os.urandom(6).hex()
    timeline = current()
    if timeline is None:
        raise LookupError("there is no timeline")
    return timeline.with_resource({PARENT: parent, ROLE: program_name()})


def _began_ns() -> int | None:
    """Return when this process began, in ns since 1970; None if that is not known.

    For the job itself, that is when its launcher became the command; for other processes, their
    start time in ticks. Source: proc(5), starttime.
    """
    pid, _, launched = os.environ.get(LAUNCHED_VARIABLE, "").partition(":")
    if pid == str(os.getpid()):
        return int(launched)
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError):
        return None
    # The end of the tick, so that the begin is not before the parent's last action.
    return time.time_ns() - max(0, since_boot_ns - (ticks + 1) * 1_000_000_000 // _TICKS)
