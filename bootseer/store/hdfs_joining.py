"""What is asked of a NameNode past hdfs-native: whom to ask, and whether they let us.

Owns the answer to the latter, asked once. Thread-safe.
"""

import getpass
import os
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from bootseer.errors import UnsupportedError
from bootseer.store.backend import Space
from bootseer.store.hdfs_errors import translate
from bootseer.store.hdfs_rpc import NameNode, RpcError

_DEFAULT_PORT = 8020
_SPACE_S = 10.0
_SPACE_DEADLINE_S = 5.0
# To say that a directory has no quota, the NameNode walks through it.
_NO_QUOTA_S = 3600.0
# The NameNode offers a DataNode only if it has room for a block besides those that are being
# written to it, which it counts as if they were full, and those that failed minutes ago: so many.
_ROOM_BLOCKS = 16
_CONFIG_FILES = ("core-site.xml", "hdfs-site.xml")


class HdfsJoiner:
    """Joins files of one cluster, and knows where it writes and what room it has."""

    def __init__(self, cluster: str, deadline_s: float) -> None:
        """`cluster`: `hdfs://HOST:PORT` or `hdfs://NAMESERVICE`."""
        self._cluster = cluster
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._name_node: NameNode | None = None
        self._answers: bool | None = None
        self._space: tuple[Space | None, float] = None, 0.0
        self._no_quota_until_s = 0.0

    def can_join(self) -> bool:
        """Whether a NameNode lets us call it."""
        with self._lock:
            if self._answers is None:
                self._name_node = _find(self._cluster, self._deadline_s)
                self._answers = self._name_node is not None and self._name_node.answers()
            return self._answers

    def join(self, target: str, sources: Sequence[str], what: str) -> None:
        """Absolute paths; `what` is for messages."""
        if not self.can_join() or self._name_node is None:
            raise UnsupportedError(f"cannot {what}: the NameNode takes no calls from us")
        try:
            self._name_node.concat(target, sources)
        except RpcError as error:
            text = str(error)
            if "FileNotFoundException" in text:
                raise translate(FileNotFoundError(text), what) from error
            raise translate(RuntimeError(text), what) from error
        except (ConnectionError, TimeoutError) as error:
            raise translate(error, what) from error

    def writing_servers(self, path: str) -> tuple[str, ...]:
        """Of the absolute `path`, as `PlacesFiles.servers_of`."""
        if not self.can_join() or self._name_node is None:
            return ()
        try:
            return self._name_node.writing_servers(path)
        except (RpcError, OSError, ValueError, IndexError):
            return ()

    def space(self, path: str) -> Space | None:
        """What the directory's quota leaves, or else the cluster has; None where it does not say.

        Both with replication, as HDFS counts. An answer is good for a while.
        """
        with self._lock:
            space, until_s = self._space
        if time.monotonic() < until_s:
            return space
        if not self.can_join() or self._name_node is None:
            return None
        name_node = self._hurried(self._name_node)
        try:
            space = Space(*name_node.capacity())
            if time.monotonic() >= self._no_quota_until_s:
                quota = name_node.quota(path)
                if quota is None:
                    self._no_quota_until_s = time.monotonic() + _NO_QUOTA_S
                else:
                    total_bytes, used_bytes = quota
                    left_bytes = max(0, total_bytes - used_bytes)
                    space = Space(total_bytes, min(left_bytes, space.free_bytes))
        except (RpcError, OSError, ValueError, IndexError):
            # The last answer, or none.
            pass
        with self._lock:
            self._space = space, time.monotonic() + _SPACE_S
        return space

    def is_full(self, datanode_count: int, block_bytes: int | None) -> bool:
        """Whether some DataNode lives and the `datanode_count` that there are, or were a moment
        ago, have hardly any room; False where the NameNode does not say.

        `block_bytes`: of the file that cannot be written; None: as the cluster likes.
        """
        if not self.can_join() or self._name_node is None:
            return False
        name_node = self._hurried(self._name_node)
        try:
            total_bytes, free_bytes = name_node.capacity()
            block_bytes = block_bytes or name_node.default_block_bytes()
        except (RpcError, OSError, ValueError, IndexError):
            return False
        return total_bytes > 0 and free_bytes < datanode_count * _ROOM_BLOCKS * block_bytes

    def _hurried(self, name_node: NameNode) -> NameNode:
        """For questions whose answers are worth no long wait."""
        return replace(name_node, deadline_s=min(self._deadline_s, _SPACE_DEADLINE_S))


def _find(cluster: str, deadline_s: float) -> NameNode | None:
    parts = urlsplit(cluster)
    config = _configuration()
    if config.get("hadoop.security.authentication", "simple") != "simple":
        return None
    user = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
    host = parts.hostname or ""
    names = config.get(f"dfs.ha.namenodes.{host}", "")
    if parts.port is None and names:
        keys = [f"dfs.namenode.rpc-address.{host}.{name.strip()}" for name in names.split(",")]
        found = [_address(config[key]) for key in keys if key in config]
    else:
        found = [(host, parts.port or _DEFAULT_PORT)]
    return NameNode(tuple(found), user, deadline_s) if found else None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    return (host, int(port)) if host and port.isdigit() else (text, _DEFAULT_PORT)


def _configuration() -> dict[str, str]:
    """The site's Hadoop configuration, from where hdfs-native reads it too."""
    folder = os.environ.get("HADOOP_CONF_DIR")
    if folder is None and (home := os.environ.get("HADOOP_HOME")):
        folder = f"{home}/etc/hadoop"
    values: dict[str, str] = {}
    for name in _CONFIG_FILES if folder else ():
        try:
            root = ET.parse(Path(str(folder)) / name).getroot()
        except (OSError, ET.ParseError):
            continue
        for entry in root.iter("property"):
            key, value = entry.findtext("name"), entry.findtext("value")
            if key and value:
                values[key.strip()] = value.strip()
    return values
