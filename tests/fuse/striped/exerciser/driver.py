"""Coordinator of the exerciser: two mounts of one folder, worker processes, and a model.

The coordinator never touches a mount, so that it can always end hanging processes. Every sequence
of operations is drawn from the seed and its number, and uses a folder of its own.
"""

import contextlib
import errno
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bootseer.checkpoints import read_into, size_of
from bootseer.errors import BusyError, DeadlineError, NotFoundError, UnavailableError
from bootseer.fuse.kernel.unmount import abort_connection
from bootseer.fuse.striped.mounted.mount import MountedCheckpoints, restart_checkpoints
from bootseer.linux import mount_table
from bootseer.linux.processes import wait_for_exit
from bootseer.served.service import find_checkpoints
from bootseer.store import open_backend
from testbed.needs import linux_version
from testbed.waiting import wait_for
from tests.fuse.striped.exerciser import worker
from tests.fuse.striped.exerciser.model import (
    Answer,
    DeviationError,
    Model,
    Operation,
    described,
)
from tests.fuse.striped.exerciser.operations import THEMES, Chooser
from tests.fuse.striped.support.harness import storage_on
from tests.fuse.striped.support.mounting import checkpoints

UNIT_BYTES = 64 * 2**10
"""Files larger than this are striped; small, so that a sequence is short."""
LENGTH = 80
"""Number of operations of one sequence."""
_ANSWER_S = 60.0
_KILLS_COUNT, _KILLS_S = 4, 12.0
"""Largest number of kills of a server within this time."""
_LOG_LINES = 8
_LINE_CHARS = 300
_PROCESSES = ("A0", "A1", "A2", "B0", "B1")
"""Names of processes: the letter is the mount; those with a 0 only read, and are never killed."""


class HangError(Exception):
    """Error of a process that does not answer."""


class SequenceError(Exception):
    """Sequence of operations that shows a deviation."""

    def __init__(self, operations: Sequence[Operation], why: str) -> None:
        super().__init__(why)
        self.operations = list(operations)
        self.why = why

    def __str__(self) -> str:
        return "\n".join([*map(json.dumps, self.operations), self.why])


class Process:
    """Coordinator's end of one worker process."""

    def __init__(self, channel: socket.socket, popen: "subprocess.Popen[bytes] | None") -> None:
        self._channel = channel
        self._lines = channel.makefile("rb")
        self._popen = popen
        self.pid = 0
        self.name = ""
        self.is_alive = True

    def greet(self) -> None:
        """Read the process's id."""
        greeting = json.loads(self._lines.readline())
        self.name, self.pid = greeting["name"], greeting["pid"]

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """Send a request and return its answer. Raises: HangError."""
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
            line = self._lines.readline()
        except TimeoutError:
            raise HangError(f"process {self.name} did not answer {request}") from None
        except OSError:
            line = b""
        if line:
            return dict(json.loads(line))
        self._wait()
        self.is_alive = False
        return {"died": self._popen.returncode if self._popen is not None else "a signal"}

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send a request without an answer."""
        self._channel.sendall(json.dumps(request).encode() + b"\n")

    def end(self, *, is_killed: bool) -> None:
        """Kill the process or let it exit, which closes its files. Raises: HangError."""
        if not self.is_alive:
            return
        self.is_alive = False
        with contextlib.suppress(OSError):
            if is_killed:
                os.kill(self.pid, signal.SIGKILL)
            else:
                self.tell({"do": "exit"})
        self._wait()
        self._lines.close()
        self._channel.close()

    def _wait(self) -> None:
        if self._popen is not None:
            try:
                self._popen.wait(_ANSWER_S)
            except subprocess.TimeoutExpired:
                raise HangError(f"process {self.name} does not end") from None
            return
        try:
            has_ended = wait_for_exit(self.pid, _ANSWER_S)
        except ProcessLookupError:
            return
        if not has_ended:
            raise HangError(f"process {self.name} does not end")


class TwoMounts:
    """Two mounts of one folder, and the processes that use them."""

    def __init__(self, folder: Path, url: str, mounted: Mapping[str, MountedCheckpoints]) -> None:
        self.mounted = dict(mounted)
        self.can_restart = _can_restart()
        self.backend = open_backend(url)
        self._storage = storage_on(self.backend, unit=UNIT_BYTES)
        self.processes: dict[str, Process] = {}
        self._kills: dict[str, deque[float]] = {one: deque(maxlen=_KILLS_COUNT) for one in mounted}
        self._address = str(folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        self._listener.settimeout(_ANSWER_S)

    def start(self, name: str) -> None:
        """Start a process."""
        command = [sys.executable, "-I", worker.__file__, self._address, name]
        self._accept(subprocess.Popen(command, cwd="/"))

    def fork(self, who: str, child: str) -> Answer:
        """Make a process fork; its child becomes a process of its own."""
        answer = self.processes[who].ask({"do": "fork", "child": child})
        if "ok" in answer:
            self._accept(None)
        return answer

    def _accept(self, popen: "subprocess.Popen[bytes] | None") -> None:
        channel, _ = self._listener.accept()
        channel.settimeout(_ANSWER_S)
        process = Process(channel, popen)
        process.greet()
        self.processes[process.name] = process

    def end(self, who: str, *, is_killed: bool) -> None:
        """End a process."""
        self.processes.pop(who).end(is_killed=is_killed)

    def restart(self, mount: str, how: str) -> Answer:
        """Replace the server's process of a mount."""
        made = self.mounted[mount]
        before = made.worker_pid
        if how == "kill":
            self._space_out_kills(mount)
            os.kill(before, signal.SIGKILL)
            wait_for(lambda: made.worker_pid != before, "another worker")
            return {"ok": None}
        try:
            restart_checkpoints(made.run_dir, made.directory, timeout_s=0.0, force=how == "force")
        except BusyError as error:
            return {"busy": str(error)}
        return {"ok": None}

    def _space_out_kills(self, mount: str) -> None:
        """Wait before a kill: a supervisor gives up a server that is killed too often."""
        kills = self._kills[mount]
        if len(kills) == kills.maxlen:
            wait_for(lambda: time.monotonic() > kills[0] + _KILLS_S, "a time without kills")
        kills.append(time.monotonic())

    def wait_for_releases(self, mount: str, count: int) -> None:
        """Wait until the server knows that at most `count` files are open."""
        made = self.mounted[mount]
        open_count: object = "an unknown number of"

        def is_known() -> bool:
            nonlocal open_count
            known = find_checkpoints(made.run_dir, made.directory)
            # Suppressed where another process of the server has just begun.
            with contextlib.suppress(UnavailableError, DeadlineError):
                if known is not None:
                    open_count = known.ask("status")["files_open"]
            return open_count == count

        try:
            wait_for(is_known, timeout_s=_ANSWER_S)
        except AssertionError:
            raise HangError(
                f"the server of mount {mount} has {open_count} files open, and its users {count}"
            ) from None

    def stored(self, path: str) -> Answer:
        """Return the result of `peek` on a node that has no file open."""
        try:
            size = size_of(self._storage, path)
            buffer = bytearray(size)
            count = read_into(self._storage, path, buffer)
        except NotFoundError:
            return {"errno": errno.ENOENT}
        return {"ok": {"size": size, "read": described(bytes(buffer[:count]))}}

    def log_ends(self) -> str:
        """Return the last lines of both servers' logs."""
        found = []
        for mount, made in self.mounted.items():
            with contextlib.suppress(OSError):
                lines = made.log.read_text(encoding="utf-8", errors="replace").splitlines()
                found += [f"log of {mount}: {line[:_LINE_CHARS]}" for line in lines[-_LOG_LINES:]]
        return "\n".join(found)

    def reset(self) -> None:
        """End all processes, and start new ones."""
        for name in list(self.processes):
            self.end(name, is_killed=True)
        for mount in self.mounted:
            self.wait_for_releases(mount, 0)

    def close(self) -> None:
        """End all processes; the hanging ones end with their mounts."""
        for process in self.processes.values():
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        for made in self.mounted.values():
            mount = mount_table.find_mount(made.directory)
            if mount is not None:
                abort_connection(mount.device_minor, mount.path)
        for name in list(self.processes):
            with contextlib.suppress(HangError):
                self.end(name, is_killed=True)
        self._listener.close()
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _can_restart() -> bool:
    return linux_version() >= (6, 9)


@contextlib.contextmanager
def open_site(folder: Path, url: str) -> Iterator[TwoMounts]:
    """Mount `url` twice below `folder`."""
    with contextlib.ExitStack() as stack:
        made = {}
        for mount in ("A", "B"):
            directory = folder / mount
            directory.mkdir()
            made[mount] = stack.enter_context(
                checkpoints(folder, directory, url, stripe_unit_bytes=UNIT_BYTES, stripe_count=3)
            )
        yield stack.enter_context(TwoMounts(folder, url, made))


class Run:
    """Sequence of operations in a folder of its own, with a model of it."""

    def __init__(self, site: TwoMounts, folder: str) -> None:
        self._site = site
        self._folder = folder
        self.model = Model(site.mounted, UNIT_BYTES)
        self.done: list[Operation] = []
        for name in (*_PROCESSES, *site.processes):
            if name not in site.processes:
                site.start(name)
            self.model.begin(name, name[0])
        answer = self._site.processes["A0"].ask({"do": "mkdir", "path": self._path("A", "")})
        if "ok" not in answer:
            raise AssertionError(f"no folder to work in: {answer}")

    def _path(self, mount: str, path: str) -> str:
        return str(self._site.mounted[mount].directory / self._folder / path)

    def perform(self, operation: Operation) -> None:
        """Do one operation and judge its answer. Raises: SequenceError."""
        self.done.append(operation)
        with self._judging():
            begun_s = time.monotonic()
            answer = self._act(operation)
            self.model.apply(operation, answer, begun_s, time.monotonic())
            self._find_out()
        for name in _PROCESSES:
            # A killed process is replaced by a new one.
            if name not in self._site.processes:
                self._site.start(name)
                self.model.begin(name, name[0])

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        """Raise SequenceError for a deviation in the block, and for a process that hangs."""
        try:
            yield
        except (DeviationError, HangError) as error:
            why = f"{type(error).__name__}: {error}\n{self._site.log_ends()}"
            raise SequenceError(self.done, why) from None

    def _act(self, operation: Operation) -> Answer:
        do = operation["do"]
        if do == "restart":
            return self._site.restart(operation["mount"], operation["how"])
        who = operation["who"]
        if do == "fork":
            return self._site.fork(who, operation["child"])
        if do in ("kill", "exit"):
            self._site.end(who, is_killed=do == "kill")
            return {"ok": None}
        request = {n: v for n, v in operation.items() if n not in ("who", "target_is_file")}
        for name in ("path", "source", "target"):
            if name in request:
                request[name] = self._path(who[0], request[name])
        return self._site.processes[who].ask(request)

    def _find_out(self) -> None:
        """Read from the storage the results that the last operation has left open."""
        for mount in sorted(self.model.needs_releases):
            self._site.wait_for_releases(mount, self.model.open_count(mount))
        self.model.needs_releases.clear()
        for path in list(self.model.open_questions):
            self.model.answer(path, self._site.stored(f"{self._folder}/{path}"))

    def finish(self) -> None:
        """Close all files, and compare the views of every node. Raises: SequenceError."""
        for who in list(self.model.processes):
            if "." in who:
                self.perform({"do": "exit", "who": who})
        for who in list(self.model.processes):
            for slot in sorted(self.model.mapped(who)):
                self.perform({"do": "unmap", "who": who, "slot": slot})
            for slot in sorted(self.model.slots(who)):
                self.perform({"do": "close", "who": who, "slot": slot})
        with self._judging():
            for mount in self.model.mounts:
                self._site.wait_for_releases(mount, 0)
        for mount in self.model.mounts:
            for directory in sorted(self.model.dirs):
                self.perform({"do": "list", "who": f"{mount}0", "path": directory})
            for path in sorted(self.model.files):
                self.perform({"do": "peek", "who": f"{mount}0", "path": path})
        self._site.backend.delete(self._folder, recursive=True)


_numbers = itertools.count()


def run_random(
    site: TwoMounts,
    seed: str,
    number: int,
    *,
    length: int = LENGTH,
    weights: Mapping[str, float] | None = None,
) -> int:
    """Run the sequence of a seed and number; return the number of operations.

    Without `weights` the theme follows from the number, and plans are followed, too. Raises:
    SequenceError.
    """
    has_plans = weights is None
    weights = THEMES[number % len(THEMES)] if weights is None else weights
    run = Run(site, f"s{next(_numbers)}")
    if "restart" in weights and not site.can_restart:
        weights = {name: weight for name, weight in weights.items() if name != "restart"}
    generator = random.Random(f"{seed}:{number}")
    chooser = Chooser(generator, run.model, weights, has_plans=has_plans)
    for path in ("d", "e"):
        run.perform({"do": "mkdir", "who": "A0", "path": path})
    for _ in range(length):
        run.perform(chooser.draw())
    run.finish()
    return len(run.done)


def run_again(site: TwoMounts, operations: Sequence[Operation]) -> None:
    """Run a known sequence, without its operations that make no sense. Raises: SequenceError."""
    run = Run(site, f"s{next(_numbers)}")
    for operation in operations:
        if run.model.permits(operation):
            run.perform(operation)
    run.finish()


def shrink(folder: Path, url: str, failure: SequenceError, until_s: float) -> SequenceError | None:
    """Return a shorter sequence that fails, or None if the failure does not happen again.

    Mounts of its own, below `folder`, serve all attempts.
    """
    with open_site(folder, url) as site:
        best = _failure(site, failure.operations)
        if best is None:
            return None
        step = max(1, len(best.operations) // 2)
        while step:
            at = 0
            while at < len(best.operations):
                if time.monotonic() > until_s:
                    return best
                shorter = [*best.operations[:at], *best.operations[at + step :]]
                found = _failure(site, shorter)
                if found is not None and len(found.operations) < len(best.operations):
                    best = found
                else:
                    at += step
            step //= 2
        return best


def _failure(site: TwoMounts, operations: Sequence[Operation]) -> SequenceError | None:
    try:
        run_again(site, operations)
    except SequenceError as failure:
        site.reset()
        return failure
    return None
