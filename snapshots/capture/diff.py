"""Before + after -> what a set-up did. Pure (no I/O)."""

import stat

from msgspec import Struct

from bootseer.snapshots.targets.scan import Entry, Scan


class Diff(Struct, frozen=True):
    """Relative paths, each list sorted. A path is in at most one of them."""

    created: tuple[bytes, ...]
    changed: tuple[bytes, ...]
    """Other content, or another kind of file."""
    remoded: tuple[bytes, ...]
    """Same content as far as one can see; other mode, owner, times, links or xattrs."""
    deleted: tuple[bytes, ...]

    def packed_paths(self) -> list[bytes]:
        """What a capture must store: everything but deletions, and the directories above it."""
        paths = {*self.created, *self.changed, *self.remoded}
        for path in tuple(paths):
            while path := path.rpartition(b"/")[0]:
                if path in paths:
                    break
                paths.add(path)
        paths.discard(b"")
        return sorted(paths)


def _is_changed(before: Entry, after: Entry) -> bool:
    if stat.S_IFMT(before.mode) != stat.S_IFMT(after.mode):
        return True
    if stat.S_ISDIR(after.mode):
        return False
    return (before.size_bytes, before.mtime_ns, before.inode, before.device) != (
        after.size_bytes,
        after.mtime_ns,
        after.inode,
        after.device,
    )


def _is_remoded(before: Entry, after: Entry) -> bool:
    if stat.S_ISDIR(after.mode):
        # A directory's ctime also moves with its entries, and so does mtime; its size and link
        # count follow from its entries. What is left to store is mode, owner, mtime and xattrs,
        # of which only ctime tells.
        return (before.mode, before.uid, before.gid, before.mtime_ns, before.ctime_ns) != (
            after.mode,
            after.uid,
            after.gid,
            after.mtime_ns,
            after.ctime_ns,
        )
    # ctime also betrays a rewrite that put size and mtime back, a changed xattr and a new link.
    return before != after


def diff(before: Scan, after: Scan) -> Diff:
    """What turned `before` into `after`. Pure.

    A file rewritten in place with its size and mtime restored counts as re-moded: it is stored
    all the same.
    """
    created, changed, remoded = [], [], []
    for path, now in after.items():
        then = before.get(path)
        if then is None:
            created.append(path)
        elif then != now:
            if _is_changed(then, now):
                changed.append(path)
            elif _is_remoded(then, now):
                remoded.append(path)
    deleted = [path for path in before if path not in after]
    return Diff(
        tuple(sorted(created)),
        tuple(sorted(changed)),
        tuple(sorted(remoded)),
        tuple(sorted(deleted)),
    )
