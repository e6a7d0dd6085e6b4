"""Notes what a Python process below `bootseer run` does until it is ready. Loaded by sitecustomize.

Alone owns the wrapping of imports. Loaded by its path, so that a program that imports `bootseer`
can be told from one that does not. Imports almost nothing: every Python process of a job runs this,
most of them for a few milliseconds. Whatever takes time is noted by `notes`, loaded when it
is.

CPython calls `_find_and_load` of its frozen import system for each module that is not loaded yet; a
function in its place sees what is outermost, and how long it took, whichever loader does it.
"""

import _frozen_importlib
import os
import sys
import time
from _thread import get_ident
from typing import Any

# A process that imports one of these is worth the 25 ms that it takes to write a timeline.
_LARGE = frozenset(
    [
        "deepspeed",
        "flax",
        "jax",
        "lightning",
        "megatron",
        "nemo",
        "paddle",
        "pytorch_lightning",
        "sglang",
        "tensorflow",
        "torch",
        "transformers",
        "vllm",
    ]
)
# A program that starts torch's workers, as which it is run or imported.
_LAUNCHERS = frozenset(["torch.distributed.run", "torch.distributed.launch"])
# Where it is run as such a program: of all that it imports the last one.
_LAST_OF_LAUNCHERS = frozenset(["torch.distributed.launcher.api"])
PRELOAD_VARIABLE = "BOOTSEER_PRELOAD"
_WORTH_NOTING_NS = 100_000_000
_MODULE_NS = 5_000_000
_MODULES_MAX = 3000


class Collector:
    """Watches the imports of the main thread, and hands on what is worth noting."""

    def __init__(self, package: str, began_ns: int) -> None:
        self.package = package
        """The folder of the sources of `bootseer`."""
        self.began_ns = began_ns
        self.quiet_until_ns = 0
        """When the first import began that was worth noting; 0: just now. ns since 1970."""
        self.modules: list[tuple[str, int, int, int]] = []
        """Name, depth, begin and duration of each slow import; ns, by the monotonic clock."""
        self._main = get_ident()
        self._depth = 0
        self._notes: Any = None
        self._is_over = False
        # What the process was started with; only where its next start wants to know of this one.
        self._started_with = dict(os.environ) if PRELOAD_VARIABLE in os.environ else {}
        is_launcher = not _LAUNCHERS.isdisjoint(sys.orig_argv[1:4])
        self._launching = _LAST_OF_LAUNCHERS if is_launcher else _LAUNCHERS
        self._original = _frozen_importlib._find_and_load  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Put ours in the place of the import system's function."""
        # Frames of this file are left out of tracebacks of failed imports, as the original's are.
        code = Collector._load.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        Collector._load.__code__ = code
        _frozen_importlib._find_and_load = self._load  # type: ignore[attr-defined]

    def end(self) -> None:
        """Leave the import system as it was."""
        self._is_over = True
        _frozen_importlib._find_and_load = self._original  # type: ignore[attr-defined]

    def over(self) -> None:
        """The process is ready: note nothing more."""
        if self._notes is not None:
            self._notes.finish()
        self.end()

    def record(self, how: str = "write") -> None:
        """Write down what the program's next start may import ahead, as it does so. Once."""
        began, self._started_with = self._started_with, {}
        if not began:
            return
        try:
            with _Sources(self):
                from bootseer.served.preload import record

                getattr(record, how)(began)
        except Exception:
            return

    def notes(self) -> Any:
        """The part that writes; None where it cannot be had."""
        if self._notes is None and not self._is_over:
            try:
                self._notes = _load_notes(self)
            except Exception:
                self._is_over = True
        return self._notes

    def _load(self, name: str, import_: Any) -> Any:
        if self._is_over or get_ident() != self._main:
            return self._original(name, import_)
        top = name.partition(".")[0]
        stage = None
        if self._depth == 0 and top in _LARGE and top not in sys.modules:
            # What loads the notes is a part of this import, as the program sees it.
            began_ns = time.time_ns()
            self.quiet_until_ns = self.quiet_until_ns or began_ns
            notes = self.notes()
            stage = notes and notes.begin_import(top, began_ns)
        self._depth += 1
        begin = time.perf_counter_ns()
        try:
            module = self._original(name, import_)
        finally:
            self._depth -= 1
            took = time.perf_counter_ns() - begin
            if took >= _MODULE_NS and len(self.modules) < _MODULES_MAX:
                self.modules.append((name, self._depth, begin, took))
            if stage is not None:
                self._notes.end_import(stage)
        if self._depth == 0 and stage is None and took >= _WORTH_NOTING_NS:
            if self._notes is None:
                self.quiet_until_ns = time.time_ns() - (time.perf_counter_ns() - begin)
            notes = self.notes()
            if notes is not None:
                notes.note_import(top, begin, took)
        if self._notes is not None:
            self._notes.loaded(name, module)
            if self._depth == 0:
                self._notes.look()
            if name in self._launching:
                # Workers that this process starts may be forked; it is no worker itself.
                self.record("launches")
        return module


def _load_notes(collector: Collector) -> Any:
    """`notes` and what it writes by."""
    with _Sources(collector):
        from bootseer.profile.collect.notes import Notes

        return Notes(collector)


class _Sources:
    """Finds `bootseer` where this file is, whatever else is on the path, while it is entered; the
    program finds none of it loaded."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._is_known = False

    def __enter__(self) -> None:
        self._is_known = "bootseer" in sys.modules
        sys.meta_path.insert(0, self)
        self._collector._depth += 1

    def __exit__(self, *_: object) -> None:
        self._collector._depth -= 1
        sys.meta_path.remove(self)
        if not self._is_known:
            # Whether a program imports bootseer says whether it tells itself when it is ready.
            for name in [name for name in sys.modules if name.partition(".")[0] == "bootseer"]:
                del sys.modules[name]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "bootseer":
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(
            name,
            os.path.join(self._collector.package, "__init__.py"),
            submodule_search_locations=[self._collector.package],
        )


_watching: list[Collector] = []


def install(package: str, began_ns: int) -> None:
    """Begin to watch this process."""
    _watching.append(Collector(package, began_ns))
    _watching[0].begin()


def over() -> None:
    """`bootseer.ready()` was called."""
    _watching[0].over()
