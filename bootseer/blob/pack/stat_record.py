"""What lstat shows of a name, as bytes of one length: all that a change of it would change.

Of a directory only mode, user and group: the rest is as its names are. Alone owns the layout, which
`snapshots.scan` hashes. Stateless.
"""

import os
from struct import Struct

RECORD = Struct("<3I3q2QI")
"""Mode, user, group; size, time of modification and of change in ns; inode, device; link count."""
_DIRECTORY = Struct(f"<3I{RECORD.size - 12}x")

TIME_NS_MAX = 2**63 - 1
"""The latest time, in April of 2262; file systems know later ones."""

Records = bytearray | memoryview
"""One record for each name of a tree, and the record of its root at the end."""


def bounded_time_ns(time_ns: int) -> int:
    """The nearest time that 64 bits of nanoseconds hold."""
    return min(max(time_ns, -TIME_NS_MAX), TIME_NS_MAX)


def put_record(status: os.stat_result, records: Records, number: int) -> None:
    """Write the record of a name, not of a directory, to its place among those of all names."""
    RECORD.pack_into(
        records,
        number * RECORD.size,
        status.st_mode,
        status.st_uid,
        status.st_gid,
        status.st_size,
        bounded_time_ns(status.st_mtime_ns),
        bounded_time_ns(status.st_ctime_ns),
        status.st_ino,
        status.st_dev,
        status.st_nlink,
    )


def put_directory(status: os.stat_result, records: Records, number: int) -> None:
    """Write the record of a directory to its place."""
    place = number * RECORD.size
    records[place : place + RECORD.size] = directory_record(
        status.st_mode, status.st_uid, status.st_gid
    )


def directory_record(mode: int, uid: int, gid: int) -> bytes:
    """The record of a directory."""
    return _DIRECTORY.pack(mode, uid, gid)
