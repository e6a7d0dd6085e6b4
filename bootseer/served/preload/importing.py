"""Imports what a record names, and keeps it out of sight until the program asks for it.

`preload` runs in the preloader; what it returns is used in its forks: `Preloaded.install` takes the
modules out of `sys.modules`, as if nothing were imported, and gives them when the program imports
them. A module is given with all whose import was complete before its own. Standard library alone;
one thread.
"""

import _frozen_importlib
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.machinery import PathFinder
from typing import Any, NamedTuple, NoReturn

from bootseer.served.preload.checks import Checks, Refusal, device_mapping
from bootseer.served.preload.record import digests_of

# They were read when their library was loaded, below Python.
NATIVE = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "ATEN_")


class Offence(BaseException):
    """A module cannot be preloaded, nor can those whose imports lead to it."""

    def __init__(self, modules: list[str], fault: str) -> None:
        super().__init__(f"{modules[-1]} {fault} when it is imported")
        self.modules = modules


class _Effect(NamedTuple):
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
        self.effects: dict[int, _Effect] = {}
        """By the number of modules that were complete."""
        self.consulted: list[tuple[int, str]] = []
        """That number, and a variable that was read before it was reached."""
        self.files: dict[str, tuple[int, int, int]] = {}
        self.folders: dict[str, int] = {}
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
        for name, module in self.modules:
            path = getattr(getattr(module, "__spec__", None), "origin", None)
            if isinstance(path, str) and os.path.isabs(path):
                self.files[path] = _fingerprint(path)
                if self.files[path][1] > began_ns:
                    raise Refusal(f"the file of {name} was changed while it was imported")
        for folder in sys.path:
            if folder.endswith(("site-packages", "dist-packages")):
                self.folders[folder] = _time_of(folder)

    def stale(self) -> str:
        """A file that was changed since it was imported; or nothing."""
        for path, known in self.files.items():
            if _fingerprint(path) != known:
                return path
        for path, time_ns in self.folders.items():
            if _time_of(path) != time_ns:
                return path
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
        self._began = dict(_variables())
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
        self._give(place + 1)
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
        now = _variables()
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
            origin = getattr(module.__spec__, "origin", None) if "." not in name else None
            if isinstance(origin, str) and os.path.isabs(origin):
                found = PathFinder.find_spec(name)
                if found is None or found.origin != origin:
                    self._conflict(name, f"the program has a {name} of its own")

    def _repeat(self, effect: _Effect) -> None:
        for name, (_, after) in effect.variables.items():
            if after is None:
                os.environb.pop(name, None)
            else:
                os.environb[name] = after
        # What has been changed by now is what the imports themselves would have changed.
        for name in effect.variables:
            value = _variables().get(name)
            self._began.pop(name, None)
            if value is not None:
                self._began[name] = value
        for stream, data in zip((sys.stdout, sys.stderr), effect.output, strict=True):
            if data and stream is not None:
                stream.write(data.decode(errors="replace"))


class _Importer:
    """One run through the modules of a record."""

    def __init__(self, preloaded: Preloaded, refused: Mapping[str, str], salt: str) -> None:
        self._preloaded = preloaded
        self._salt = salt
        self._refused = refused
        self._stack: list[str] = []
        self._order: dict[str, None] = {}
        self._seen = 0
        self._variables: dict[bytes, bytes] = {}
        self._written = (0, 0)
        self._original: Any = None
        self._changed: Mapping[str, str] = {}
        self._suspects: dict[str, list[str]] = {}
        self._offence: Offence | None = None

    def importing(self) -> str:
        return self._stack[-1] if self._stack else ""

    def run(
        self, names: Iterable[str], changed: Mapping[str, str], visible: Collection[str]
    ) -> None:
        # What this part of the process needed itself is as good as what it imports.
        self._order = dict.fromkeys(
            name
            for name in sys.modules
            if name not in visible and name.partition(".")[0] != "bootseer"
        )
        self._seen = len(sys.modules)
        self._changed = changed
        self._variables = dict(_variables())
        self._original = _frozen_importlib._find_and_load  # type: ignore[attr-defined]
        _frozen_importlib._find_and_load = self._load  # type: ignore[attr-defined]
        self._preloaded.checks.begin()
        try:
            for name in names:
                if name not in sys.modules and not self._is_refused(name):
                    self._import(name)
        finally:
            self._preloaded.checks.end()
            _frozen_importlib._find_and_load = self._original  # type: ignore[attr-defined]
        digests = digests_of(os.environ, self._salt)
        for variable, modules in self._suspects.items():
            # Where the imports themselves have set it, it is what the program had in the end.
            if digests.get(variable, "") != self._changed[variable]:
                raise Offence(modules, f"reads {variable}, which the program sets itself,")
        self._preloaded.modules = [(n, sys.modules[n]) for n in self._order if n in sys.modules]

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except (Offence, Refusal):
            raise
        except BaseException as error:
            fault = f"cannot be imported ({type(error).__name__}: {error})"
            raise Offence([name], fault) from None
        if self._offence is not None:
            raise self._offence  # some module has caught it

    def _is_refused(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[: count + 1]) in self._refused for count in range(len(parts)))

    def _load(self, name: str, import_: Any) -> Any:
        if self._refused.get(name):
            # Known already: whatever has led to it is refused as well.
            self._offend([*self._stack, name], "cannot be preloaded, as was found before,")
        self._stack.append(name)
        try:
            module = self._original(name, import_)
            self._complete(name)
        finally:
            self._stack.pop()
        return module

    def _offend(self, modules: list[str], fault: str) -> NoReturn:
        self._offence = self._offence or Offence(modules, fault)
        raise self._offence

    def _complete(self, name: str) -> None:
        checks = self._preloaded.checks
        fault = checks.fault(is_outermost=len(self._stack) == 1)
        for variable in checks.new:
            if variable in self._changed:
                self._suspects.setdefault(variable, list(self._stack))
        if fault:
            self._offend(list(self._stack), fault)
        # What is not complete itself comes later. Some modules are put there by others.
        new = list(sys.modules)[self._seen :]
        for one in new:
            if one == name or one not in self._stack:
                self._order.setdefault(one)
        if len(self._stack) == 1:
            self._seen = len(sys.modules)
        place = len(self._order)
        self._preloaded.consulted += [(place, variable) for variable in dict.fromkeys(checks.new)]
        checks.new.clear()
        self._note_effect(place)

    def _note_effect(self, place: int) -> None:
        now = _variables()
        variables = {}
        if now != self._variables:
            for name in {*now, *self._variables}:
                before, after = self._variables.get(name), now.get(name)
                if before != after:
                    variables[name] = (before, after)
            self._variables = dict(now)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        ends = tuple(os.fstat(number).st_size for number in (1, 2))
        if variables or ends != self._written:
            output = tuple(
                os.pread(number, end - begin, begin)
                for number, begin, end in zip((1, 2), self._written, ends, strict=True)
            )
            self._written = (ends[0], ends[1])
            old = self._preloaded.effects.get(place, _Effect({}, (b"", b"")))
            both = (old.output[0] + output[0], old.output[1] + output[1])
            self._preloaded.effects[place] = _Effect({**old.variables, **variables}, both)


def preload(
    names: list[str],
    refused: Mapping[str, str],
    changed: Mapping[str, str],
    salt: str,
    visible: Collection[str],
    memory_bytes: int,
) -> Preloaded:
    """Import the modules, without those that are refused. Standard output and error must be files.

    `changed`: variables that are not what they were when the program is ready, by the digests
    (with `salt`) of what they are. `visible`: the modules that an interpreter has from its start.
    Raises: Offence; Refusal where nothing can be preloaded at all.
    """
    began_ns = time.time_ns()
    importer: _Importer | None = None
    checks = Checks(lambda: importer.importing() if importer is not None else "", memory_bytes)
    preloaded = Preloaded(checks)
    importer = _Importer(preloaded, refused, salt)
    # What comes with the interpreter first: it is asked for by all others.
    names = sorted(names, key=lambda name: name.partition(".")[0] not in sys.stdlib_module_names)
    importer.run(names, changed, visible)
    if device := device_mapping():
        raise Refusal(f"the imports map {device}")
    preloaded.note_files(began_ns)
    gc.collect()
    # Collections of the workers would write to the memory that they share.
    gc.freeze()
    return preloaded


def _variables() -> dict[bytes, bytes]:
    return os.environ._data  # type: ignore[attr-defined, no-any-return]


def _fingerprint(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (-1, -1, -1)
    return (status.st_size, status.st_mtime_ns, status.st_ino)


def _time_of(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1
