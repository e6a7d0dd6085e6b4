"""What cases let nodes reach over the line: a server of some protocol, and a store on a real HDFS.

Each ends with its block. Main thread only.
"""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from testbed.needs import MissingError
from testbed.processes import ending_with_us

_START_DEADLINE_S = 60.0


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
