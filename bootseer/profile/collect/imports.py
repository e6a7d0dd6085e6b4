"""Recording of imports in a Python process below `bootseer run`. Loaded by sitecustomize.

Only this module replaces a function of the import system. It is loaded by its path, not as a module
of `bootseer`, so that one can tell whether the program itself imports `bootseer`. It imports almost
nothing: every Python process of a job runs it, and most of them live for milliseconds. Slow imports
are written by `stages`, which is loaded for the first of them.

CPython calls `_find_and_load` of its frozen import system for each module that is not loaded yet; a
function in its place sees which import is outermost and how long it took, whichever loader runs.
"""

import _frozen_importlib
import os
import sys
import time
from _thread import get_ident
from typing import Any

# Packages whose import is worth the 25 ms that writing to a timeline takes.
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
# Modules that start torch's workers, whether run with -m or imported.
_LAUNCHERS = frozenset(["torch.distributed.run", "torch.distributed.launch"])
# The last module that a launcher imports when it is run with -m.
_LAST_OF_LAUNCHERS = frozenset(["torch.distributed.launcher.api"])
PRELOAD_VARIABLE = "BOOTSEER_PRELOAD"
_WORTH_NOTING_NS = 100_000_000
_MODULE_NS = 5_000_000
_MODULES_MAX = 3000


class ImportCollector:
    """Watches the imports of the main thread, and passes the slow ones to `stages`."""

    def __init__(self, package: str, began_ns: int) -> None:
        self.package = package
        """Folder with the sources of `bootseer`."""
        self.began_ns = began_ns
        self.first_noted_ns = 0
        """Begin of the first slow import, in ns since 1970; 0: when `stages` was loaded."""
        self.modules: list[tuple[str, int, int, int]] = []
        """Name, depth, begin and duration of each slow import; in ns, by the monotonic clock."""
        self._main = get_ident()
        self._depth = 0
        self._stages: Any = None
        self._has_ended = False
        # Environment at the process's begin; kept only if the next start is to preload.
        self._started_with = dict(os.environ) if PRELOAD_VARIABLE in os.environ else {}
        is_launcher = not _LAUNCHERS.isdisjoint(sys.orig_argv[1:4])
        self._launching = _LAST_OF_LAUNCHERS if is_launcher else _LAUNCHERS
        self._original = _frozen_importlib._find_and_load  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Replace the import system's function by `_load`."""
        # With this file name Python leaves the frame out of tracebacks, like the original's.
        code = ImportCollector._load.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        ImportCollector._load.__code__ = code
        _frozen_importlib._find_and_load = self._load  # type: ignore[attr-defined]

    def end(self) -> None:
        """Restore the import system's function."""
        self._has_ended = True
        _frozen_importlib._find_and_load = self._original  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Write the list of imports, and record no more, since the process is ready."""
        if self._stages is not None:
            self._stages.finish()
        self.end()

    def record(self, how: str = "write") -> None:
        """Write the import record from which the program's next start preloads. Once only."""
        began, self._started_with = self._started_with, {}
        if not began:
            return
        try:
            with _Sources(self):
                from bootseer.served.preload import record

                getattr(record, how)(began)
        except Exception:
            return

    def stages(self) -> Any:
        """Return the `ProcessStages` of this process; None if they cannot be made."""
        if self._stages is None and not self._has_ended:
            try:
                self._stages = _load_stages(self)
            except Exception:
                self._has_ended = True
        return self._stages

    def _load(self, name: str, import_: Any) -> Any:
        if self._has_ended or get_ident() != self._main:
            return self._original(name, import_)
        top = name.partition(".")[0]
        stage = None
        if self._depth == 0 and top in _LARGE and top not in sys.modules:
            # Loading `stages` counts as a part of this import: the program waits for both.
            began_ns = time.time_ns()
            self.first_noted_ns = self.first_noted_ns or began_ns
            stages = self.stages()
            stage = stages and stages.begin_import(top, began_ns)
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
                self._stages.end(stage)
        if self._depth == 0 and stage is None and took >= _WORTH_NOTING_NS:
            if self._stages is None:
                self.first_noted_ns = time.time_ns() - (time.perf_counter_ns() - begin)
            stages = self.stages()
            if stages is not None:
                stages.note_import(top, begin, took)
        if self._stages is not None:
            self._stages.on_loaded(name, module)
            if self._depth == 0:
                self._stages.find_loaded()
            if name in self._launching:
                # This process is a launcher, whose workers may be forked from a preloader.
                self.record("prepare_launcher")
        return module


def _load_stages(collector: ImportCollector) -> Any:
    with _Sources(collector):
        from bootseer.profile.collect.stages import ProcessStages

        return ProcessStages(collector)


class _Sources:
    """Context in which `import bootseer` finds the sources beside this file before all others.

    Afterwards the program finds none of them loaded.
    """

    def __init__(self, collector: ImportCollector) -> None:
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
            # "bootseer" in sys.modules must mean that the program itself imports it.
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


_collectors: list[ImportCollector] = []


def install(package: str, began_ns: int) -> None:
    """Begin to record this process's imports."""
    _collectors.append(ImportCollector(package, began_ns))
    _collectors[0].begin()


def stop() -> None:
    """End the recording; `bootseer.ready` calls this."""
    _collectors[0].stop()
