"""Names exactly what lies in a directory on this node, so that any later change of it shows.

Alone owns that digest: of a scan, or of what a restore has recorded while it made the tree, which
is the same without looking at each name again. The kernel sets ctime at every change and nobody can
set it back, so size, ctime and inode together are proof. Bytecode caches do not count:
interpreters write these whenever they like. Stateless.
"""

import hashlib
import stat
from bisect import bisect_right
from collections.abc import Iterable
from itertools import compress

from bootseer.blob.pack.stat_record import (
    RECORD,
    TIME_NS_MAX,
    Records,
    bounded_time_ns,
    directory_record,
)
from bootseer.blob.tree import Tree
from bootseer.snapshots.targets.scan import STAGING_PREFIX, Entry, Scan, is_cache

_Directory = tuple[bytes, list[bytes], bytes | Records]
"""Path, sorted names in it that count, at least one, and their records one behind the other."""


def fingerprint_of_scan(scanned: Scan) -> str:
    """Equal later on this node only if nothing was written here in between."""
    below: dict[bytes, list[bytes]] = {}
    for path in scanned:
        if path and not is_cache(path):
            below.setdefault(path.rpartition(b"/")[0], []).append(path)

    def directories() -> Iterable[_Directory]:
        for directory in sorted(below):
            paths = sorted(below[directory])
            records = b"".join(_record(scanned[path]) for path in paths)
            yield directory, [path.rpartition(b"/")[2] for path in paths], records

    return _digest(_record(scanned[b""]) if scanned else b"", directories())


def _record(entry: Entry) -> bytes:
    if stat.S_ISDIR(entry.mode):
        return directory_record(entry.mode, entry.uid, entry.gid)
    if entry.mtime_ns > TIME_NS_MAX:
        entry = entry._replace(mtime_ns=bounded_time_ns(entry.mtime_ns))
    return RECORD.pack(*entry)


def names_to_record(tree: Tree) -> bytes:
    """Returns for each name of a tree whether `fingerprint_of_restored` needs its record; empty
    bytes if only a scan can tell."""
    names = tree.columns.names
    if any(name.startswith(STAGING_PREFIX) for name in names):
        return b""
    return bytes(not is_cache(name) for name in names)


def fingerprint_of_restored(tree: Tree, recorded: bytes, records: Records) -> str:
    """Returns the `fingerprint_of_scan` of a directory that holds the tree and nothing else.

    `records`: those of the `recorded` names, made after the last change; without any the answer is
    an empty string.
    """
    if not recorded:
        return ""
    names, parents = tree.columns.names, tree.columns.name_parent
    ranges = []
    first = 0
    while first < len(names):
        end = bisect_right(parents, parents[first], first)
        ranges.append((tree.path(parents[first]), first, end))
        first = end
    size = RECORD.size

    def directories() -> Iterable[_Directory]:
        for path, first, end in sorted(ranges):
            wanted = recorded[first:end]
            if 0 not in wanted:
                yield path, names[first:end], records[size * first : size * end]
            elif any(wanted):
                numbers = compress(range(first, end), wanted)
                found = b"".join(records[size * i : size * (i + 1)] for i in numbers)
                yield path, list(compress(names[first:end], wanted)), found

    return _digest(records[size * len(names) :], directories())


def _digest(root: bytes | Records, directories: Iterable[_Directory]) -> str:
    """No path holds a NUL, no name is empty, and there are as many records as names."""
    digest = hashlib.sha256(root)
    for path, names, records in directories:
        digest.update(b"%b\0%b\0\0" % (path, b"\0".join(names)))
        digest.update(records)
    return "sha256:" + digest.hexdigest()
