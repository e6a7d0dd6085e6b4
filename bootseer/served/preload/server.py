"""The preloader: imports the modules of a plan, and forks a worker for each process that asks.

`serve` runs in the job's interpreter while that starts (`sitecustomize`). It returns only in a
worker, which then goes on as that interpreter with its own `__main__`. The preloader ends with the
last process that uses it (`served.users`), or is killed. Standard library alone; one thread.
"""

import contextlib
import json
import marshal
import os
import select
import signal
import socket
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from bootseer.served.preload import SERVER_VARIABLE, is_worker_variable
from bootseer.served.preload.checks import PreloadRefused
from bootseer.served.preload.importing import ModuleRefused, preload
from bootseer.served.preload.preloaded import NATIVE, Preloaded
from bootseer.served.preload.record import replace_document
from bootseer.served.preload.shim import inherited_attributes
from bootseer.served.preload.worker import (
    fork_worker,
    peer_credentials,
    reseed,
    set_command_line,
    stateful_modules,
)

_NAME = b"bootseer-preload"
_ANSWER_S = 2.0
_CHECK_MS = 1000
_ATTEMPTS_MAX = 20
# A start with a larger share of modules that were not preloaded gets a preloader of its own.
_NEW_SHARE_MAX = 0.05
# Modules besides the standard library that an interpreter may load as it starts.
_STARTUP_MODULES = ("sitecustomize", "_distutils_hack", "_virtualenv", "__main__")


def serve(initial_modules: Collection[str], variables_read: Mapping[str, str | None]) -> None:
    """Serve until no process uses this one. Return in each worker.

    `initial_modules` are the modules, and `variables_read` the variables that were read, before
    Bootseer's code ran.
    """
    folder, listener, lock, attempt = os.environ[SERVER_VARIABLE].split("|")
    began = dict(os.environb)
    del os.environ[SERVER_VARIABLE]
    plan = json.loads(Path(folder, "plan").read_bytes())
    descriptors = int(listener), int(lock)
    _PreloadServer(
        folder, plan, initial_modules, variables_read, began, descriptors, int(attempt)
    ).run()


class _PreloadServer:
    def __init__(
        self,
        folder: str,
        plan: Mapping[str, Any],
        initial_modules: Collection[str],
        variables_read: Mapping[str, str | None],
        began: dict[bytes, bytes],
        descriptors: tuple[int, int],
        attempt: int,
    ) -> None:
        self._attempt = attempt
        self._folder = folder
        # Held by this process, and by no worker of it.
        self._lock = descriptors[1]
        self._plan = plan
        self._initial_modules = initial_modules
        self._variables_read = dict(variables_read)
        self._began = began
        self._attributes = inherited_attributes()
        self._user = _open_process(*plan["process"])
        self._listener = socket.socket(fileno=descriptors[0])
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._refusal = ""
        self._directory = os.getcwd()
        self._handlers = {one: signal.getsignal(one) for one in signal.valid_signals()}
        self._preloaded: Preloaded | None = None
        self._stateful_modules: dict[str, Any] = {}
        self._name = Path("/proc/self/comm").read_bytes().rstrip(b"\n")

    def run(self) -> None:
        words = list(sys.orig_argv)
        set_command_line(["bootseer preload", self._plan["job"]], _NAME)
        try:
            self._check_start()
            self._preloaded = self._import()
            self._variables_read.update(self._preloaded.checks.variables_read)
            self._stateful_modules = stateful_modules(self._preloaded.modules)
            # Before a fork, since a worker that touches them would copy their pages.
            self._preloaded.hide(self._initial_modules)
        except PreloadRefused as refusal:
            self._refusal = str(refusal)
        except ModuleRefused as refusal:
            self._begin_again(words, refusal)
        while True:
            poll = select.poll()
            poll.register(self._listener.fileno(), select.POLLIN)
            if self._user >= 0:
                poll.register(self._user, select.POLLIN)
            for ready, _ in poll.poll(_CHECK_MS):
                if ready == self._user:
                    os.close(ready)
                    self._user = -1
                elif self._answer():
                    return
            if self._user < 0:
                self._find_user()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _find_user(self) -> None:
        """Watch a process that uses this preloader; end if none lives."""
        with contextlib.suppress(OSError):
            # In a container there is no such folder: the preloader ends with the start's process.
            for name in os.listdir(self._plan["users"]) if self._plan["users"] else ():
                pid, _, started = name.partition(".")[0].partition("-")
                if pid.isdigit() and (user := _open_process(int(pid), started)) >= 0:
                    self._user = user
                    return
        os._exit(0)

    def _adopt(self, connection: socket.socket, request: Mapping[str, Any], start: int) -> None:
        """Serve another start of the job, if the preloader fits it; else end."""
        last = _open_process(*self._plan["process"])
        if last >= 0:
            os.close(last)
            connection.sendall(b"Rthe preloader serves another start")
            return
        plan = request["adopt"]
        try:
            if refusal := self._cannot_serve(request, plan["program"]):
                raise PreloadRefused(refusal)
            connection.sendall(b"F")
            if connection.recv(1) != b"G":
                raise PreloadRefused("the start has begun a preloader of its own")
        except (OSError, ValueError, PreloadRefused) as reason:
            with contextlib.suppress(OSError):
                connection.sendall(f"R{reason}".encode()[:4000])
            os._exit(0)
        self._plan = plan
        if self._user >= 0:
            os.close(self._user)
        self._user = os.dup(start)

    def _status(self) -> bytes:
        count = len(self._preloaded.modules) if self._preloaded is not None else 0
        return f"F{count} {os.getpid()}".encode()

    def _cannot_serve(self, request: Mapping[str, Any], program: Mapping[str, Any]) -> str:
        """Return why a start cannot use this preloader; empty if it can."""
        if self._preloaded is None:
            return self._refusal
        ours = self._plan["program"]
        # Includes the modules that Bootseer's code has imported, which its workers record, too.
        own = (name for name, _ in self._preloaded.modules)
        known = {*ours["modules"], *own, *self._refused()}
        if program["executable"] != ours["executable"]:
            return "another interpreter was started last"
        if sum(name not in known for name in program["modules"]) > _NEW_SHARE_MAX * len(known):
            return "the program imports more modules now"
        if changed := self._preloaded.changed_file():
            return f"{changed} was changed since it was imported"
        return self._difference(request, program)

    # -- imports

    def _check_start(self) -> None:
        for name in self._initial_modules:
            top = name.partition(".")[0]
            if not (
                top in sys.stdlib_module_names
                or top in _STARTUP_MODULES
                or top.startswith(("__editable__", "_bootseer"))
            ):
                raise PreloadRefused(f"the interpreter itself loads {top}")
        if sys.gettrace() is not None or sys.getprofile() is not None:
            raise PreloadRefused("a debugger or a profiler is active")

    def _import(self) -> Preloaded:
        record = self._plan["program"]
        refused = self._refused()
        if self._attempt > _ATTEMPTS_MAX:
            raise PreloadRefused(
                f"too many modules cannot be preloaded; see {self._plan['refused']}"
            )
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
                self._initial_modules,
                self._plan["memory_bytes"],
            )
        finally:
            for number, original in zip((1, 2), own, strict=True):
                os.dup2(original, number)
                os.close(original)

    def _refused(self) -> dict[str, str]:
        """Return the refused modules with reasons; under "" the variables that the program sets."""
        try:
            return dict(json.loads(Path(self._plan["refused"]).read_bytes()))
        except (OSError, ValueError):
            return {}

    def _refuse(self, more: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):
            replace_document(self._plan["refused"], {**self._refused(), **more})

    def _begin_again(self, words: list[str], refusal: ModuleRefused) -> NoReturn:
        """Restart this process without the refused module and the modules that led to it."""
        known = self._refused()
        why = known.get(refusal.module) or str(refusal)
        self._refuse(
            {**{one: known.get(one, "") for one in refusal.importers}, refusal.module: why}
        )
        sys.stderr.write(f"not preloaded: {refusal}\n")
        sys.stderr.flush()
        # Restore the state that this process began with, which a module may have changed.
        os.chdir(self._directory)
        os.umask(self._attributes["umask"])
        for number, handler in self._handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        kept = (self._listener.fileno(), self._lock)
        for descriptor in kept:
            os.set_inheritable(descriptor, True)
        where = "|".join(map(str, (self._folder, *kept, self._attempt + 1)))
        environ = {**self._began, SERVER_VARIABLE.encode(): where.encode()}
        os.execve(sys.executable, words, environ)

    # -- requests

    def _answer(self) -> bool:
        """Answer one client. Return True in the worker that was forked for it."""
        connection, _ = self._listener.accept()
        descriptors: list[int] = []
        is_worker = False
        try:
            with connection:
                connection.settimeout(_ANSWER_S)
                if peer_credentials(connection)[1] != os.geteuid():
                    return False
                request, descriptors = _receive(connection)
                if "status" in request:
                    connection.sendall(self._status())
                    return False
                if "adopt" in request:
                    self._adopt(connection, request, descriptors[0])
                    return False
                refusal = self._refusal or self._difference(request, self._plan["program"])
                if refusal:
                    connection.sendall(f"R{refusal}".encode()[:4000])
                    return False
                is_worker = self._fork(connection, request, descriptors)
                return is_worker
        except Exception as error:
            # Go on after any error: the preloader must live for the next worker.
            sys.stderr.write(f"a request failed: {type(error).__name__}: {error}\n")
            sys.stderr.flush()
            return False
        finally:
            # Not in a worker, which has closed them and uses their numbers for its own files.
            for descriptor in descriptors if not is_worker else ():
                os.close(descriptor)

    def _difference(self, request: Mapping[str, Any], program: Mapping[str, Any]) -> str:
        words = self._plan["program"]["words"]
        ours = {n: v for n, v in self._began.items() if n != SERVER_VARIABLE.encode()}
        return (
            _differing_attribute(self._attributes["fixed"], request["fixed"])
            or (
                ""
                if request["words"][: len(words)] == words
                else "another program was started last"
            )
            or _differing_variable(
                ours, request["environment"], self._variables_read, program["varying"]
            )
        )

    def _fork(
        self, connection: socket.socket, request: Mapping[str, Any], descriptors: list[int]
    ) -> bool:
        preloaded = self._preloaded
        assert preloaded is not None

        def check() -> None:
            # In the worker, so that the preloader can serve others meanwhile.
            if changed := preloaded.changed_file():
                raise PreloadRefused(f"{changed} was changed since it was imported")

        own = (self._attributes, self._name)
        if not fork_worker(connection, request, descriptors, own, check):
            return False
        environment = dict(os.environb)

        def begin_again(why: str) -> NoReturn:
            os.write(2, f"bootseer: started again without the preloader: {why}\n".encode())
            os.execve(sys.executable, list(sys.orig_argv), environment)

        def refuse(name: str, why: str) -> NoReturn:
            # The program has changed something before it imported a module that reads it.
            known = self._refused().get("", "").split()
            self._refuse({"": " ".join(sorted({*known, name}))})
            begin_again(why)

        try:
            self._listener.detach()
            reseed(self._stateful_modules, preloaded.checks.generators)
            preloaded.install(refuse)
        except Exception as error:
            # An exception here would make this worker go on as the preloader.
            begin_again(f"{type(error).__name__}: {error}")
        return True


def _open_process(pid: int, started: str) -> int:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    # proc_pid_stat(5), start time; this interpreter cannot import `bootseer.linux.processes`.
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[19] == started.encode():
            return descriptor
    os.close(descriptor)
    return -1


# ---- requests -----------------------------------------------------------------------------------

_REQUEST_BYTES_MAX = 1 << 24


def _differing_attribute(own: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return why a process with these attributes cannot be a fork; empty if it can. Pure."""
    for what, value in asked.items():
        if own.get(what) != value:
            return f"its {what} differs from the preloader's"
    return ""


def _differing_variable(
    own: Mapping[bytes, bytes],
    asked: Mapping[bytes, bytes],
    variables_read: Collection[str],
    varying: Collection[str],
) -> str:
    """Return why a process with the variables `asked` cannot be a fork; empty if it can. Pure.

    `variables_read` are those that an import has read; `varying` differ from start to start.
    """
    for raw in sorted({*own, *asked}):
        if own.get(raw) == asked.get(raw):
            continue
        name = os.fsdecode(raw)
        if name in variables_read:
            return f"the variable {name} differs, which was read by an import"
        if name.startswith(NATIVE) or not (is_worker_variable(name) or name in varying):
            return f"the variable {name} differs"
    return ""


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and its descriptors. Raises: OSError, ValueError, EOFError if malformed."""
    data, descriptors, _, _ = socket.recv_fds(connection, 8, 256)
    try:
        size = int.from_bytes(data, "big")
        if len(data) != 8 or size > _REQUEST_BYTES_MAX or not descriptors:
            raise ValueError("the request has an unknown format")
        text = b""
        while len(text) < size:
            piece = connection.recv(min(size - len(text), 1 << 20))
            if not piece:
                raise EOFError("the connection was closed")
            text += piece
        request = marshal.loads(text)
        if len(request["descriptors"]) + 1 != len(descriptors):
            raise ValueError("descriptors are missing")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return request, descriptors
