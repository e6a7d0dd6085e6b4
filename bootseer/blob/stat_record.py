"""What lstat shows of a name, as bytes of one length: all that a change of it would change.

Alone owns their layout, which `snapshots.exact` hashes. Stateless.
"""

import os
from struct import Struct

RECORD = Struct("<3I3q2QI")
"""Mode, user, group; size, time of modification and of change in ns; inode, device; link count."""


def put_record(status: os.stat_result, records: bytearray | memoryview, number: int) -> None:
    """Write the record of a name to its place among those of all names."""
    RECORD.pack_into(
        records,
        number * RECORD.size,
        status.st_mode,
        status.st_uid,
        status.st_gid,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
        status.st_nlink,
    )
