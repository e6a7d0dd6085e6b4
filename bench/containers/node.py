"""A node that has never used the image: its own process and mount namespaces, and a folder.

Owns the node's processes. Ending the node kills all of them with the namespace's first process,
which ends the mounts, too. The end of the benchmark, also by a signal, does the same, so no daemon
is left. Needs root.
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
from testbed.processes import killed_with_parent, process_tree, tree_cpu_s
from testbed.waiting import wait_started

# Process 1 of the node: mounts folders for the state of programs, then reaps orphans, so that their
# CPU time is counted.
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
"""Name of 127.0.0.1 on every node, for programs that treat that address in a special way."""


class EmptyNode:
    """Node that starts when entered; its disk is `folder`, which is empty at first."""

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
                killed_with_parent([*new, *init]),
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
            # Its end kills everything in the namespace; only then does its parent see its end.
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
        """Run a command and return its output.

        Raises: RuntimeError if it fails or takes too long.
        """
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
        """Run a daemon until the node ends; return when it is ready.

        Raises: RuntimeError with the end of its log if it does not become ready.
        """
        log = self.folder / f"{Path(command[0]).name}.log"
        with log.open("ab") as sink:
            daemon = subprocess.Popen(
                self._entering(command), env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
            )  # fmt: skip
        self._daemons.append(daemon)
        wait_started(
            daemon,
            is_ready,
            lambda: f"{command[0]}: {log.read_text(errors='replace').strip()[-1000:]}",
            error=RuntimeError,
        )

    def succeeds(self, command: Sequence[str]) -> bool:
        """Return whether a short command succeeds."""
        with contextlib.suppress(RuntimeError):
            self.run(command, timeout_s=10.0)
            return True
        return False

    def pids(self) -> list[int]:
        """Return the ids of the node's processes and of their parents outside."""
        roots = [self._root.pid, *(daemon.pid for daemon in self._daemons)]
        return [pid for root in roots for pid in process_tree(root)]

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes that ran or run on the node."""
        living = [self._root.pid, *(daemon.pid for daemon in self._daemons)]
        return self._commands_cpu_s + sum(tree_cpu_s(pid) for pid in living)

    def _entering(self, command: Sequence[str]) -> list[str]:
        target = ["--target", str(self._init_pid), "--mount", "--pid"]
        return ["nsenter", *target, f"--wd={self.folder}", "--", *command]


def _remove(folder: Path) -> None:
    """Remove a folder; mounts of a namespace that has just ended may take a moment to go."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def remove_cgroups() -> None:
    """Remove the empty groups of containers that were killed."""
    for top in Path("/sys/fs/cgroup").glob(f"{CGROUP}*"):
        _remove_group(top)
    for top in Path("/sys/fs/cgroup").glob(f"*/{CGROUP}*"):
        _remove_group(top)


def _remove_group(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()
