"""The folder of a snapshotter: directories of ordinary snapshots, and mount points of trees.

    lock          locked by the snapshotter that uses the folder
    metadata.db   see `metadata`
    snapshots/N/  fs, and for an active snapshot work
    trees/ID/     mount point of a served tree
    removed/      directories that are being removed

Any thread.
"""

import contextlib
import logging
import os
import secrets
from pathlib import Path

from bootseer.errors import BusyError, UnavailableError, from_oserror
from bootseer.linux.disk_usage import statuses_below
from bootseer.linux.locks import lock_file
from bootseer.linux.private_files import make_private_directory
from bootseer.linux.removal import remove_tree
from bootseer.prefetch.snapshotter.snapshot import Snapshot, SnapshotKind, SnapshotUsage

_log = logging.getLogger(__name__)


class SnapshotDirectories:
    """Folder of one snapshotter, locked until `close`."""

    def __init__(self, root: Path) -> None:
        """Make the folder and lock it.

        Raises: UnavailableError for a name that cannot be used; BusyError if another snapshotter
        uses the folder; BootseerError.
        """
        # The options of an overlay mount use these characters as separators.
        if any(mark in str(root) for mark in ":,\\"):
            raise UnavailableError(f"the root {root} must not have ':', ',' or '\\' in its name")
        self.root = root
        self.trees = root / "trees"
        self._snapshots = root / "snapshots"
        self._removed = root / "removed"
        try:
            for path in (root, self.trees, self._snapshots, self._removed):
                make_private_directory(path)
            # containerd, as root, mounts directories of this folder; processes of containers see
            # the mounts only. So the folder can be closed to other users, if it was not yet.
            for path in (root, self.trees, self._snapshots, self._removed):
                path.chmod(0o700)
            self._lock = lock_file(root / "lock", 0)
        except TimeoutError as error:
            raise BusyError(f"another snapshotter works in {root}") from error
        except OSError as error:
            raise from_oserror(error, f"prepare the folder {root}") from error

    @property
    def database(self) -> Path:
        """Return the path of the database."""
        return self.root / "metadata.db"

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def fs(self, number: int) -> Path:
        """Return the directory with an ordinary snapshot's own files."""
        return self._snapshots / str(number) / "fs"

    def work(self, number: int) -> Path:
        """Return the work directory of an active snapshot's overlay."""
        return self._snapshots / str(number) / "work"

    def make(self, snapshot: Snapshot, parent: int | None) -> None:
        """Make the snapshot's directory.

        As with containerd, its mode is 0755 whatever the image says, and its owner is that of the
        ordinary snapshot `parent` (user namespaces). Raises: BootseerError.
        """
        fs = self.fs(snapshot.number)
        try:
            if fs.parent.exists():
                # Left by a failed creation, whose number was given back.
                self._set_aside(fs.parent)
            fs.parent.mkdir(mode=0o700)
            fs.mkdir(mode=0o755)
            fs.chmod(0o755)
            if parent is not None:
                status = self.fs(parent).stat(follow_symlinks=False)
                os.chown(fs, status.st_uid, status.st_gid)
            if snapshot.kind is SnapshotKind.ACTIVE:
                self.work(snapshot.number).mkdir(mode=0o711)
        except OSError as error:
            raise from_oserror(error, f"make the directory of a snapshot in {fs.parent}") from error

    def set_aside_unused(self, in_use: frozenset[int]) -> None:
        """Move the directories of all snapshots but `in_use` to `removed/`."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._snapshots.iterdir():
                if not path.name.isdecimal() or int(path.name) not in in_use:
                    self._set_aside(path)

    def _set_aside(self, path: Path) -> None:
        try:
            path.rename(self._removed / f"{path.name}-{secrets.token_hex(8)}")
        except OSError as error:
            _log.warning("cannot move the directory %s of no snapshot away: %s", path, error)

    def remove_set_aside(self) -> None:
        """Remove the directories in `removed/`. May take long; never raises."""
        for path in self._removed.iterdir():
            try:
                remove_tree(path)
            except OSError as error:
                _log.warning("cannot remove all of %s: %s", path, error)

    def usage(self, number: int) -> SnapshotUsage:
        """Return the disk usage of a snapshot now, without names too deep for a path."""
        size_bytes = 0
        inodes: set[int] = set()
        for status in statuses_below(self.fs(number)):
            if status.st_ino not in inodes:
                inodes.add(status.st_ino)
                size_bytes += status.st_blocks * 512
        # The root of the snapshot counts as well.
        return SnapshotUsage(size_bytes, len(inodes) + 1)
