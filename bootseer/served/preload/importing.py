"""Imports in the preloader: imports the modules of a record, and checks the process after each.

Only this module decides the order of imports, and which modules cannot be preloaded because of
another. Standard library alone; one thread.
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

from bootseer.served.preload.checks import Checks, PreloadRefused, device_mapping
from bootseer.served.preload.preloaded import Effect, Preloaded, variables
from bootseer.served.preload.record import digests_of

# Functions that compute a digest of their installation's files, and keep it. In triton 3 that is
# 440 MB, which each worker would read before its first compilation.
_DIGESTS = (("triton.runtime.cache", "triton_key"),)
_LARGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25


class ModuleRefused(BaseException):
    """A module cannot be preloaded, nor can the modules whose imports lead to it."""

    def __init__(self, importers: Iterable[str], module: str, fault: str) -> None:
        super().__init__(f"{module} {fault} when it is imported")
        self.importers = set(importers)
        self.module = module


class _Importer:
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
        self._refusal: ModuleRefused | None = None
        self._leading: set[str] = set()
        """Modules that led to the import of a refused module."""

    def importing(self) -> str:
        return self._stack[-1] if self._stack else ""

    def run(
        self, names: Iterable[str], changed: Mapping[str, str], initial_modules: Collection[str]
    ) -> None:
        # Modules that Bootseer's own code here has imported count as preloaded, too.
        self._order = dict.fromkeys(
            name
            for name in sys.modules
            if name not in initial_modules and name.partition(".")[0] != "bootseer"
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
            # Harmless if the imports themselves have set it to the program's value.
            if digests.get(variable, "") != self._changed[variable]:
                fault = f"reads {variable}, which the program sets itself,"
                raise ModuleRefused(modules[:-1], modules[-1], fault)
        self._preloaded.modules = [(n, sys.modules[n]) for n in self._order if n in sys.modules]

    def _import_all(self, names: Iterable[str]) -> None:
        """Import the modules. Raises: ModuleRefused.

        After a module that was refused before, go on to find all modules that lead to one; any
        other failure then may be a consequence, and is ignored.
        """
        known: ModuleRefused | None = None
        for name in names:
            if name in sys.modules or self._is_refused(name):
                continue
            try:
                self._import(name)
            except ModuleRefused as refusal:
                if known is None and refusal.module not in self._refused:
                    raise
                known = known or refusal
                if refusal.module not in self._refused:
                    break
                self._leading |= refusal.importers
                self._refusal = None
        if known is not None:
            known.importers |= self._leading
            raise known

    def _compute_digests(self) -> None:
        for name, function in _DIGESTS:
            try:
                if name in sys.modules:
                    getattr(sys.modules[name], function)()
            except ModuleRefused as refusal:
                if refusal.module not in self._refused:
                    raise
                self._refusal = None
            except Exception:
                continue  # each worker will compute the digest itself

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except (ModuleRefused, PreloadRefused):
            raise
        except BaseException as error:
            fault = f"cannot be imported ({type(error).__name__}: {error})"
            raise ModuleRefused([], name, fault) from None
        if self._refusal is not None:
            raise self._refusal  # a module has caught the exception

    def _is_refused(self, name: str) -> bool:
        parts = name.split(".")
        above = (".".join(parts[: count + 1]) for count in range(len(parts)))
        return any(one in self._refused or one in self._leading for one in above)

    def _load(self, name: str, import_: Any) -> Any:
        if self._refused.get(name):
            # Known from an earlier attempt; the modules on the stack are refused, too.
            self._refuse(self._stack, name, "could not be preloaded before and is not allowed")
        self._stack.append(name)
        try:
            module = self._original(name, import_)
            self._on_complete(name)
        finally:
            self._stack.pop()
        return module

    def _refuse(self, importers: Iterable[str], module: str, fault: str) -> NoReturn:
        self._refusal = self._refusal or ModuleRefused(importers, module, fault)
        raise self._refusal

    def _on_complete(self, name: str) -> None:
        checks = self._preloaded.checks
        fault = checks.fault(is_outermost=len(self._stack) == 1)
        for variable in checks.new_variables:
            if variable in self._changed:
                self._suspects.setdefault(variable, list(self._stack))
        if fault:
            # The cause may be a module whose import is still going on.
            module = checks.offending_module if checks.offending_module in self._stack else name
            self._refuse(self._stack[: self._stack.index(module)], module, fault)
        # Modules on the stack are not complete yet. Some modules are added by other modules.
        new = list(sys.modules)[self._seen :]
        for one in new:
            if one == name or one not in self._stack:
                self._order.setdefault(one)
        if len(self._stack) == 1:
            self._seen = len(sys.modules)
        place = len(self._order)
        variables_read = dict.fromkeys(checks.new_variables)
        self._preloaded.variables_read += [(place, variable) for variable in variables_read]
        checks.new_variables.clear()
        self._record_effect(place)

    def _record_effect(self, place: int) -> None:
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
    initial_modules: Collection[str],
    memory_bytes: int,
) -> Preloaded:
    """Import the modules `names` without the refused ones. Standard output and error must be files.

    Args:
        names: Modules of the record.
        refused: Modules that cannot be preloaded, with the reason.
        changed: Variables that the program changes itself, with digests of their values.
        salt: Salt of the digests.
        initial_modules: Modules that a new interpreter has.
        memory_bytes: Limit on the process's memory.

    Raises: ModuleRefused; PreloadRefused if nothing can be preloaded at all.
    """
    began_ns = time.time_ns()
    importer: _Importer | None = None
    checks = Checks(lambda: importer.importing() if importer is not None else "", memory_bytes)
    preloaded = Preloaded(checks)
    importer = _Importer(preloaded, refused, salt)
    # The standard library first, since all other modules import it.
    names = sorted(names, key=lambda name: name.partition(".")[0] not in sys.stdlib_module_names)
    importer.run(names, changed, initial_modules)
    if device := device_mapping():
        raise PreloadRefused(f"the imports map {device}")
    preloaded.record_files(began_ns)
    gc.collect()
    # The workers' garbage collections would write to the shared memory.
    gc.freeze()
    _make_pages_large()
    return preloaded


def _make_pages_large() -> None:
    """Merge the memory that the imports have filled into large pages, since forks copy page tables.

    A worker's write still copies only a small page. Linux 6.1; older kernels refuse the call.
    """
    madvise = ctypes.CDLL(None).madvise
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        place, rights, _, _, inode, *_ = line.split(maxsplit=5)
        begin, end = (int(one, 16) for one in place.split("-"))
        if rights == "rw-p" and inode == "0" and end - begin >= 2 * _LARGE_BYTES:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)
