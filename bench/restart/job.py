"""Job on a node: starts it, kills parts of it, and measures the time until it works again.

Owns the node's folders and processes. One thread.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.restart.events import read_events
from testbed.paths import REPOSITORY
from testbed.processes import process_tree, tree_cpu_s

WORKERS = 4
_DEADLINE_S = 300.0
_END_S = 30.0
_POLL_S = 0.01
_PARTS = {
    "started": "begin_s",
    "line": "interpreter_s",
    "imported": "import_s",
    "memory": "connect_s",
    "loaded": "load_s",
    "step": "compute_s",
}
"""Parts of a start by the event that ends them: torchrun starts the workers, the first line of each
runs, their modules are imported, gloo has connected them, the checkpoint is loaded, the first step
is taken."""
PARTS = tuple(_PARTS.values())


class RestartedJob:
    """Job on a node; a new node has the same paths."""

    def __init__(
        self, node: Path, wrapper: tuple[str, ...], folder: str, layers: int, **environ: str
    ) -> None:
        """Prepare the job; `wrapper` goes before torchrun, and `folder` has the workers' files."""
        self.node = node
        self._events = node.with_name(f"{node.name}.events")
        self._log = node.with_name(f"{node.name}.log")
        self.wrapper = wrapper
        agent = ("-m", "bench.restart.agent", "--standalone", "--max-restarts=3")
        program = (str(REPOSITORY / "bench/restart/train.py"), folder, str(layers))
        self._command = (sys.executable, *agent, f"--nproc-per-node={WORKERS}", *program)
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("TORCH", "BOOTSEER_"))}
        self.environ: Mapping[str, str] = {
            **kept,
            "HOME": str(node),
            "PYTHONPATH": str(REPOSITORY),
            "EVENTS": str(self._events),
            # torch 2.13: without this, restarted workers find the addresses of their predecessors.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **environ,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._seen = 0

    def clear(self) -> None:
        """Make it a new node: remove all its files."""
        shutil.rmtree(self.node, ignore_errors=True)
        self.node.mkdir(parents=True)

    def start(self) -> dict[str, float]:
        """Start the job; return the times until all workers had taken their first step."""
        return self._measure(self._begin, restart=0)

    def fail(self) -> dict[str, float]:
        """Kill one worker, for which torchrun restarts all; return the times."""
        steps = [one for one in read_events(self._events)[self._began :] if one["event"] == "step"]
        restart = max(one["restart"] for one in steps)
        (victim,) = {one["pid"] for one in steps if (one["rank"], one["restart"]) == (1, restart)}
        return self._measure(lambda: os.kill(victim, signal.SIGKILL), restart=restart + 1)

    def again(self) -> dict[str, float]:
        """Kill the job and start it again on this node; return the times."""

        def begin() -> None:
            self.end()
            self._begin()

        return self._measure(begin, restart=0)

    def prepare(self, standby: tuple[str, ...], status: tuple[str, ...], text: str) -> None:
        """Run `standby` with the job's command, and wait until `status` prints `text` twice.

        Once for torchrun and once for its workers.
        """
        words: dict[str, Any] = {"cwd": self.node, "env": self.environ, "timeout": _DEADLINE_S}
        subprocess.run([*standby, *self._command], check=True, **words)
        deadline_s = time.monotonic() + _DEADLINE_S
        told = {"capture_output": True, "text": True, **words}
        while subprocess.run(status, **told).stdout.count(text) < 2:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"no standby is ready: {self._log.read_text()[-3000:]}")
            time.sleep(0.2)

    def end(self) -> None:
        """Kill all processes of the job, as a scheduler does in the end."""
        if self._process is None:
            return
        for pid in process_tree(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(_END_S)
        self._process = None

    def wait_for_end(self) -> None:
        """Wait for the end of processes beside the job: servers, and the publishing process."""
        deadline_s = time.monotonic() + _DEADLINE_S
        mark = f"\0EVENTS={self._events}\0".encode()
        while left := [pid for pid in _pids() if mark in b"\0" + _environ(pid)]:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"processes of {self.node} go on: {left}")
            time.sleep(0.1)

    # ---- how it is watched ----------------------------------------------------------------------

    _began = 0

    def _begin(self) -> None:
        self._began = len(read_events(self._events))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.wrapper, *self._command],
                cwd=self.node,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _measure(self, begin: Any, restart: int) -> dict[str, float]:
        self._seen = len(read_events(self._events))
        began_s = time.time()
        begin()
        found = self._wait(restart)
        assert self._process is not None
        ranks = range(WORKERS)
        started = {one["rank"]: one["s"] for one in found["started"]}
        lines = {one["rank"]: one["s"] for one in found["line"]}
        if len({one["loss"] for one in found["step"]}) != 1:
            raise RuntimeError(f"the workers disagree: {found['step']}")
        figures = {
            "step_s": max(one["s"] for one in found["step"]) - began_s,
            "line_s": max(lines[rank] - started[rank] for rank in ranks),
            "workers_bytes": float(sum(one["bytes"] for one in found["memory"])),
            "cpu_s": tree_cpu_s(self._process.pid),
        }
        # The parts of `step_s`: each ends when the last of the workers has got that far.
        before_s = began_s
        for event, part in _PARTS.items():
            ended_s = max(one["s"] for one in found[event])
            figures[part] = ended_s - before_s
            before_s = ended_s
        if found["agent"]:
            figures["agent_s"] = found["agent"][0]["s"] - began_s
            figures["first_s"] = min(lines.values()) - began_s
        return figures

    def _wait(self, restart: int) -> dict[str, list[dict[str, Any]]]:
        """Return the events by name once all workers have taken a step."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while True:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("agent", *_PARTS)}
            for one in read_events(self._events)[self._seen :]:
                if one.get("restart", restart) == restart:
                    found[one["event"]].append(one)
            if len(found["step"]) == WORKERS:
                return found
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.end()
                raise RuntimeError(f"no first step: {self._log.read_text()[-3000:]}")
            time.sleep(_POLL_S)


def _pids() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
