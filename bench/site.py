"""Far side of a measurement: servers, and a store on a real HDFS, behind a shaped loopback.

Their content lies in memory, so that dropping the page cache makes nodes cold and not them.
Everything ends with its block. Main thread only.
"""

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.machine.tmpfs import tmpfs
from bench.model import Workspace
from testbed.line import Line, own_network
from testbed.needs import MissingError
from testbed.processes import ending_with_us

_START_DEADLINE_S = 60.0


@dataclass(slots=True)
class FarSide:
    """Folder in memory for servers, the line to them, and the URL of a store on HDFS."""

    memory: Path
    line: Line
    store_url: str
    prepared: set[str] = field(default_factory=set)
    """Names of the preparations that were made."""

    def once(self, name: str, prepare: Callable[[], None]) -> None:
        """Call `prepare` if nothing was prepared under this name."""
        if name not in self.prepared:
            prepare()
            self.prepared.add(name)


@contextlib.contextmanager
def far_side(workspace: Workspace, memory_bytes: int) -> Iterator[FarSide]:
    """Put the calling thread into a network of its own, with a store. Raises: MissingError.

    The network leads nowhere: whatever comes from outside must have come before.
    """
    assemble_hdfs()
    with (
        tmpfs(workspace.directory, memory_bytes) as memory,
        own_network() as line,
        hdfs_store(memory) as store_url,
    ):
        yield FarSide(memory, line, store_url)


@contextlib.contextmanager
def listening(command: Sequence[str], log: Path, port: int, what: str) -> Iterator[None]:
    """A server process that accepts connections to 127.0.0.1:`port`. Raises: MissingError."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ending_with_us(list(command)), stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        deadline_s = time.monotonic() + _START_DEADLINE_S
        while not _is_listening(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise MissingError(f"{what} did not start")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def assemble_hdfs() -> None:
    """Have the jars, while the network is still there. Raises: MissingError."""
    from testbed.hdfs.classpath import classpath

    try:
        classpath()
    except MissingError as error:
        raise MissingError(f"no HDFS to keep the store on: {error}") from error


@contextlib.contextmanager
def hdfs_store(folder: Path) -> Iterator[str]:
    """A real HDFS of one DataNode, which is the store that Bootseer is mostly used with."""
    from testbed.hdfs.cluster import MiniHdfs

    conf = {"dfs.replication": "1"}
    with MiniHdfs(folder / "hdfs", datanode_count=1, conf=conf, is_measured=True) as cluster:
        yield f"{cluster.url}/bootseer"
