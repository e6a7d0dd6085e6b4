"""What room an HDFS has: for `df`, and to tell a full cluster from a dead one. Thread-safe."""

import threading
import time

from bootseer.store.backend import Space
from bootseer.store.hdfs.rpc.calls import UNANSWERED
from bootseer.store.hdfs.rpc.name_node import FoundNameNode

_SPACE_S = 10.0
# To say that a directory has no quota, the NameNode walks through it.
_NO_QUOTA_S = 3600.0
# The NameNode offers a DataNode only if it has room for a block besides those that are being
# written to it, which it counts as if they were full, and those that failed minutes ago: so many.
_ROOM_BLOCKS = 16


class HdfsSpace:
    """The space of one cluster."""

    def __init__(self, found: FoundNameNode) -> None:
        self._found = found
        self._lock = threading.Lock()
        self._space: tuple[Space | None, float] = None, 0.0
        self._no_quota_until_s = 0.0

    def space(self, path: str) -> Space | None:
        """What the directory's quota leaves, or else the cluster has; None where it does not say.

        Both with replication, as HDFS counts. An answer is good for a while.
        """
        with self._lock:
            space, until_s = self._space
        if time.monotonic() < until_s:
            return space
        name_node = self._found.hurried()
        if name_node is None:
            return None
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
        except UNANSWERED:
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
        name_node = self._found.hurried()
        if name_node is None:
            return False
        try:
            total_bytes, free_bytes = name_node.capacity()
            block_bytes = block_bytes or name_node.default_block_bytes()
        except UNANSWERED:
            return False
        return total_bytes > 0 and free_bytes < datanode_count * _ROOM_BLOCKS * block_bytes
