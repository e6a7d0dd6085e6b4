"""`Node`: the folders, environment and processes of one machine that runs Bootseer.

A test or benchmark creates a node, runs `bootseer` commands on it, kills its processes, and asks
which processes and mounts are left. The environment variable BOOTSEER_TEST_NODE marks every process
that a command starts, so that servers in sessions of their own are found, too.

Not thread-safe: one test uses a node. Commands run in child processes, because a process that waits
for a FUSE reply cannot be killed.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from bootseer.linux import mount_table
from testbed import waiting
from testbed.mounts.sweeping import sweep
from testbed.paths import REPOSITORY

TIMEOUT_S = 60.0
MARK = "BOOTSEER_TEST_NODE"
_TIMES = re.compile(r'imeUnixNano":"(\d+)"')
_IDENTITY = "[0-9a-f]" * 16
"""Pattern of the names of servers' folders; attendants' and publishers' names are longer."""
Completed: TypeAlias = "subprocess.CompletedProcess[str]"


class Node:
    """Machine with a cache, run folder and timelines of its own, and a store shared with others."""

    def __init__(
        self, base: Path, store: str | None = None, *, variables: Mapping[str, str] | None = None
    ) -> None:
        """Make the folder `base`.

        `store` is a URL, "" for no store, or None for a folder in `base`. `variables` are set for
        all commands of the node.
        """
        self.base = base
        self.store = (base / "store").as_uri() if store is None else store
        self.variables = dict(variables or {})
        base.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the node's commands."""
        names = ("PATH", "LANG", "JAVA_HOME")
        return {
            **{name: os.environ[name] for name in names if name in os.environ},
            MARK: str(self.base),
            "HOME": str(self.base),
            "PYTHONPATH": str(REPOSITORY),
            "BOOTSEER_STORE": self.store,
            "BOOTSEER_CACHE_DIR": str(self.base / "cache"),
            "BOOTSEER_RUN_DIR": str(self.base / "run"),
            "BOOTSEER_TIMELINE_DIR": str(self.base / "timeline"),
            "BOOTSEER_DEADLINE": "10",
            "BOOTSEER_MEMORY": "64MiB",
            "BOOTSEER_JOB": "job",
            # Without this, each start is followed by a process that copies its timeline to the
            # store.
            "BOOTSEER_PUBLISH_TIMELINES": "off",
            **self.variables,
        }

    def start(
        self,
        *words: object,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[str]":
        """Start `bootseer WORDS` behind the words of `prefix`; `options` are those of Popen."""
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "bootseer", *map(str, words)],
            env={**self.environment, **(variables or {})},
            text=True,
            **{"cwd": self.base, **pipes, **options},
        )

    def run(
        self, *words: object, stdin: str | None = None, timeout_s: float = TIMEOUT_S, **options: Any
    ) -> Completed:
        """Run `bootseer WORDS` to its end. Raises: AssertionError if it takes too long."""
        if stdin is not None:
            options["stdin"] = subprocess.PIPE
        with self.start(*words, **options) as process:
            try:
                out, err = process.communicate(stdin, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(f"bootseer {words} did not end in {timeout_s} s") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    # ---- what is left -------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Return the command line of every process of this node by process id."""
        mark = os.fsencode(f"\0{MARK}={self.base}\0")
        own = str(os.getpid())
        found = {}
        for name in os.listdir("/proc"):
            if name[0] not in "123456789" or name == own:
                continue
            try:
                if mark in b"\0" + _read(f"/proc/{name}/environ"):
                    words = _read(f"/proc/{name}/cmdline").split(b"\0")
                    found[int(name)] = b" ".join(words).decode(errors="replace")
            except OSError:
                continue
        return found

    def mounts(self) -> list[mount_table.FuseMount]:
        """Return the FUSE mounts below the node's folder."""
        return [one for one in mount_table.fuse_mounts() if one.path.is_relative_to(self.base)]

    def wait_clean(self) -> None:
        """Wait until no process, mount or container folder of any start is left."""
        for _ in waiting.polling(90, 0.05):
            left: list[object] = [*self.mounts()]
            for pattern in (f"run/services/{_IDENTITY}", "cache/containers/*"):
                left += self.base.glob(pattern)
            # The processes last: listing them takes as long as twenty of the other checks.
            left = left or [*self.processes().values()] or [*self.mounts()]
            if not left:
                return
        raise AssertionError((left, self.states(), self._waiting()))

    def states(self) -> list[str]:
        """Return the state files of the node's servers."""
        found = []
        for path in self.base.glob(f"run/services/{_IDENTITY}/state.json"):
            with suppress(OSError):
                found.append(path.read_text())
        return found

    def _waiting(self) -> list[str]:
        """Return the kernel function in which each thread of this node waits."""
        found = []
        for pid, line in self.processes().items():
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with suppress(OSError):
                    name, where = (task / "comm").read_text(), (task / "wchan").read_text()
                    found.append(f"{pid} {line}: {name.strip()} in {where}")
        return found

    def kill_at(self, process: "subprocess.Popen[str]", step: str) -> None:
        """Kill a start as soon as it has reached `step`, one of STEPS, or has ended.

        Folders that the start was making then look a minute old, so that they count as abandoned.
        """
        has_come = STEPS[step]
        waiting.wait_for(
            lambda: has_come(self, process.pid) or process.poll() is not None,
            step,
            interval_s=0.002,
        )
        process.kill()
        process.communicate(timeout=60)
        self._age_unfinished()

    def count_begun(self, stage: str, pid: int | str = "*") -> int:
        """Return the number of starts, or of starts of one process, in which a stage has begun."""
        files = (self.base / "timeline").rglob(f"*-{pid}-*.jsonl")
        return sum(f'"{stage}"' in path.read_text() for path in files)

    def server_states_for(self, pid: int) -> list[dict[str, Any]]:
        """Return the states of the servers whose user is process `pid`."""
        found = [json.loads(text) for text in self.states()]
        return [one for one in found if (one.get("user") or [0])[0] == pid]

    def kill_lingering(self) -> None:
        """Kill the processes that keep mounts after a start.

        Unfinished folders then look a minute old, as after `kill_at`.
        """
        for pid, line in self.processes().items():
            if "bootseer.launch.attendant" in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._age_unfinished()

    def _age_unfinished(self) -> None:
        for folder in self.base.glob(f"run/services/{_IDENTITY}"):
            with suppress(FileNotFoundError):
                if not (folder / "state.json").exists():
                    os.utime(folder, (1, 1))

    def sweep(self) -> None:
        """Kill every process of the node and unmount everything below its folder."""
        for _ in range(3):
            pids = self.processes()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            sweep(self.base)
            if not pids:
                break

    # ---- timeline -----------------------------------------------------------------------------

    def spans(self) -> dict[str, dict[str, Any]]:
        """Return the finished spans of the newest start by name."""
        texts = [path.read_text() for path in (self.base / "timeline").rglob("*.jsonl")]
        # Files' times do not tell which start is the newest: a server of an earlier start notes its
        # end.
        found = {}
        for line in max(texts, key=_began_ns).splitlines():
            for resource in json.loads(line).get("resourceSpans", ()):
                for scope in resource["scopeSpans"]:
                    found.update({span["name"]: span for span in scope["spans"]})
        return found


def _read(path: str) -> bytes:
    """Return a file's content, at a third of the cost of `Path.read_bytes`. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, 2**16), b""))
    finally:
        os.close(fd)


def _is_command(pid: int) -> bool:
    with suppress(OSError):
        return b"bootseer" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


# Steps of a start in their order, each with a function that sees from outside whether it is done.
STEPS: dict[str, Callable[[Node, int], object]] = {
    "nothing yet": lambda node, pid: True,
    "its timeline": lambda node, pid: node.count_begun("start", pid),
    "a server": lambda node, pid: node.server_states_for(pid),
    "a mount": lambda node, pid: (
        {one["directory"] for one in node.server_states_for(pid)}
        & {str(mount.path) for mount in node.mounts()}
    ),
    "an image": lambda node, pid: node.count_begun("image", pid),
    "a container's folder": lambda node, pid: any((node.base / "cache/containers").glob("*")),
    "an environment": lambda node, pid: node.count_begun("environment", pid),
    "the process that lingers": lambda node, pid: any(
        one["purpose"] == "linger" for one in node.server_states_for(pid)
    ),
    "the command": lambda node, pid: _is_command(pid),
}


def _began_ns(timeline: str) -> int:
    """Return the time of the earliest event or stage of a timeline."""
    return min((int(ns) for ns in _TIMES.findall(timeline)), default=0)


@contextmanager
def node_at(
    base: Path, store: str, *, variables: Mapping[str, str] | None = None
) -> Iterator[Node]:
    """Yield a node (see `Node`); at the end its processes and mounts are removed."""
    node = Node(base, store, variables=variables)
    try:
        yield node
    finally:
        node.sweep()


def attribute(span: Mapping[str, Any], name: str) -> Any:
    """Return the value of a span's attribute, or None if the span has no such attribute."""
    for one in span["attributes"]:
        if one["key"] == name:
            return next(iter(one["value"].values()))
    return None


def wait_for_file(path: Path) -> None:
    """Wait until the file exists."""
    waiting.wait_for(path.exists, f"{path}")
