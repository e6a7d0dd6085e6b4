"""`PairedHdfs`: as `MiniHdfs`, with two NameNodes of which one is active."""

from pathlib import Path
from typing import Self

from tests.hdfs.cluster import MiniHdfs, unassigned_ports

_NAME = "pair"
_PROVIDER = "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"


class PairedHdfs(MiniHdfs):
    """A running HDFS at `hdfs://pair`, for clients whose HADOOP_CONF_DIR is `conf_folder`."""

    _program = "HaHdfs"

    def __init__(self, home: Path, *, datanode_count: int = 2) -> None:
        ports = iter(unassigned_ports(4))
        kinds = ("rpc", "http")
        addresses = {
            f"dfs.namenode.{kind}-address.{_NAME}.{index}": f"127.0.0.1:{next(ports)}"
            for kind in kinds
            for index in range(2)
        }
        shared = {
            "fs.defaultFS": f"hdfs://{_NAME}",
            "dfs.nameservices": _NAME,
            f"dfs.ha.namenodes.{_NAME}": "0,1",
            f"dfs.client.failover.proxy.provider.{_NAME}": _PROVIDER,
            **addresses,
        }
        super().__init__(home, datanode_count=datanode_count, conf=shared)
        self.conf_folder = self.home / "conf"
        self._shared = shared

    def start(self) -> Self:
        """As `MiniHdfs.start`."""
        super().start()
        self.url = f"hdfs://{_NAME}"
        self.conf_folder.mkdir()
        entries = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, value in self._shared.items()
        )
        text = f"<configuration>{entries}</configuration>"
        (self.conf_folder / "core-site.xml").write_text(text, encoding="utf-8")
        (self.conf_folder / "hdfs-site.xml").write_text(text, encoding="utf-8")
        return self

    def fail_over(self) -> None:
        """The active NameNode becomes standby, and the other one active."""
        self.command("fail-over")

    def kill_active(self) -> None:
        """From now on connections to the active NameNode are refused, and the other is standby."""
        self.command("kill")

    def take_over(self) -> None:
        """The other NameNode becomes active."""
        self.command("take-over")

    def start_killed(self) -> None:
        """The killed NameNode comes back as standby."""
        self.command("start")
