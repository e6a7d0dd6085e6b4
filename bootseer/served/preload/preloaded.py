"""Modules that the preloader has imported, hidden until the program imports them.

The preloader fills and hides them. In a forked worker `Preloaded.install` makes an import return
the prepared module as if it had just been imported. A module becomes visible together with all
modules whose import was complete before its own. Standard library alone; any thread of the program
imports.
"""

import _frozen_importlib
import _imp
import os
import sys
from array import array
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from bootseer.served.preload.checks import Checks, PreloadRefused

# Prefixes of variables that native libraries read when they are loaded.
NATIVE = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "ATEN_")


class Effect(NamedTuple):
    """Effects of an import besides its modules."""

    variables: dict[bytes, tuple[bytes | None, bytes | None]]
    """Values of the variables that it changed, before and after."""
    output: tuple[bytes, bytes]
    """Output on standard output and standard error."""


class Preloaded:
    """Preloaded modules, in the order in which their imports were complete."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.modules: list[tuple[str, Any]] = []
        self.effects: dict[int, Effect] = {}
        """Effects, by the number of modules that were complete then."""
        self.variables_read: list[tuple[int, str]] = []
        """Variables that were read, with the number of modules that were complete after it."""
        self._paths = b""
        self._fingerprints = array("Q")
        """Sizes, times and inodes of files and folders, three numbers each.

        In one array: each worker reads all, and reading many objects would copy their pages.
        """
        self._on_path: set[str] = set()
        """Modules that `sys.path` leads to, not a finder such as setuptools has for distutils."""
        self._positions: dict[str, int] = {}
        self._initial_modules: set[str] = set()
        self._revealed = 0
        self._began: dict[bytes, bytes] = {}
        self._finders: list[Any] = []
        self._conflict: Callable[[str, str], None] = lambda _name, _why: None
        self._original: Any = None

    # -- in the preloader

    def record_files(self, began_ns: int) -> None:
        """Record fingerprints of the modules' files. Raises: PreloadRefused if one changed."""
        paths: dict[str, None] = {}
        for name, module in self.modules:
            path = getattr(getattr(module, "__spec__", None), "origin", None)
            if isinstance(path, str) and os.path.isabs(path):
                paths[path] = None
                if _fingerprint(path)[1] > began_ns:
                    raise PreloadRefused(f"the file of {name} was changed while it was imported")
            if "." not in name and isinstance(path, str) and _find_file(name) == path:
                self._on_path.add(name)
        for folder in sys.path:
            if folder.endswith(("site-packages", "dist-packages")):
                paths[folder] = None
        for path in paths:
            self._paths += os.fsencode(path) + b"\0"
            self._fingerprints.extend(_fingerprint(path))

    def changed_file(self) -> str:
        """Return a file that was changed since it was imported; empty for none."""
        begin = place = 0
        while (end := self._paths.find(b"\0", begin)) >= 0:
            path = self._paths[begin:end]
            if _fingerprint(path) != self._fingerprints[place : place + 3]:
                return os.fsdecode(path)
            begin, place = end + 1, place + 3
        return ""

    def hide(self, initial_modules: Iterable[str]) -> None:
        """Remove all modules from `sys.modules` except those of a new interpreter."""
        keep = self._initial_modules = set(initial_modules)
        for name in list(sys.modules):
            if name not in keep:
                del sys.modules[name]
        self.modules = [(name, module) for name, module in self.modules if name not in keep]
        self._positions = {name: place for place, (name, _) in enumerate(self.modules)}

    # -- in a worker

    def install(self, conflict: Callable[[str, str], None]) -> None:
        """Begin to give out modules; call `conflict(name, reason)` if one cannot be given out."""
        for name in set(sys.modules) - self._initial_modules:
            del sys.modules[name]  # imported by the code that answers requests
        self._conflict = conflict
        self._began = dict(variables())
        self._finders = list(sys.meta_path)
        self._original = _frozen_importlib._find_and_load  # type: ignore[attr-defined]
        code = Preloaded._load.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        Preloaded._load.__code__ = code
        _frozen_importlib._find_and_load = self._load  # type: ignore[attr-defined]

    def _load(self, name: str, import_: Any) -> Any:
        place = self._positions.get(name, -1)
        if place < self._revealed:
            return self._original(name, import_)
        if parent := name.rpartition(".")[0]:
            import_(parent)
            if name in sys.modules:
                return sys.modules[name]
        # Other threads import, too. The lock is free in a new fork.
        _imp.acquire_lock()
        try:
            if place >= self._revealed:
                self._reveal(place + 1)
        finally:
            _imp.release_lock()
        return sys.modules[name]

    def _reveal(self, until: int) -> None:
        part = self.modules[self._revealed : until]
        self._check_variables(until)
        self._check_finders(part)
        for name, module in part:
            sys.modules.setdefault(name, module)
        for place in range(self._revealed + 1, until + 1):
            if place in self.effects:
                self._replay_effect(self.effects[place])
        self._revealed = until

    def _check_variables(self, until: int) -> None:
        now = variables()
        changed = {name for name in {*now, *self._began} if now.get(name) != self._began.get(name)}
        if not changed:
            return
        for name in sorted(map(os.fsdecode, changed)):
            if name.startswith(NATIVE):
                self._conflict(name, f"the program sets {name}")
        for place, name in self.variables_read:
            if self._revealed < place <= until and os.fsencode(name) in changed:
                self._conflict(name, f"the program sets {name}")

    def _check_finders(self, part: list[tuple[str, Any]]) -> None:
        # Bootseer's finder is there for a moment while a stage is recorded.
        ours = "_bootseer_collect"
        if [one for one in sys.meta_path if type(one).__module__ != ours] != self._finders:
            self._conflict("sys.meta_path", "the program changes how modules are found")
        for name, module in part:
            if sys.modules.get(name, module) is not module:
                self._conflict(name, f"the program has a {name} of its own")
            if name in self._on_path and _find_file(name) != module.__spec__.origin:
                self._conflict(name, f"the program has a {name} of its own")

    def _replay_effect(self, effect: Effect) -> None:
        for name, (_, after) in effect.variables.items():
            if after is None:
                os.environb.pop(name, None)
            else:
                os.environb[name] = after
        # These changes count as the imports' own, not as the program's.
        for name in effect.variables:
            value = variables().get(name)
            self._began.pop(name, None)
            if value is not None:
                self._began[name] = value
        for stream, data in zip((sys.stdout, sys.stderr), effect.output, strict=True):
            if data and stream is not None:
                stream.write(data.decode(errors="replace"))


def variables() -> dict[bytes, bytes]:
    """Return the environment as Python stores it, without a copy."""
    return os.environ._data  # type: ignore[attr-defined, no-any-return]


def _find_file(name: str) -> str | None:
    spec = PathFinder.find_spec(name)
    return None if spec is None else spec.origin


def _fingerprint(path: str | bytes) -> "array[int]":
    try:
        status = os.stat(path)
    except OSError:
        return array("Q", (0, 0, 0))
    return array("Q", (status.st_size, max(0, status.st_mtime_ns), status.st_ino))
