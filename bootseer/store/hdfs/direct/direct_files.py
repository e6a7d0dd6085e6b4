"""Which new files are written directly to DataNodes. Any thread."""

import logging

from bootseer.errors import BootseerError
from bootseer.store.hdfs.connection import HdfsConnection
from bootseer.store.hdfs.direct.checksums import ChecksumKind
from bootseer.store.hdfs.direct.direct_writer import DirectFile
from bootseer.store.hdfs.rpc.calls import UNANSWERED

_log = logging.getLogger(__name__)

# A DataNode that hangs is left in time for the caller to try another one.
_SILENCE_SHARE = 0.5


def begin_direct(connection: HdfsConnection, path: str, kind: ChecksumKind) -> DirectFile | None:
    """The file at `path`, of which nothing was written; None if it was not placed, or if its
    DataNode does not take it so. hdfs-native, which is then given the same block, knows more ways.
    """
    full = connection.full(path)
    placed = connection.placer.take_placed(full)
    if placed is None:
        return None
    try:
        block_bytes = placed.name_node.plain_block_bytes(full)
        if block_bytes:
            silence_max_s = connection.deadline_s * _SILENCE_SHARE
            return DirectFile(placed, block_bytes, silence_max_s, kind)
    except (*UNANSWERED, BootseerError) as error:
        _log.debug("%s is not written directly to DataNodes: %s", path, error)
    return None
