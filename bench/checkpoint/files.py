"""The files of a capped HDFS that variants read, and how each kind of them is made.

Owns their names: one folder of the cluster's root per kind, with one file `data` in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from bench.checkpoint.cluster import CappedHdfs
from bench.checkpoint.measure import our_mount, run_client, sample
from bench.model import Sample, Workspace

NAME = "data"


class Way(Enum):
    """Who writes a kind of file."""

    MOUNT = "bootseer mount"
    STREAM = "one stream of hdfs-native"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file."""

    folder: str
    way: Way
    share: float = 1.0
    """Of the case's size."""
    query: str = ""
    """Of the URL that is mounted."""
    flags: tuple[str, ...] = ()
    """For `bootseer mount`, when it writes."""
    policy: str | None = None
    """Of erasure coding."""

    @property
    def path(self) -> str:
        """In the cluster."""
        return f"/{self.folder}/{NAME}"

    def url(self, cluster: CappedHdfs) -> str:
        """The folder, as Bootseer is told."""
        return f"{cluster.url}/{self.folder}{self.query}"

    def size_bytes(self, workspace: Workspace) -> int:
        """Whole MiB."""
        full_bytes: int = workspace.shared["size_bytes"]
        return int(full_bytes * self.share) >> 20 << 20


STRIPED = Kind("striped", Way.MOUNT)
STRIPED_TWICE = Kind("striped-2", Way.MOUNT, query="?replication=2")
PLAIN = Kind("plain", Way.MOUNT, flags=("--layout", "plain"))
ORDINARY = Kind("ordinary", Way.STREAM)
SHORT = Kind("short", Way.STREAM, share=0.25)
"""For clients of one stream, which take four to eight times as long for each byte."""
CODED_XOR = Kind("coded-xor", Way.STREAM, share=0.5, policy="XOR-2-1-1024k")
CODED_3_2 = Kind("coded-3-2", Way.STREAM, share=0.5, policy="RS-3-2-1024k")
CODED_6_3 = Kind("coded-6-3", Way.STREAM, share=0.5, policy="RS-6-3-1024k")


def write(workspace: Workspace, cluster: CappedHdfs, kind: Kind) -> Sample:
    """Write the file of `kind` anew. Raises: RuntimeError, MissingError."""
    size_bytes = kind.size_bytes(workspace)
    cluster.empty_folder(f"/{kind.folder}")
    if kind.policy is not None:
        cluster.set_erasure_coding(f"/{kind.folder}", kind.policy)

    def run(action: str, arguments: Mapping[str, object]) -> Mapping[str, float]:
        return run_client(action, {**arguments, "size_bytes": size_bytes})

    if kind.way is Way.STREAM:
        arguments = {"url": cluster.url, "path": kind.path}
        taken = sample(cluster, lambda: run("native_write", arguments))
    else:
        with our_mount(workspace, kind.url(cluster), *kind.flags) as server:
            path = str(server.mountpoint / NAME)
            taken = sample(cluster, lambda: run("write_file", {"path": path}), server)
    cluster.written[kind.path] = size_bytes
    return taken


def ensure(workspace: Workspace, cluster: CappedHdfs, kind: Kind) -> None:
    """The file is there; written without limits if it was not. Raises: as `write`."""
    if kind.path not in cluster.written:
        with cluster.uncapped():
            write(workspace, cluster, kind)
