"""The files of a rate-limited HDFS that variants read, and the making of each kind.

Owns their names: one folder in the cluster's root for each kind, with one file `data` in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from bench.checkpoint.cluster import CappedHdfs
from bench.checkpoint.measure import our_mount, run_client, sample
from bench.model import Sample, Workspace

NAME = "data"


class Writer(Enum):
    """Program that writes a kind of file."""

    MOUNT = "bootseer mount"
    STREAM = "one stream of hdfs-native"


@dataclass(frozen=True, slots=True)
class FileKind:
    """Kind of file: its layout, and its share of the case's size."""

    folder: str
    way: Writer
    share: float = 1.0
    """Share of the case's size."""
    query: str = ""
    """Query of the mounted URL."""
    flags: tuple[str, ...] = ()
    """Flags of `bootseer mount` when it writes the file."""
    policy: str | None = None
    """Policy of erasure coding, if any."""

    @property
    def path(self) -> str:
        """Path of the file in the cluster."""
        return f"/{self.folder}/{NAME}"

    def url(self, cluster: CappedHdfs) -> str:
        """Return the URL of the folder for Bootseer."""
        return f"{cluster.url}/{self.folder}{self.query}"

    def size_bytes(self, workspace: Workspace) -> int:
        """Return the size of the file, in whole MiB."""
        full_bytes: int = workspace.shared["size_bytes"]
        return int(full_bytes * self.share) >> 20 << 20


STRIPED = FileKind("striped", Writer.MOUNT)
STRIPED_TWICE = FileKind("striped-2", Writer.MOUNT, query="?replication=2")
PLAIN = FileKind("plain", Writer.MOUNT, flags=("--layout", "plain"))
ORDINARY = FileKind("ordinary", Writer.STREAM)
SHORT = FileKind("short", Writer.STREAM, share=0.25)
"""File for clients of one stream, which take four to eight times as long for each byte."""
CODED_XOR = FileKind("coded-xor", Writer.STREAM, share=0.5, policy="XOR-2-1-1024k")
CODED_3_2 = FileKind("coded-3-2", Writer.STREAM, share=0.5, policy="RS-3-2-1024k")
CODED_6_3 = FileKind("coded-6-3", Writer.STREAM, share=0.5, policy="RS-6-3-1024k")


def write(workspace: Workspace, cluster: CappedHdfs, kind: FileKind) -> Sample:
    """Write the file of `kind` anew. Raises: RuntimeError, MissingError."""
    size_bytes = kind.size_bytes(workspace)
    cluster.empty_folder(f"/{kind.folder}")
    if kind.policy is not None:
        cluster.set_erasure_coding(f"/{kind.folder}", kind.policy)

    def run(action: str, arguments: Mapping[str, object]) -> Mapping[str, float]:
        return run_client(action, {**arguments, "size_bytes": size_bytes})

    if kind.way is Writer.STREAM:
        arguments = {"url": cluster.url, "path": kind.path}
        taken = sample(cluster, lambda: run("native_write", arguments))
    else:
        with our_mount(workspace, kind.url(cluster), *kind.flags) as server:
            path = str(server.mountpoint / NAME)
            taken = sample(cluster, lambda: run("write_file", {"path": path}), server)
    cluster.written[kind.path] = size_bytes
    return taken


def ensure(workspace: Workspace, cluster: CappedHdfs, kind: FileKind) -> None:
    """Write the file of `kind` without limits unless it exists.

    Raises: RuntimeError, MissingError.
    """
    if kind.path not in cluster.written:
        with cluster.uncapped():
            write(workspace, cluster, kind)
