"""What an import must not have done if its process is to be forked: looked for after each import.

A fork shares what is in memory, and nothing that runs, is open, or was drawn for one process alone.
Alone decides what that is. One thread; standard library alone.
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
# Lines of proc_pid_status(5) that an import could change for all that follows.
_STATUS = (b"SigBlk:", b"SigIgn:", b"SigCgt:", b"Umask:")
_OF_C_LIBRARY = 1 << (32 - 1) | 1 << (33 - 1)
_COPY_MS = 10_000
# They compare the number with the one that they find later, which is what a fork needs.
_KNOW_FORKS = ("filelock", "torch")
# What is drawn here is drawn anew in each worker (`worker.draw_anew`), or is a mere name.
_DRAWN_ANEW = (
    *("random", "numpy.random", "multiprocessing.process", "transformers.utils.hub"),
    *("torch.distributed._composable.contract", "tempfile"),
)
# They list all variables to find those with a prefix of their own.
_LISTS = {"tqdm.std": "TQDM_", "tqdm.utils": "TQDM_", "networkx": "NETWORKX_"}


class Refusal(BaseException):
    """Says why nothing is preloaded, in words for people. No module being imported catches it."""


class _Arguments(list[str]):
    """`sys.argv` while modules are imported that must not depend on it."""

    noted: Callable[[str], None]

    def __getitem__(self, place: Any) -> Any:
        self.noted("reads the program's arguments")
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        self.noted("reads the program's arguments")
        return super().__iter__()


class Checks:
    """Watches one sequence of imports; `fault` is called after each."""

    def __init__(self, importing: Callable[[], str], memory_bytes: int) -> None:
        self._importing = importing
        """Returns the module that is being imported; empty where none is."""
        self._memory_bytes = memory_bytes
        self._fault = ""
        self.offender = ""
        """The module that has done what `fault` returned; it may still be imported."""
        self._restore: list[Callable[[], None]] = []
        self.consulted: dict[str, str | None] = {}
        """Each variable that an import read, and what it had then."""
        self.new: list[str] = []
        """Variables that were read since the caller looked last."""
        self.generators: list[random.Random] = []
        """Made without a seed: each worker draws its own."""
        self._files: dict[str, str] = {}
        self._task_count = 1
        self._began: dict[str, Any] = {}

    def begin(self) -> None:
        """Note what is so before the first import, and put ours in the place of what tells."""
        self._files = _open_files()
        self._began = _state()
        self._watch_variables()
        arguments = _Arguments(sys.argv)
        _Arguments.noted = staticmethod(self._note)
        self._replace(sys, "argv", arguments)
        self._watch_identity()
        self._watch_generators()

    def end(self) -> None:
        """Put back what was there."""
        for restore in reversed(self._restore):
            restore()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)
        self._restore.append(lambda: setattr(owner, name, original))

    def _note(self, fault: str) -> None:
        by = self._importing()
        if by and not self._fault:
            self._fault, self.offender = fault, by

    # -- what tells one process from another

    def _watch_variables(self) -> None:
        environ: Any = os.environ
        encode, decode = environ.encodekey, environ.decodekey

        def consulted(name: Any) -> Any:
            by = self._importing()
            if by and isinstance(name, str) and name.startswith(_LISTS.get(by, "")):
                self.new.append(name)
                if name not in self.consulted:
                    value = environ._data.get(encode(name))
                    self.consulted[name] = None if value is None else environ.decodevalue(value)
            return encode(name)

        def listed(name: Any) -> Any:
            if self._importing() not in _LISTS:
                self._note("reads all variables of the environment")
            return decode(name)

        self._replace(environ, "encodekey", consulted)
        self._replace(environ, "decodekey", listed)

    def _watch_identity(self) -> None:
        getpid, urandom = os.getpid, os.urandom

        def own_id() -> int:
            if self._importing().partition(".")[0] not in _KNOW_FORKS:
                self._note("reads the number of its process")
            return getpid()

        def drawn(count: int) -> bytes:
            by = self._importing()
            if not any(by == name or by.startswith(f"{name}.") for name in _DRAWN_ANEW):
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

    # -- what is looked at after an import

    def fault(self, *, is_outermost: bool) -> str:
        """What the module that was just imported has done that a fork cannot share; or nothing."""
        fault, self._fault = self._fault, ""
        if not fault:
            self.offender = ""
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
        # Libraries that know forks end their threads before one, and begin them again after it.
        child = os.fork()
        if child == 0:
            os._exit(0)
        if not _has_ended(child):
            return "keeps a copy of the process from ending"
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
            raise Refusal(f"the imports take more than {self._memory_bytes >> 20} MiB of memory")
        return ""


def _has_ended(child: int) -> bool:
    """Return whether a child ended in time, and reap it."""
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    has_ended = bool(poll.poll(_COPY_MS))
    os.close(descriptor)
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    # A killed one, of which nobody else is left, waits for nothing but the kernel.
    os.waitpid(child, 0 if has_ended else os.WNOHANG)
    return has_ended


def _open_files() -> dict[str, str]:
    """What each descriptor leads to."""
    found = {}
    for name in os.listdir(_FILES):
        try:
            found[name] = os.readlink(f"{_FILES}/{name}")
        except OSError:
            continue  # the listing's own
    return found


def _state() -> dict[str, Any]:
    """What all that follows would inherit from an import."""
    # As bytes: a codec would be one more import.
    status = Path("/proc/self/status").read_bytes()
    lines = [_without_own(line) for line in status.splitlines() if line.startswith(_STATUS)]
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        has_children = True
    except ChildProcessError:
        has_children = False
    return {
        "how signals or new files are treated": lines,
        "the processes below it (it starts one)": has_children,
        "the working directory": os.getcwd(),
        "what follows each line of code": (sys.gettrace(), sys.getprofile()),
        "how modules are imported": builtins.__import__,
        "the signal that wakes it up": signal.getitimer(signal.ITIMER_REAL),
    }


def _without_own(line: bytes) -> bytes:
    """A line of `_STATUS` without the signals that the C library takes when a first thread is
    made, as nptl(7) says: they are of no other process."""
    name, _, value = line.partition(b":")
    if name != b"SigCgt":
        return line
    return b"%b:%x" % (name, int(value, 16) & ~_OF_C_LIBRARY)


def device_mapping() -> str:
    """A device whose memory this process has, as an import may have left it; or nothing."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        path = line.partition("/")[2]
        if path.startswith("dev/") and not path.startswith(("dev/zero", "dev/shm/")):
            return f"/{path}"
    return ""
