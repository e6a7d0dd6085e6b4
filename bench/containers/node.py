"""A node that has never seen the image: process and mount namespaces of its own, and a folder.

Owns what runs there. Ending the node kills all of it with the first process of its namespace,
which takes the mounts with it; so does the end of the benchmark, also when that is killed, so no
daemon outlives it. Needs root.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from testbed.needs import MissingError
from testbed.processes import ending_with_us, process_tree, tree_cpu_s

_START_DEADLINE_S = 60.0
# Process 1 of the node: gives it folders for the state of programs, then waits for whatever
# becomes its child, so that its CPU time is counted.
_INIT = """
import os, subprocess, sys, time
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
for number, target in enumerate(["/var/lib", "/etc/hosts"], 1):
    subprocess.run(["mount", "--bind", sys.argv[number], target], check=True)
print("ready", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""
CGROUP = "bootseer-bench"
HOST = "registry.bench"
"""Another name of 127.0.0.1 on every node, for programs that treat that one in a way of its own."""


class EmptyNode:
    """Starts when entered; `folder` is its disk, empty at first and removed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._commands_cpu_s = 0.0
        self._init_pid = 0

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)
        state = self.folder / "var-lib"
        state.mkdir(parents=True)
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {HOST}\n")
        new = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        init = [sys.executable, "-S", "-c", _INIT, str(state), str(hosts)]
        with (self.folder / "init.log").open("wb") as log:
            self._root = subprocess.Popen(
                ending_with_us([*new, *init]),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        assert self._root.stdout is not None
        if self._root.stdout.readline() != b"ready\n":
            words = (self.folder / "init.log").read_text(errors="replace").strip()
            self.__exit__(None, None, None)
            raise MissingError(f"no namespaces for a node of its own: {words[-300:]}")
        self._init_pid = process_tree(self._root.pid)[1]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._init_pid:
            # Its end is that of all in the namespace; only then does its parent see it.
            os.kill(self._init_pid, signal.SIGKILL)
        else:
            self._root.kill()
        self._root.wait()
        if self._root.stdout is not None:
            self._root.stdout.close()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        _remove(self.folder)
        remove_cgroups()

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """What the command prints. Raises: RuntimeError when it fails or takes too long."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(
                self._entering(command), env={**os.environ, **(env or {})}, capture_output=True,
                text=True, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{Path(command[0]).name} did not end within {timeout_s:g} s"
            ) from None
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._commands_cpu_s += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done.returncode != 0:
            words = (done.stderr.strip() or done.stdout.strip())[-1000:]
            raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {words}")
        return done.stdout

    def start(
        self,
        command: Sequence[str],
        is_ready: Callable[[], bool],
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run a daemon until the node ends; returns when it is ready.

        Raises: RuntimeError with its last words when it is not.
        """
        log = self.folder / f"{Path(command[0]).name}.log"
        with log.open("ab") as sink:
            daemon = subprocess.Popen(
                self._entering(command), env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
            )  # fmt: skip
        self._daemons.append(daemon)
        deadline_s = time.monotonic() + _START_DEADLINE_S
        while not is_ready():
            if daemon.poll() is not None or time.monotonic() > deadline_s:
                words = log.read_text(errors="replace").strip()[-1000:]
                raise RuntimeError(f"{command[0]} did not start: {words}")
            time.sleep(0.05)

    def succeeds(self, command: Sequence[str]) -> bool:
        """Whether a short command does."""
        with contextlib.suppress(RuntimeError):
            self.run(command, timeout_s=10.0)
            return True
        return False

    def pids(self) -> list[int]:
        """What lives here now, and those outside who hold it."""
        roots = [self._root.pid, *(daemon.pid for daemon in self._daemons)]
        return [pid for root in roots for pid in process_tree(root)]

    def cpu_s(self) -> float:
        """CPU seconds of all that ran or runs here."""
        living = [self._root.pid, *(daemon.pid for daemon in self._daemons)]
        return self._commands_cpu_s + sum(tree_cpu_s(pid) for pid in living)

    def _entering(self, command: Sequence[str]) -> list[str]:
        target = ["--target", str(self._init_pid), "--mount", "--pid"]
        return ["nsenter", *target, f"--wd={self.folder}", "--", *command]


def _remove(folder: Path) -> None:
    """Mounts of a namespace that has just ended may take a moment to go."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def remove_cgroups() -> None:
    """The empty groups of containers that were killed."""
    for top in Path("/sys/fs/cgroup").glob(f"{CGROUP}*"):
        _remove_group(top)
    for top in Path("/sys/fs/cgroup").glob(f"*/{CGROUP}*"):
        _remove_group(top)


def _remove_group(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()
