"""The preloader: imports what a plan names, and forks a worker for each process that asks.

`serve` runs in the job's interpreter while that starts (`sitecustomize`), and returns only in a
worker, which then goes on as that interpreter, with its own `__main__`. The preloader ends with the
launcher's process. Standard library alone; one thread.
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

from bootseer.served.preload import SERVER_VARIABLE, is_of_process
from bootseer.served.preload.checks import Refusal
from bootseer.served.preload.importing import Offence, preload
from bootseer.served.preload.preloaded import NATIVE, Preloaded
from bootseer.served.preload.record import replace_document
from bootseer.served.preload.shim import situation
from bootseer.served.preload.worker import draw_anew, drawn_by, fork_worker, peer_of, show_as

_NAME = b"bootseer-preload"
_REQUEST_BYTES_MAX = 1 << 24
_ANSWER_S = 2.0
_LOOK_MS = 1000
_ATTEMPTS_MAX = 20
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
        self._plan = plan
        self._visible = visible
        self._consulted = dict(consulted)
        self._began = began
        self._own = situation()
        self._launcher = os.pidfd_open(plan["pid"])
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
        poll = select.poll()
        poll.register(self._listener.fileno(), select.POLLIN)
        poll.register(self._launcher, select.POLLIN)
        while True:
            for ready, _ in poll.poll(_LOOK_MS):
                if ready == self._launcher:
                    self._end()
                if self._answer():
                    return
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _end(self) -> NoReturn:
        for name in ("socket", "python", "plan"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, name))
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)
        os._exit(0)

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
        *importers, module = offence.modules
        known = self._refused()
        self._refuse({**dict.fromkeys(importers, ""), module: known.get(module) or str(offence)})
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
                request, descriptors = _receive(connection)
                refusal = self._refusal or self._differs(request)
                if refusal:
                    connection.sendall(f"R{refusal}".encode()[:4000])
                    return False
                is_worker = self._fork(connection, request, descriptors)
                return is_worker
        except (OSError, ValueError, EOFError, TypeError, KeyError, IndexError) as error:
            sys.stderr.write(f"a request failed: {error}\n")
            sys.stderr.flush()
            return False
        finally:
            # A worker has closed what is not its own, and has others by these numbers.
            for descriptor in descriptors if not is_worker else ():
                os.close(descriptor)

    def _differs(self, request: Mapping[str, Any]) -> str:
        """Why a process cannot be a fork of this one; or nothing."""
        for what, value in request["fixed"].items():
            if self._own["fixed"].get(what) != value:
                return f"its {what} differs from the preloader's"
        words = self._plan["program"]["words"]
        if request["words"][: len(words)] != words:
            return "another program was started last"
        return self._variables_differ(request["environment"])

    def _variables_differ(self, environment: Mapping[bytes, bytes]) -> str:
        ours = {n: v for n, v in self._began.items() if n != SERVER_VARIABLE.encode()}
        for raw in sorted({*ours, *environment}):
            if ours.get(raw) == environment.get(raw):
                continue
            name = os.fsdecode(raw)
            if name in self._consulted:
                return f"the variable {name} differs, which was read by an import"
            varies = is_of_process(name) or name in self._plan["program"]["varying"]
            if name.startswith(NATIVE) or not varies:
                return f"the variable {name} differs"
        return ""

    def _fork(
        self, connection: socket.socket, request: Mapping[str, Any], descriptors: list[int]
    ) -> bool:
        shim = os.path.join(self._folder, "python")
        guard = [sys.executable, "-ISE", shim]
        preloaded = self._preloaded
        assert preloaded is not None

        def check() -> None:
            """In the worker: others begin meanwhile."""
            if stale := preloaded.stale():
                raise Refusal(f"{stale} was changed since it was imported")

        own = (self._own, self._name)
        if not fork_worker(connection, request, descriptors, own, check, guard):
            return False
        self._listener.detach()
        draw_anew(self._drawn, preloaded.checks.generators)
        environment = dict(os.environb)

        def begin_again(name: str, why: str) -> NoReturn:
            """Start the program as it was started: an import has read what it does before it."""
            known = self._refused().get("", "").split()
            self._refuse({"": " ".join(sorted({*known, name}))})
            os.write(2, f"bootseer: started again without the preloader: {why}\n".encode())
            os.execve(sys.executable, list(sys.orig_argv), environment)

        preloaded.install(begin_again)
        return True


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, descriptors, _, _ = socket.recv_fds(connection, 8, 256)
    try:
        size = int.from_bytes(data, "big")
        if len(data) != 8 or size > _REQUEST_BYTES_MAX or not descriptors:
            raise ValueError("it is not understood")
        text = b""
        while len(text) < size:
            piece = connection.recv(min(size - len(text), 1 << 20))
            if not piece:
                raise EOFError("it ended")
            text += piece
        request = marshal.loads(text)
        if len(request["descriptors"]) + 1 != len(descriptors):
            raise ValueError("files are missing")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return request, descriptors
