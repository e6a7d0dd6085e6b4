"""Servers and a store on a real HDFS behind a loopback of limited rate.

Their content lies in memory, so that dropping the page cache makes nodes cold and not the servers.
Everything ends with its block. Main thread only.
"""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.machine.tmpfs import tmpfs
from bench.model import Workspace
from testbed.needs import MissingError
from testbed.network import ShapedLoopback, own_network
from testbed.processes import killed_with_parent
from testbed.waiting import is_listening, wait_started


@dataclass(slots=True)
class FarSide:
    """Folder in memory for servers, the loopback to them, and the URL of a store on HDFS."""

    memory: Path
    line: ShapedLoopback
    store_url: str
    prepared: set[str] = field(default_factory=set)
    """Names of the preparations that were made."""

    def once(self, name: str, prepare: Callable[[], None]) -> None:
        """Call `prepare` unless it was called under this name before."""
        if name not in self.prepared:
            prepare()
            self.prepared.add(name)


@contextlib.contextmanager
def far_side(workspace: Workspace, memory_bytes: int) -> Iterator[FarSide]:
    """Put the calling thread into a network namespace with a store. Raises: MissingError.

    The namespace has no way out: everything from outside must be fetched before.
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
    """Run a server process that accepts connections to 127.0.0.1:`port`. Raises: MissingError."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            killed_with_parent(list(command)), stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        wait_started(
            process,
            lambda: is_listening(port),
            lambda: f"{what}: {log.read_text(errors='replace')[-300:]}",
            error=MissingError,
        )
        yield
    finally:
        process.kill()
        process.wait()


def assemble_hdfs() -> None:
    """Fetch HDFS's jars, as long as there is a network. Raises: MissingError."""
    from testbed.hdfs.classpath import classpath

    try:
        classpath()
    except MissingError as error:
        raise MissingError(f"no HDFS to keep the store on: {error}") from error


@contextlib.contextmanager
def hdfs_store(folder: Path) -> Iterator[str]:
    """Yield the URL of a store on a real HDFS of one DataNode, Bootseer's most common store."""
    from testbed.hdfs.cluster import MiniHdfs

    conf = {"dfs.replication": "1"}
    with MiniHdfs(folder / "hdfs", datanode_count=1, conf=conf, is_measured=True) as cluster:
        yield f"{cluster.url}/bootseer"
