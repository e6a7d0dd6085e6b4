"""Fixed-length record of a file's lstat, with every attribute that a change of the file changes.

The record of a directory has only mode, user and group: its other attributes depend on its names.
`snapshots.scan` hashes these records. Stateless.
"""

import os
from struct import Struct

RECORD = Struct("<3I3q2QI")
"""Layout: mode, user, group; size, mtime and ctime in ns; inode, device; link count."""
_DIRECTORY = Struct(f"<3I{RECORD.size - 12}x")

TIME_NS_MAX = 2**63 - 1
"""Latest time of a record, in April 2262; file systems support later times."""

Records = bytearray | memoryview
"""Record of each name of a tree, then of its root."""


def bounded_time_ns(time_ns: int) -> int:
    """Return the nearest time that fits into 64 bits of nanoseconds."""
    return min(max(time_ns, -TIME_NS_MAX), TIME_NS_MAX)


def put_record(status: os.stat_result, records: Records, number: int) -> None:
    """Write the record of the name `number`, which is not a directory, to its place."""
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
    """Write the record of the directory `number` to its place."""
    place = number * RECORD.size
    records[place : place + RECORD.size] = directory_record(
        status.st_mode, status.st_uid, status.st_gid
    )


def directory_record(mode: int, uid: int, gid: int) -> bytes:
    """Return the record of a directory."""
    return _DIRECTORY.pack(mode, uid, gid)
