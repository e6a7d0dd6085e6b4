"""Names exactly what lies in a directory on this node, so that any later change of it shows.

Alone owns that digest: of a scan, or of what a restore has recorded while it made the tree, which
is the same without looking at each name again. The kernel sets ctime at every change and nobody can
set it back, so size, ctime and inode together are proof. Bytecode caches do not count:
interpreters write these whenever they like. Stateless.
"""

import hashlib
import stat
from collections.abc import Iterable, Sequence

from bootseer.blob.stat_record import RECORD
from bootseer.blob.tree import Tree
from bootseer.snapshots.scan import WORK_PREFIX, Scan, is_cache

Records = bytearray | memoryview
"""As `blob.stat_record` has them: of each name of a tree, and behind them of its root."""

# Of a directory only mode, user and group: its times change when a bytecode cache appears in it.
_DIRECTORY_BYTES = 12


def exact_digest(scanned: Scan) -> str:
    """Equal later on this node only if nothing was written here in between."""
    paths = sorted(path for path in scanned if not is_cache(path))
    entries = [scanned[path] for path in paths]
    return _digest(
        paths,
        (
            RECORD.pack(*entry)[: _DIRECTORY_BYTES if stat.S_ISDIR(entry.mode) else None]
            for entry in entries
        ),
    )


def names_to_record(tree: Tree) -> bytes:
    """For each name of a tree whether `made_digest` needs its record; empty if it cannot be told
    without a scan."""
    names = tree.columns.names
    if any(name.startswith(WORK_PREFIX) for name in names):
        return b""
    return bytes(not is_cache(name) for name in names)


def made_digest(tree: Tree, recorded: bytes, records: Records) -> str:
    """`exact_digest` of a directory that holds the tree and nothing else, from the records of
    `recorded` names, made after the last change. Nothing if there are none."""
    if not recorded:
        return ""
    c = tree.columns
    prefixes: dict[int, bytes] = {0: b""}
    paths = [(b"", tree.name_count)]
    for i, (name, parent) in enumerate(zip(c.names, c.name_parent, strict=True)):
        if recorded[i]:
            prefix = prefixes.get(parent)
            if prefix is None:
                prefix = prefixes[parent] = tree.path(parent) + b"/"
            paths.append((prefix + name, i))
    paths.sort()
    size, modes, inodes = RECORD.size, c.mode, c.name_inode
    found = []
    for _, i in paths:
        is_directory = i == tree.name_count or stat.S_ISDIR(modes[inodes[i]])
        found.append(records[size * i : size * i + (_DIRECTORY_BYTES if is_directory else size)])
    return _digest([path for path, _ in paths], found)


def _digest(paths: Sequence[bytes], records: Iterable[bytes | Records]) -> str:
    """Names hold no NUL, and a record says by its mode how long it is."""
    digest = hashlib.sha256(b"%d\0" % len(paths))
    digest.update(b"\0".join(paths))
    digest.update(b"\0")
    digest.update(b"".join(records))
    return "sha256:" + digest.hexdigest()
