"""`MiniHdfs`: starts, breaks and stops a real HDFS of one NameNode and several DataNodes.

The HDFS is one JVM (`MiniHdfs.java`) on loopback, up in some 4 s with 250 MiB. The JVM ends with
its parent process, because its standard input then ends.
"""

import contextlib
import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from testbed.hdfs.classpath import classpath
from testbed.waiting import wait_for

# Use only the first of Java's two compilers.
_QUICK = ("-XX:TieredStopAtLevel=1",)
# Hadoop's classes are not verified: a third of the processor time of a start. An archive of loaded
# classes would save a little more, but writing it takes twice as much as a start.
_UNVERIFIED = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
)
_CONFIGURATION = {
    "dfs.namenode.safemode.extension": "0",
    "dfs.permissions.enabled": "false",
    "dfs.heartbeat.interval": "1",
    "dfs.namenode.fs-limits.min-block-size": "65536",
    "dfs.namenode.redundancy.considerLoad": "false",
    "dfs.namenode.edits.noeditlogchannelflush": "true",
    "dfs.namenode.datanode.registration.ip-hostname-check": "false",
    "dfs.replication": "1",
    "dfs.blocksize": "16m",
}
# The command "rename" has its options behind its name.
_AUDITED = re.compile(r"FSNamesystem\.audit: .*\tcmd=(\w+).*?\tsrc=(\S+)\t")
_START_DEADLINE_S = 90
_COMMAND_DEADLINE_S = 60
_STOP_DEADLINE_S = 20


class MiniHdfs:
    """A running HDFS; leaving the `with` block stops it and removes its data.

    `conf` sets Hadoop properties. The servers listen on `address`, in the network that the command
    `launcher` enters before it runs the JVM. With `separate_addresses` DataNode i listens on
    127.0.1.(i+1), for `relay`. With `is_measured` the JVM compiles its code for speed, as that of a
    server that runs for long; without, it takes a third of the processor time in the length of a
    test.
    """

    _program = "MiniHdfs"

    def __init__(
        self,
        home: Path,
        *,
        datanode_count: int = 3,
        conf: Mapping[str, str] | None = None,
        separate_addresses: bool = False,
        heap: str = "512m",
        java_options: Sequence[str] = (),
        is_measured: bool = False,
        address: str = "127.0.0.1",
        launcher: Sequence[str] = (),
    ) -> None:
        self.home = home.absolute()
        self.datanode_count = datanode_count
        self.url = ""
        self.http_address = ""
        self.datanode_ports: list[int] = []
        self._conf = dict(conf or {})
        self._apart = separate_addresses
        self._address = address
        self._launcher = launcher
        self._heap = heap
        self._java_options = [*java_options, *(() if is_measured else _QUICK)]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def pid(self) -> int:
        """Process id of the JVM."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> Self:
        """Start the JVM and wait until HDFS is ready.

        Raises: MissingError; RuntimeError with the end of the log.
        """
        jars = classpath()
        self.home.mkdir(parents=True, exist_ok=True)
        command = [*self._launcher, "java", f"-Xmx{self._heap}", "-XX:+UseSerialGC"]
        command += ["-XX:-UsePerfData", "-Djava.net.preferIPv4Stack=true"]
        command += ["--add-opens=java.base/java.lang=ALL-UNNAMED", *_UNVERIFIED]
        command += [*self._java_options, "-cp", ":".join(map(str, jars))]
        command += [self._program, str(self.home)]
        # Ports are fixed: a server that was stopped must get its port again.
        name_port, http_port, *ports = unassigned_ports(2 + self.datanode_count)
        bind = f"{'apart' if self._apart else self._address}:{','.join(map(str, ports))}"
        command += [str(self.datanode_count), bind]
        conf = {
            **_CONFIGURATION,
            "fs.defaultFS": f"hdfs://{self._address}:{name_port}",
            "dfs.namenode.http-address": f"{self._address}:{http_port}",
            **self._conf,
        }
        command += [f"{key}={value}" for key, value in conf.items()]
        with (self.home / "hdfs.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HADOOP_USER_NAME": "hdfs"},
                start_new_session=True,  # pytest gets the Ctrl-C, and stops the JVM
            )
        threading.Thread(target=self._read_lines, daemon=True).start()
        try:
            words = self._answer("READY", _START_DEADLINE_S).split()
        except BaseException:
            self.stop()
            raise
        self.url = f"hdfs://{self._address}:{words[1]}"
        self.http_address = f"{self._address}:{words[2]}"
        self.datanode_ports = [int(word) for word in words[3:]]
        return self

    def _read_lines(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed by stop()
            for line in self._process.stdout:
                self._lines.put(line.strip())
        self._lines.put("ERROR the JVM ended")

    def _answer(self, word: str, timeout_s: float) -> str:
        while True:
            try:
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                line = f"ERROR no answer in {timeout_s} s"
            if line.startswith(word):
                return line
            if line.startswith("ERROR"):
                log = (self.home / "hdfs.log").read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"HDFS: {line}; its log ends with:\n{log[-2000:]}")

    def command(self, line: str) -> None:
        """Send the Java program a command (see its documentation), and wait for the answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._answer("OK", _COMMAND_DEADLINE_S)

    def audited(self, folder: str) -> list[tuple[str, str]]:
        """Return the requests of clients for paths below `folder` as (command, path).

        The requests are read from the NameNode's audit log, which lacks the adding of blocks to a
        file.
        """
        log = (self.home / "hdfs.log").read_text(encoding="utf-8", errors="replace")
        return [
            (command, path) for command, path in _AUDITED.findall(log) if path.startswith(folder)
        ]

    def kill_datanode(self, index: int) -> None:
        """Kill a DataNode, in the middle of its transfers."""
        self.command(f"kill {index}")

    def start_datanode(self, index: int) -> None:
        """Start a killed DataNode again, with its data and its port."""
        self.command(f"start {index}")

    def wait_for_datanodes(self, count: int) -> None:
        """Wait until the NameNode serves and counts at least `count` DataNodes."""
        self.command(f"wait {count}")

    def stop_namenode(self) -> None:
        """Stop the NameNode: from now on it refuses connections."""
        self.command("stop-namenode")

    def start_namenode(self) -> None:
        """Start the NameNode again, with its port."""
        self.command("start-namenode")

    def pause(self) -> None:
        """Make all servers hang: connections are accepted, and no request is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        # A thread that runs at this moment may still answer a request, so wait for its stop.
        tasks = list(Path(f"/proc/{self.pid}/task").iterdir())
        wait_for(lambda: all(_state(task) in "TX" for task in tasks), "the stop", interval_s=0.001)

    def resume(self) -> None:
        """End `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Stop the JVM and remove the data. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGCONT)
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_DEADLINE_S)
            process.stdout.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def unassigned_ports(count: int) -> list[int]:
    """Return ports that are free on all of loopback and that no outgoing connection is given.

    The kernel gives outgoing connections ports from 32768 on (net.ipv4.ip_local_port_range).
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_768)
        if port not in found:
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                found.append(port)
    return found


def _state(task: Path) -> str:
    """Return the state of a thread as ps(1) shows it; X for a thread that has ended."""
    try:
        return (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "X"
