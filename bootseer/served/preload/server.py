"""The preloader: imports what a plan names, and forks a worker for each process that asks.

`serve` runs in the job's interpreter while that starts (`sitecustomize`), and returns only in a
worker, which then goes on as that interpreter, with its own `__main__`. The preloader ends with the
launcher's process. Standard library alone; one thread.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from bootseer.served.preload import SERVER_VARIABLE
from bootseer.served.preload.checks import Refusal
from bootseer.served.preload.importing import Offence, preload
from bootseer.served.preload.preloaded import Preloaded
from bootseer.served.preload.record import replace_document
from bootseer.served.preload.requests import differing_situation, differing_variable, receive
from bootseer.served.preload.shim import situation
from bootseer.served.preload.worker import draw_anew, drawn_by, fork_worker, peer_of, show_as

_NAME = b"bootseer-preload"
_ANSWER_S = 2.0
_LOOK_MS = 1000
_ATTEMPTS_MAX = 20
# A start that imports more than that beyond what was imported gets a preloader of its own.
_NEW_SHARE_MAX = 0.05
# What the interpreter's own start may bring that is no part of it.
_OF_START = ("sitecustomize", "_distutils_hack", "_virtualenv", "__main__")


def serve(visible: Collection[str], consulted: Mapping[str, str | None]) -> None:
    """Serve until the launcher has ended. Returns in each worker.

    `visible`: the modules that the interpreter had when it was ours. `consulted`: the variables
    that were read until then.
    """
    folder, descriptor, attempt = os.environ[SERVER_VARIABLE].split("|")
    began = dict(os.environb)
    del os.environ[SERVER_VARIABLE]
    plan = json.loads(Path(folder, "plan").read_bytes())
    _Server(folder, plan, visible, consulted, began, int(descriptor), int(attempt)).run()


class _Server:
    def __init__(
        self,
        folder: str,
        plan: Mapping[str, Any],
        visible: Collection[str],
        consulted: Mapping[str, str | None],
        began: dict[bytes, bytes],
        descriptor: int,
        attempt: int,
    ) -> None:
        self._attempt = attempt
        self._folder = folder
        self._lock = _held(folder)
        self._until_s = 0.0
        self._plan = plan
        self._visible = visible
        self._consulted = dict(consulted)
        self._began = began
        self._own = situation()
        self._launcher = _process(*plan["process"])
        self._listener = socket.socket(fileno=descriptor)
        self._refusal = ""
        self._directory = os.getcwd()
        self._handlers = {one: signal.getsignal(one) for one in signal.valid_signals()}
        self._preloaded: Preloaded | None = None
        self._drawn: dict[str, Any] = {}
        self._name = Path("/proc/self/comm").read_bytes().rstrip(b"\n")

    def run(self) -> None:
        words = list(sys.orig_argv)
        show_as(["bootseer preload", self._plan["job"]], _NAME)
        try:
            self._check_start()
            self._preloaded = self._import()
            self._consulted.update(self._preloaded.checks.consulted)
            self._drawn = drawn_by(self._preloaded.modules)
            # Before a fork: to touch them costs each worker a page of its own.
            self._preloaded.hide(self._visible)
        except Refusal as refusal:
            self._refusal = str(refusal)
        except Offence as offence:
            self._begin_again(words, offence)
        while True:
            poll = select.poll()
            poll.register(self._listener.fileno(), select.POLLIN)
            if self._launcher >= 0:
                poll.register(self._launcher, select.POLLIN)
            for ready, _ in poll.poll(_LOOK_MS):
                if ready == self._launcher:
                    os.close(ready)
                    self._launcher = -1
                elif self._answer():
                    return
            self._age()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _age(self) -> None:
        """End some time after the launcher, unless another start of the job has come."""
        if self._launcher >= 0:
            self._until_s = 0.0
        elif not self._until_s:
            self._until_s = time.monotonic() + self._plan["linger_s"]
        if self._until_s and time.monotonic() >= self._until_s:
            self._end()

    def _end(self) -> NoReturn:
        self._leave()
        os._exit(0)

    def _leave(self) -> None:
        for name in ("socket", "python", "plan"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, name))
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)
        os.close(self._lock)

    def _adopt(self, connection: socket.socket, request: Mapping[str, Any], launcher: int) -> None:
        """Serve another start of the job, if it is what this process was made for; else, or where
        it asks for that, end. Nobody else is served any more: the last launcher has ended."""
        if self._launcher >= 0:
            connection.sendall(b"Rit serves another start")
            return
        try:
            folder = request["adopt"]
            plan = json.loads(Path(folder, "plan").read_bytes())
            if refusal := self._cannot_serve(request, plan["program"]):
                raise Refusal(refusal)
            connection.sendall(b"F")
            if connection.recv(1) != b"G":
                raise Refusal("it has begun one of its own")
        except (OSError, ValueError, Refusal) as reason:
            with contextlib.suppress(OSError):
                connection.sendall(f"R{reason}".encode()[:4000])
            self._end()
        self._leave()
        self._folder, self._plan = folder, plan
        self._lock = _held(folder)
        self._launcher = os.dup(launcher)

    def _status(self) -> bytes:
        count = len(self._preloaded.modules) if self._preloaded is not None else 0
        return f"F{count} {os.getpid()}".encode()

    def _cannot_serve(self, request: Mapping[str, Any], program: Mapping[str, Any]) -> str:
        """Why a start cannot have this preloader; or nothing."""
        if self._preloaded is None:
            return self._refusal
        ours = self._plan["program"]
        # With what it has needed itself, which its workers have found, too.
        own = (name for name, _ in self._preloaded.modules)
        known = {*ours["modules"], *own, *self._refused()}
        if program["executable"] != ours["executable"]:
            return "another interpreter was started last"
        if sum(name not in known for name in program["modules"]) > _NEW_SHARE_MAX * len(known):
            return "more is imported by now"
        if stale := self._preloaded.stale():
            return f"{stale} was changed since it was imported"
        return self._differs(request, program)

    # -- imports

    def _check_start(self) -> None:
        for name in self._visible:
            top = name.partition(".")[0]
            if not (
                top in sys.stdlib_module_names
                or top in _OF_START
                or top.startswith(("__editable__", "_bootseer"))
            ):
                raise Refusal(f"the interpreter itself loads {top}")
        if sys.gettrace() is not None or sys.getprofile() is not None:
            raise Refusal("a debugger or a profiler follows the interpreter")

    def _import(self) -> Preloaded:
        record = self._plan["program"]
        refused = self._refused()
        if self._attempt > _ATTEMPTS_MAX:
            raise Refusal(f"too many modules cannot be preloaded; see {self._plan['refused']}")
        own = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            output = os.memfd_create("output", os.MFD_CLOEXEC)
            os.dup2(output, number, inheritable=False)
            os.close(output)
        try:
            return preload(
                record["modules"],
                refused,
                {**dict.fromkeys(refused.get("", "").split(), "unknown"), **record["changed"]},
                record["salt"],
                self._visible,
                self._plan["memory_bytes"],
            )
        finally:
            for number, original in zip((1, 2), own, strict=True):
                os.dup2(original, number)
                os.close(original)

    def _refused(self) -> dict[str, str]:
        """Why modules are not preloaded, by name; under "": variables that the program sets."""
        try:
            return dict(json.loads(Path(self._plan["refused"]).read_bytes()))
        except (OSError, ValueError):
            return {}

    def _refuse(self, more: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):
            replace_document(self._plan["refused"], {**self._refused(), **more})

    def _begin_again(self, words: list[str], offence: Offence) -> NoReturn:
        """A process that cannot be forked begins anew, without the modules that led to it."""
        known = self._refused()
        why = known.get(offence.module) or str(offence)
        self._refuse(
            {**{one: known.get(one, "") for one in offence.importers}, offence.module: why}
        )
        sys.stderr.write(f"not preloaded: {offence}\n")
        sys.stderr.flush()
        # As it was started, whatever a module has done.
        os.chdir(self._directory)
        os.umask(self._own["umask"])
        for number, handler in self._handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        os.set_inheritable(self._listener.fileno(), True)
        where = f"{self._folder}|{self._listener.fileno()}|{self._attempt + 1}"
        environ = {**self._began, SERVER_VARIABLE.encode(): where.encode()}
        os.execve(sys.executable, words, environ)

    # -- requests

    def _answer(self) -> bool:
        """Answer one process; True in its worker."""
        connection, _ = self._listener.accept()
        descriptors: list[int] = []
        is_worker = False
        try:
            with connection:
                connection.settimeout(_ANSWER_S)
                if peer_of(connection)[1] != os.geteuid():
                    return False
                request, descriptors = receive(connection)
                if "status" in request:
                    connection.sendall(self._status())
                    return False
                if "adopt" in request:
                    self._adopt(connection, request, descriptors[0])
                    return False
                refusal = self._refusal or self._differs(request, self._plan["program"])
                if refusal:
                    connection.sendall(f"R{refusal}".encode()[:4000])
                    return False
                is_worker = self._fork(connection, request, descriptors)
                return is_worker
        except Exception as error:
            # Whatever it is: the preloader lives for the next worker.
            sys.stderr.write(f"a request failed: {type(error).__name__}: {error}\n")
            sys.stderr.flush()
            return False
        finally:
            # A worker has closed what is not its own, and has others by these numbers.
            for descriptor in descriptors if not is_worker else ():
                os.close(descriptor)

    def _differs(self, request: Mapping[str, Any], program: Mapping[str, Any]) -> str:
        """Why a process of `program` cannot be a fork of this one; or nothing."""
        words = self._plan["program"]["words"]
        ours = {n: v for n, v in self._began.items() if n != SERVER_VARIABLE.encode()}
        return (
            differing_situation(self._own["fixed"], request["fixed"])
            or (
                ""
                if request["words"][: len(words)] == words
                else "another program was started last"
            )
            or differing_variable(ours, request["environment"], self._consulted, program["varying"])
        )

    def _fork(
        self, connection: socket.socket, request: Mapping[str, Any], descriptors: list[int]
    ) -> bool:
        preloaded = self._preloaded
        assert preloaded is not None

        def check() -> None:
            """In the worker: others begin meanwhile."""
            if stale := preloaded.stale():
                raise Refusal(f"{stale} was changed since it was imported")

        own = (self._own, self._name)
        if not fork_worker(connection, request, descriptors, own, check):
            return False
        environment = dict(os.environb)

        def begin_again(why: str) -> NoReturn:
            """Start the program as it was started."""
            os.write(2, f"bootseer: started again without the preloader: {why}\n".encode())
            os.execve(sys.executable, list(sys.orig_argv), environment)

        def refuse(name: str, why: str) -> NoReturn:
            """An import has read what the program does before it."""
            known = self._refused().get("", "").split()
            self._refuse({"": " ".join(sorted({*known, name}))})
            begin_again(why)

        try:
            self._listener.detach()
            draw_anew(self._drawn, preloaded.checks.generators)
            preloaded.install(refuse)
        except Exception as error:
            # Else this worker would go on as if it were the preloader.
            begin_again(f"{type(error).__name__}: {error}")
        return True


def _held(folder: str) -> int:
    """A descriptor that tells others, by its lock, that this folder is in use."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _process(pid: int, started: str) -> int:
    """A descriptor of the process; -1 where it has ended, whatever has its id now."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    # As `linux.processes` reads proc_pid_stat(5), which is not for this interpreter.
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[19] == started.encode():
            return descriptor
    os.close(descriptor)
    return -1
