"""Checks after each import in the preloader for effects that a forked process could not share.

A fork shares memory, but no thread, no open file, and no random value that was drawn for one
process alone. Only this module decides which effects are refused. One thread; standard library
alone.
"""

import builtins
import os
import random
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FILES = "/proc/self/fd"
_TASKS = "/proc/self/task"
# Lines of proc_pid_status(5) that an import could change for the whole process.
_STATUS = (b"SigBlk:", b"SigIgn:", b"SigCgt:", b"Umask:")
_C_LIBRARY_SIGNALS = 1 << (32 - 1) | 1 << (33 - 1)
_COPY_MS = 10_000
# Packages that compare the pid with the present one later, and so notice a fork.
_FORK_AWARE = ("filelock", "torch")
# Modules whose random values are drawn again in each worker (`worker.reseed`), or are only names.
_RESEEDED = (
    *("random", "numpy.random", "multiprocessing.process", "transformers.utils.hub"),
    *("torch.distributed._composable.contract", "tempfile"),
)
# Modules that list all variables to find those with a prefix of their own.
_LISTS = {"tqdm.std": "TQDM_", "tqdm.utils": "TQDM_", "networkx": "NETWORKX_"}


class PreloadRefused(BaseException):
    """Reason for people why nothing is preloaded. Imports do not catch a BaseException."""


class _Arguments(list[str]):
    """`sys.argv` while modules are imported, which must not read it."""

    on_read: Callable[[], None]

    def __getitem__(self, place: Any) -> Any:
        self.on_read()
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        self.on_read()
        return super().__iter__()


class Checks:
    """Observer of a sequence of imports. Call `fault` after each import."""

    def __init__(self, importing: Callable[[], str], memory_bytes: int) -> None:
        self._importing = importing
        """Returns the name of the module that is being imported; empty for none."""
        self._memory_bytes = memory_bytes
        self._fault = ""
        self.offending_module = ""
        """Module that caused the last `fault`; its import may still be going on."""
        self._restore: list[Callable[[], None]] = []
        self.variables_read: dict[str, str | None] = {}
        """Values, at that time, of the variables that an import has read."""
        self.new_variables: list[str] = []
        """Variables that were read since the caller last cleared the list."""
        self.generators: list[random.Random] = []
        """Random generators made without a seed; each worker seeds them again."""
        self._files: dict[str, str] = {}
        self._task_count = 1
        self._began: dict[str, Any] = {}

    def begin(self) -> None:
        """Record the state before the first import, and replace the functions to observe."""
        self._files = _open_files()
        self._began = _state()
        self._watch_variables()
        arguments = _Arguments(sys.argv)
        _Arguments.on_read = staticmethod(lambda: self._note("reads the program's arguments"))
        self._replace(sys, "argv", arguments)
        self._watch_identity()
        self._watch_generators()

    def end(self) -> None:
        """Restore the functions."""
        for restore in reversed(self._restore):
            restore()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)
        self._restore.append(lambda: setattr(owner, name, original))

    def _note(self, fault: str) -> None:
        by = self._importing()
        if by and not self._fault:
            self._fault, self.offending_module = fault, by

    # -- functions whose results differ between processes

    def _watch_variables(self) -> None:
        environ: Any = os.environ
        encode, decode = environ.encodekey, environ.decodekey

        def on_read(name: Any) -> Any:
            by = self._importing()
            if by and isinstance(name, str) and name.startswith(_LISTS.get(by, "")):
                self.new_variables.append(name)
                if name not in self.variables_read:
                    value = environ._data.get(encode(name))
                    self.variables_read[name] = (
                        None if value is None else environ.decodevalue(value)
                    )
            return encode(name)

        def on_list(name: Any) -> Any:
            if self._importing() not in _LISTS:
                self._note("reads all variables of the environment")
            return decode(name)

        self._replace(environ, "encodekey", on_read)
        self._replace(environ, "decodekey", on_list)

    def _watch_identity(self) -> None:
        getpid, urandom = os.getpid, os.urandom

        def own_id() -> int:
            if self._importing().partition(".")[0] not in _FORK_AWARE:
                self._note("reads its process id")
            return getpid()

        def drawn(count: int) -> bytes:
            by = self._importing()
            if not any(by == name or by.startswith(f"{name}.") for name in _RESEEDED):
                self._note("draws random bytes")
            return urandom(count)

        self._replace(os, "getpid", own_id)
        self._replace(os, "urandom", drawn)
        self._replace(random, "_urandom", drawn)

    def _watch_generators(self) -> None:
        seed = random.Random.seed

        def seeded(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None:
                self.generators.append(generator)
            seed(generator, a, version)

        self._replace(random.Random, "seed", seeded)

    # -- checks after an import

    def fault(self, *, is_outermost: bool) -> str:
        """Return the effect of the last import that a fork cannot share; empty for none.

        `is_outermost`: whether no other import is going on, which allows more checks.
        """
        fault, self._fault = self._fault, ""
        if not fault:
            self.offending_module = ""
        fault = fault or self._opened() or self._threads()
        if not fault and is_outermost:
            fault = self._changed() or self._memory()
        return fault

    def _opened(self) -> str:
        for name, target in _open_files().items():
            if self._files.get(name) != target:
                return f"opens {target}"
        return ""

    def _threads(self) -> str:
        count = len(os.listdir(_TASKS))
        if count <= self._task_count:
            return ""
        # Fork-aware libraries end their threads before a fork, and start them again after it.
        child = os.fork()
        if child == 0:
            os._exit(0)
        if not _has_ended(child):
            return "keeps a forked copy of the process from ending"
        if len(os.listdir(_TASKS)) > 1:
            return "starts a thread"
        return ""

    def _changed(self) -> str:
        for what, now in _state().items():
            if now != self._began[what]:
                return f"changes {what}"
        return ""

    def _memory(self) -> str:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        if pages * os.sysconf("SC_PAGE_SIZE") > self._memory_bytes:
            raise PreloadRefused(
                f"the imports take more than {self._memory_bytes >> 20} MiB of memory"
            )
        return ""


def _has_ended(child: int) -> bool:
    """Return whether a child ends in time, and reap it; kill it if not."""
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    has_ended = bool(poll.poll(_COPY_MS))
    os.close(descriptor)
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    # Do not wait for a killed child, which may be stuck in the kernel.
    os.waitpid(child, 0 if has_ended else os.WNOHANG)
    return has_ended


def _open_files() -> dict[str, str]:
    found = {}
    for name in os.listdir(_FILES):
        try:
            found[name] = os.readlink(f"{_FILES}/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def _state() -> dict[str, Any]:
    """Return the attributes of this process that all later code would inherit from an import."""
    # Read as bytes, since a codec would be one more import.
    status = Path("/proc/self/status").read_bytes()
    lines = [_without_c_library(line) for line in status.splitlines() if line.startswith(_STATUS)]
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        has_children = True
    except ChildProcessError:
        has_children = False
    return {
        "the signal handlers, the signal mask or the umask": lines,
        "its child processes (it starts one)": has_children,
        "the working directory": os.getcwd(),
        "the trace or profile function": (sys.gettrace(), sys.getprofile()),
        "the import function": builtins.__import__,
        "the real-time timer": signal.getitimer(signal.ITIMER_REAL),
    }


def _without_c_library(line: bytes) -> bytes:
    """Return a line of `_STATUS` without the C library's signals for threads (nptl(7))."""
    name, _, value = line.partition(b":")
    if name != b"SigCgt":
        return line
    return b"%b:%x" % (name, int(value, 16) & ~_C_LIBRARY_SIGNALS)


def device_mapping() -> str:
    """Return a device whose memory is mapped into this process; empty for none."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        path = line.partition("/")[2]
        if path.startswith("dev/") and not path.startswith(("dev/zero", "dev/shm/")):
            return f"/{path}"
    return ""
