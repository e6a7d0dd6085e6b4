"""Imports what a record names, in the preloader, and looks what each import does to the process.

Alone decides in which order modules are imported, and which cannot be preloaded because of another.
Standard library alone; one thread.
"""

import _frozen_importlib
import ctypes
import gc
import importlib
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from bootseer.served.preload.checks import Checks, Refusal, device_mapping
from bootseer.served.preload.preloaded import Effect, Preloaded, variables
from bootseer.served.preload.record import digests_of

# Digests of an installation's files, which their functions keep: of 440 MB in triton 3, before each
# worker's first compilation.
_DIGESTS = (("triton.runtime.cache", "triton_key"),)
_LARGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25


class Offence(BaseException):
    """A module cannot be preloaded, nor can those whose imports lead to it."""

    def __init__(self, importers: Iterable[str], module: str, fault: str) -> None:
        super().__init__(f"{module} {fault} when it is imported")
        self.importers = set(importers)
        self.module = module


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
        self._leading: set[str] = set()
        """Modules that led to one that is refused."""

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
        self._variables = dict(variables())
        self._original = _frozen_importlib._find_and_load  # type: ignore[attr-defined]
        _frozen_importlib._find_and_load = self._load  # type: ignore[attr-defined]
        self._preloaded.checks.begin()
        try:
            self._import_all(names)
            self._compute_digests()
        finally:
            self._preloaded.checks.end()
            _frozen_importlib._find_and_load = self._original  # type: ignore[attr-defined]
        digests = digests_of(os.environ, self._salt)
        for variable, modules in self._suspects.items():
            # Where the imports themselves have set it, it is what the program had in the end.
            if digests.get(variable, "") != self._changed[variable]:
                fault = f"reads {variable}, which the program sets itself,"
                raise Offence(modules[:-1], modules[-1], fault)
        self._preloaded.modules = [(n, sys.modules[n]) for n in self._order if n in sys.modules]

    def _import_all(self, names: Iterable[str]) -> None:
        """Raises: Offence. A refused module does nothing, so that all which lead to one are found
        before this process is given up; whatever else goes wrong then comes of that."""
        known: Offence | None = None
        for name in names:
            if name in sys.modules or self._is_refused(name):
                continue
            try:
                self._import(name)
            except Offence as offence:
                if known is None and offence.module not in self._refused:
                    raise
                known = known or offence
                if offence.module not in self._refused:
                    break
                self._leading |= offence.importers
                self._offence = None
        if known is not None:
            known.importers |= self._leading
            raise known

    def _compute_digests(self) -> None:
        """Raises: Offence, by what is imported on the way."""
        for name, function in _DIGESTS:
            try:
                if name in sys.modules:
                    getattr(sys.modules[name], function)()
            except Offence as offence:
                if offence.module not in self._refused:
                    raise
                self._offence = None
            except Exception:
                continue  # each worker finds that out itself

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except (Offence, Refusal):
            raise
        except BaseException as error:
            fault = f"cannot be imported ({type(error).__name__}: {error})"
            raise Offence([], name, fault) from None
        if self._offence is not None:
            raise self._offence  # some module has caught it

    def _is_refused(self, name: str) -> bool:
        parts = name.split(".")
        above = (".".join(parts[: count + 1]) for count in range(len(parts)))
        return any(one in self._refused or one in self._leading for one in above)

    def _load(self, name: str, import_: Any) -> Any:
        if self._refused.get(name):
            # Known already: whatever has led to it is refused as well.
            self._offend(self._stack, name, "cannot be preloaded, as was found before,")
        self._stack.append(name)
        try:
            module = self._original(name, import_)
            self._complete(name)
        finally:
            self._stack.pop()
        return module

    def _offend(self, importers: Iterable[str], module: str, fault: str) -> NoReturn:
        self._offence = self._offence or Offence(importers, module, fault)
        raise self._offence

    def _complete(self, name: str) -> None:
        checks = self._preloaded.checks
        fault = checks.fault(is_outermost=len(self._stack) == 1)
        for variable in checks.new:
            if variable in self._changed:
                self._suspects.setdefault(variable, list(self._stack))
        if fault:
            # What was noted may be of a module that goes on being imported.
            module = checks.offender if checks.offender in self._stack else name
            self._offend(self._stack[: self._stack.index(module)], module, fault)
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
        now = variables()
        changes = {}
        if now != self._variables:
            for name in {*now, *self._variables}:
                before, after = self._variables.get(name), now.get(name)
                if before != after:
                    changes[name] = (before, after)
            self._variables = dict(now)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        ends = tuple(os.fstat(number).st_size for number in (1, 2))
        if changes or ends != self._written:
            output = tuple(
                os.pread(number, end - begin, begin)
                for number, begin, end in zip((1, 2), self._written, ends, strict=True)
            )
            self._written = (ends[0], ends[1])
            old = self._preloaded.effects.get(place, Effect({}, (b"", b"")))
            both = (old.output[0] + output[0], old.output[1] + output[1])
            self._preloaded.effects[place] = Effect({**old.variables, **changes}, both)


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
    _make_pages_large()
    return preloaded


def _make_pages_large() -> None:
    """Make few large pages of the memory that the imports have filled: each fork copies the table
    of all pages. What a worker writes costs it a small one still. Linux 6.1; others refuse it."""
    madvise = ctypes.CDLL(None).madvise
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        place, rights, _, _, inode, *_ = line.split(maxsplit=5)
        begin, end = (int(one, 16) for one in place.split("-"))
        if rights == "rw-p" and inode == "0" and end - begin >= 2 * _LARGE_BYTES:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)
