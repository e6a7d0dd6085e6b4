"""A real start on several nodes with up to three faults, each on its own node.

One node begins late, one has a slow disk, one a slow line. The program only waits for the limited
resources.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bootseer.report.explain import StartModel
from bootseer.report.read import read_graph
from bootseer.report.sources import TimelineFolder, find_start
from testbed.paths import REPOSITORY
from testbed.starts.nodes import NamespaceNode, Nodes
from testbed.waiting import pause

LATE, DISK, LINE = "late", "slow disk", "slow line"
FAULTS = {LATE: ("node-1", "late scheduling"), DISK: ("node-2", "slow disk"),
          LINE: ("node-3", "slow network")}  # fmt: skip
"""For each fault, the node that has it and the report's name of the cause."""
_DEADLINE_S = 240.0

_PROGRAM = """
import os, socket, sys
import bootseer

server, path, download = (sys.argv[1], 7000), sys.argv[2], int(sys.argv[3])

def ask(line):
    connection = socket.create_connection(server)
    connection.sendall(line.encode() + b"\\n")
    return connection

def meet(name):
    with bootseer.stage("meet", {"bootseer.barrier": name}), ask("meet " + name) as connection:
        assert connection.recv(1)

meet("begin")
with bootseer.stage("load data"):
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    while os.read(file, 1 << 18):
        pass
meet("data")
with bootseer.stage("download model") as stage, ask(f"get {download}") as connection:
    got = 0
    while got < download:
        data = connection.recv(1 << 18)
        assert data
        got += len(data)
    stage.set("bootseer.bytes", got)
meet("model")
bootseer.ready()
"""


@dataclass(frozen=True)
class Scale:
    """Sizes and rates of healthy nodes, and rates of slow ones."""

    read_bytes: int = 24_000_000
    download_bytes: int = 18_000_000
    disk_bytes_per_s: int = 6_000_000
    line_mbit_per_s: float = 48.0
    slow_disk_bytes_per_s: int = 2_200_000
    slow_line_mbit_per_s: float = 14.0
    late_s: float = 8.0


class Experiment:
    """Starts on the nodes of a site; their files are in `folder`, on a real disk."""

    def __init__(self, site: Nodes, folder: Path, scale: Scale) -> None:
        self._site = site
        self._folder = folder
        self._scale = scale
        self._count = 0
        self._waiting: dict[str, list[socket.socket]] = {}
        self._lock = threading.Lock()
        for node in site.nodes:
            own = folder / node.name
            own.mkdir()
            with (own / "data").open("wb") as file:
                file.write(os.urandom(scale.read_bytes))
                os.fsync(file.fileno())
        (folder / "program.py").write_text(_PROGRAM)
        with site.inside():
            self._server = socket.create_server((site.address, 7000), backlog=64)
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def start(self, faults: Collection[str]) -> StartModel:
        """Run one start with these faults; return the report's model of it."""
        self._count += 1
        scale, waiting = self._scale, {}
        for node in self._site.nodes:
            is_slow = {name for name in faults if FAULTS[name][0] == node.name}
            disk = scale.slow_disk_bytes_per_s if DISK in is_slow else scale.disk_bytes_per_s
            line = scale.slow_line_mbit_per_s if LINE in is_slow else scale.line_mbit_per_s
            node.limit_disk(self._folder, disk)
            node.limit_line(line)
            waiting[node] = scale.late_s if LATE in is_slow else 0.0
        began = time.monotonic()
        running = []
        try:
            for node in sorted(waiting, key=lambda one: waiting[one]):
                pause(began + waiting[node] - time.monotonic())
                running.append(self._run(node))
            for process in running:
                if process.wait(_DEADLINE_S) != 0:
                    raise RuntimeError(f"a node failed; its output is in {self._folder}")
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        files = find_start(TimelineFolder(self._folder / "timelines"), "j")
        return StartModel(read_graph(files, 0))

    def _run(self, node: NamespaceNode) -> "subprocess.Popen[bytes]":
        own = self._folder / node.name
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(own),
            "BOOTSEER_TIMELINE_DIR": str(self._folder / "timelines"),
            "BOOTSEER_CACHE_DIR": str(own / "cache"),
            "BOOTSEER_RUN_DIR": str(own / "run"),
            "BOOTSEER_PUBLISH_TIMELINES": "off",
            "BOOTSEER_SUBMISSION": str(self._count),
        }
        words = ["-m", "bootseer", "--job", "j", "run", "--", sys.executable, "program.py"]
        words += [self._site.address, str(own / "data"), str(self._scale.download_bytes)]
        return node.run([sys.executable, *words], environ, self._folder, own / "output")

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """Send the requested bytes ("get"), or answer all nodes once the last has come ("meet")."""
        with connection.makefile("rb") as lines:
            what, _, rest = lines.readline().decode().strip().partition(" ")
        try:
            if what == "get":
                connection.sendall(bytes(int(rest)))
                connection.close()
                return
            with self._lock:
                met = self._waiting.setdefault(rest, [])
                met.append(connection)
                if len(met) < len(self._site.nodes):
                    return
                del self._waiting[rest]
            for one in met:
                one.sendall(b"1")
                one.close()
        except OSError:
            return  # the node has ended
