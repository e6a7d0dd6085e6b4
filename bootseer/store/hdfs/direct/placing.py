"""Chooses the DataNodes of a new file's first block, which no HDFS client's interface offers.

A block is allocated by the NameNode when the client asks for it (`addBlock`), and a client that
asks twice without having written is given the same block again, so that it may repeat a question
whose answer was lost. So we ask first, in the name of the client that holds the file's lease, and
say which DataNodes to exclude; hdfs-native's own question is then answered with our block. Who the
holder is stands in the NameNode's refusal of another one. Thread-safe.
"""

import re
import threading
from collections.abc import Collection

from bootseer.store.hdfs.direct.direct_writer import Placed
from bootseer.store.hdfs.errors import TOO_FEW_DATANODES
from bootseer.store.hdfs.rpc.calls import UNANSWERED
from bootseer.store.hdfs.rpc.frames import RpcError
from bootseer.store.hdfs.rpc.messages import DatanodeInfo
from bootseer.store.hdfs.rpc.name_node import FoundNameNode

# "Client (=X) is not the lease owner (=Y: /path (inode 7) ..." (FSNamesystem.checkLease).
_OWNER = re.compile(r"is not the lease owner \(=([^\s:()]{1,200}): ")


class HdfsPlacer:
    """Places files of one cluster."""

    def __init__(self, found: FoundNameNode) -> None:
        self._found = found
        self._lock = threading.Lock()
        self._holder = "unknown"
        self._seen: dict[str, DatanodeInfo] = {}
        """What an exclusion must show of DataNodes that were chosen before, by UUID."""
        self._replica_count = 0
        self._awaited: dict[str, Placed | None] = {}

    @property
    def is_one_rack(self) -> bool:
        """As `Backend.is_one_rack`, of the DataNodes that were chosen before."""
        with self._lock:
            return len({server.rack for server in self._seen.values()}) <= 1

    def await_placed(self, path: str) -> None:
        """Note that `path` will be placed from now on, and that `take_placed` will ask for it."""
        with self._lock:
            self._awaited[path] = None

    def take_placed(self, path: str) -> Placed | None:
        """Where the first block of `path` was placed; once."""
        with self._lock:
            return self._awaited.pop(path, None)

    def place(self, path: str, avoid: Collection[str]) -> tuple[str, ...] | None:
        """As `Backend.place`, of an absolute path."""
        name_node = self._found.hurried()
        if name_node is None:
            return ()
        with self._lock:
            holder = self._holder
            excluded = [self._seen[uuid] for uuid in avoid if uuid in self._seen]
        try:
            try:
                added = name_node.add_block(path, holder, excluded)
            except RpcError as error:
                owner = _OWNER.search(str(error))
                if owner is None:
                    raise
                holder = owner[1]
                added = name_node.add_block(path, holder, excluded)
            if excluded and len(added.servers) < self._replica_count:
                # Fewer replicas than the file is to have: rather all of them, anywhere.
                name_node.abandon_block(path, holder, added.located.block)
                return None
        except RpcError as error:
            return None if excluded and TOO_FEW_DATANODES in str(error) else ()
        except UNANSWERED:
            return ()
        with self._lock:
            self._holder = holder
            if path in self._awaited:
                asked = self._found.patient() or name_node
                self._awaited[path] = Placed(asked, path, holder, added)
            self._seen.update(added.servers)
            self._replica_count = max(self._replica_count, len(added.servers))
        return tuple(added.servers)

    def servers_of(self, path: str) -> tuple[str, ...]:
        """As `Backend.servers_of`, of an absolute path."""
        name_node = self._found.hurried()
        if name_node is None:
            return ()
        try:
            return name_node.writing_servers(path)
        except UNANSWERED:
            return ()
