"""Modules that were imported ahead, out of sight until the program asks for them.

The preloader fills and hides them; in its forks `Preloaded.install` gives them when the program
imports them, as if nothing had been imported. A module is given with all whose import was complete
before its own. Standard library alone; any thread of the program imports.
"""

import _frozen_importlib
import _imp
import os
import sys
from array import array
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from bootseer.served.preload.checks import Checks, Refusal

# They were read when their library was loaded, below Python.
NATIVE = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "ATEN_")


class Effect(NamedTuple):
    """What an import did besides making modules."""

    variables: dict[bytes, tuple[bytes | None, bytes | None]]
    """Name: what it had before, and after."""
    output: tuple[bytes, bytes]
    """What it wrote to standard output and standard error."""


class Preloaded:
    """Modules that were imported ahead, in the order in which their imports were complete."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.modules: list[tuple[str, Any]] = []
        self.effects: dict[int, Effect] = {}
        """By the number of modules that were complete."""
        self.consulted: list[tuple[int, str]] = []
        """That number, and a variable that was read before it was reached."""
        self._paths = b""
        self._marks = array("Q")
        """Of files and folders. In one piece: each worker looks at all, and to touch an object of a
        page of many costs it that page."""
        self._on_path: set[str] = set()
        """Those that `sys.path` leads to, and not a finder of others as setuptools has for
        distutils; whether finders are the same is looked at as well."""
        self._places: dict[str, int] = {}
        self._visible: set[str] = set()
        self._given = 0
        self._began: dict[bytes, bytes] = {}
        self._finders: list[Any] = []
        self._conflict: Callable[[str, str], None] = lambda _name, _why: None
        self._original: Any = None

    # -- in the preloader

    def note_files(self, began_ns: int) -> None:
        """Note the files that were read. Raises: Refusal where one was changed meanwhile."""
        paths: dict[str, None] = {}
        for name, module in self.modules:
            path = getattr(getattr(module, "__spec__", None), "origin", None)
            if isinstance(path, str) and os.path.isabs(path):
                paths[path] = None
                if _marks_of(path)[1] > began_ns:
                    raise Refusal(f"the file of {name} was changed while it was imported")
            if "." not in name and isinstance(path, str) and _found(name) == path:
                self._on_path.add(name)
        for folder in sys.path:
            if folder.endswith(("site-packages", "dist-packages")):
                paths[folder] = None
        for path in paths:
            self._paths += os.fsencode(path) + b"\0"
            self._marks.extend(_marks_of(path))

    def stale(self) -> str:
        """A file that was changed since it was imported; or nothing."""
        begin = place = 0
        while (end := self._paths.find(b"\0", begin)) >= 0:
            path = self._paths[begin:end]
            if _marks_of(path) != self._marks[place : place + 3]:
                return os.fsdecode(path)
            begin, place = end + 1, place + 3
        return ""

    def hide(self, visible: Iterable[str]) -> None:
        """Hide all modules but those that an interpreter has from its start."""
        keep = self._visible = set(visible)
        for name in list(sys.modules):
            if name not in keep:
                del sys.modules[name]
        self.modules = [(name, module) for name, module in self.modules if name not in keep]
        self._places = {name: place for place, (name, _) in enumerate(self.modules)}

    # -- in a worker

    def install(self, conflict: Callable[[str, str], None]) -> None:
        """Give the modules when they are imported; `conflict` is called, with a name and the
        reason, where one can no longer be given as it is."""
        for name in set(sys.modules) - self._visible:
            del sys.modules[name]  # what answering has imported
        self._conflict = conflict
        self._began = dict(variables())
        self._finders = list(sys.meta_path)
        self._original = _frozen_importlib._find_and_load  # type: ignore[attr-defined]
        code = Preloaded._load.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        Preloaded._load.__code__ = code
        _frozen_importlib._find_and_load = self._load  # type: ignore[attr-defined]

    def _load(self, name: str, import_: Any) -> Any:
        place = self._places.get(name, -1)
        if place < self._given:
            return self._original(name, import_)
        if parent := name.rpartition(".")[0]:
            import_(parent)
            if name in sys.modules:
                return sys.modules[name]
        # Other threads import, too; forks begin with this lock free.
        _imp.acquire_lock()
        try:
            if place >= self._given:
                self._give(place + 1)
        finally:
            _imp.release_lock()
        return sys.modules[name]

    def _give(self, until: int) -> None:
        part = self.modules[self._given : until]
        self._check_variables(until)
        self._check_places(part)
        for name, module in part:
            sys.modules.setdefault(name, module)
        for place in range(self._given + 1, until + 1):
            if place in self.effects:
                self._repeat(self.effects[place])
        self._given = until

    def _check_variables(self, until: int) -> None:
        now = variables()
        changed = {name for name in {*now, *self._began} if now.get(name) != self._began.get(name)}
        if not changed:
            return
        for name in sorted(map(os.fsdecode, changed)):
            if name.startswith(NATIVE):
                self._conflict(name, f"the program sets {name}")
        for place, name in self.consulted:
            if self._given < place <= until and os.fsencode(name) in changed:
                self._conflict(name, f"the program sets {name}")

    def _check_places(self, part: list[tuple[str, Any]]) -> None:
        # Ours is there for a moment, when something is noted on the timeline.
        ours = "_bootseer_collect"
        if [one for one in sys.meta_path if type(one).__module__ != ours] != self._finders:
            self._conflict("sys.meta_path", "the program changes how modules are found")
        for name, module in part:
            if sys.modules.get(name, module) is not module:
                self._conflict(name, f"the program has a {name} of its own")
            if name in self._on_path and _found(name) != module.__spec__.origin:
                self._conflict(name, f"the program has a {name} of its own")

    def _repeat(self, effect: Effect) -> None:
        for name, (_, after) in effect.variables.items():
            if after is None:
                os.environb.pop(name, None)
            else:
                os.environb[name] = after
        # What has been changed by now is what the imports themselves would have changed.
        for name in effect.variables:
            value = variables().get(name)
            self._began.pop(name, None)
            if value is not None:
                self._began[name] = value
        for stream, data in zip((sys.stdout, sys.stderr), effect.output, strict=True):
            if data and stream is not None:
                stream.write(data.decode(errors="replace"))


def variables() -> dict[bytes, bytes]:
    """The environment as Python has it, without a copy."""
    return os.environ._data  # type: ignore[attr-defined, no-any-return]


def _found(name: str) -> str | None:
    """The file that `sys.path` leads to."""
    spec = PathFinder.find_spec(name)
    return None if spec is None else spec.origin


def _marks_of(path: str | bytes) -> "array[int]":
    """What changes where the file does."""
    try:
        status = os.stat(path)
    except OSError:
        return array("Q", (0, 0, 0))
    return array("Q", (status.st_size, max(0, status.st_mtime_ns), status.st_ino))
