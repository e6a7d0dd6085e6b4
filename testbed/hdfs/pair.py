"""`PairedHdfs`: a `MiniHdfs` with two NameNodes, one active and one standby."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from testbed.hdfs.cluster import MiniHdfs, unassigned_ports

NAME = "pair"
_PROVIDER = "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"


def pair_configuration(
    rpc_addresses: Sequence[str], http_addresses: Sequence[str] = ()
) -> dict[str, str]:
    """Return the configuration of clients of two NameNodes.

    With `http_addresses` it is also the configuration of the NameNodes themselves.
    """
    kinds = {"rpc": rpc_addresses, "http": http_addresses}
    return {
        "dfs.nameservices": NAME,
        f"dfs.ha.namenodes.{NAME}": "0,1",
        f"dfs.client.failover.proxy.provider.{NAME}": _PROVIDER,
    } | {
        f"dfs.namenode.{kind}-address.{NAME}.{index}": address
        for kind, addresses in kinds.items()
        for index, address in enumerate(addresses)
    }


def write_configuration(folder: Path, values: Mapping[str, str]) -> None:
    """Write `values` as Hadoop's configuration into a new folder for HADOOP_CONF_DIR."""
    folder.mkdir()
    entries = "".join(
        f"<property><name>{key}</name><value>{value}</value></property>"
        for key, value in values.items()
    )
    for name in ("core-site.xml", "hdfs-site.xml"):
        text = f"<configuration>{entries}</configuration>"
        (folder / name).write_text(text, encoding="utf-8")


class PairedHdfs(MiniHdfs):
    """A running HDFS at `hdfs://pair`, for clients whose HADOOP_CONF_DIR is `conf_folder`."""

    _program = "HaHdfs"

    def __init__(self, home: Path, *, datanode_count: int = 2) -> None:
        ports = iter(unassigned_ports(4))
        addresses = [[f"127.0.0.1:{next(ports)}" for _ in range(2)] for _ in range(2)]
        shared = {"fs.defaultFS": f"hdfs://{NAME}", **pair_configuration(*addresses)}
        super().__init__(home, datanode_count=datanode_count, conf=shared)
        self.conf_folder = self.home / "conf"
        self._shared = shared

    def start(self) -> Self:
        """Start the JVM and write `conf_folder` (see `MiniHdfs.start`)."""
        super().start()
        self.url = f"hdfs://{NAME}"
        write_configuration(self.conf_folder, self._shared)
        return self

    def fail_over(self) -> None:
        """Make the active NameNode standby, and the other one active."""
        self.command("fail-over")

    def kill_active(self) -> None:
        """Kill the active NameNode: it refuses connections, and the other one stays standby."""
        self.command("kill")

    def take_over(self) -> None:
        """Make the standby NameNode active."""
        self.command("take-over")

    def start_killed(self) -> None:
        """Start the killed NameNode again, as standby."""
        self.command("start")
