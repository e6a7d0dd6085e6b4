"""The folder of a snapshotter: the directories of ordinary snapshots, and where trees are mounted.

    lock          held by the snapshotter that works here
    metadata.db   see `metadata`
    snapshots/N/  fs and, of an active snapshot, work
    trees/ID/     a served tree is mounted here
    removed/      directories on their way out

Alone makes and removes what is in there. Edge module; any thread.
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
from bootseer.prefetch.snapshotter.snapshot import Kind, Snapshot, Usage

_log = logging.getLogger(__name__)


class Directories:
    """What lies under one root."""

    def __init__(self, root: Path) -> None:
        """Raises: InvalidInputError, BusyError where another snapshotter works there, and other
        BootseerErrors."""
        # Mount options separate with these.
        if any(mark in str(root) for mark in ":,\\"):
            raise UnavailableError(f"the root {root} must not have ':', ',' or '\\' in its name")
        self.root = root
        self.trees = root / "trees"
        self._snapshots = root / "snapshots"
        self._removed = root / "removed"
        try:
            for path in (root, self.trees, self._snapshots, self._removed):
                make_private_directory(path)
            # containerd, as root, mounts what is here; a process of a container, whatever its user,
            # only ever sees that mount. A folder that was open to all users is closed.
            for path in (root, self.trees, self._snapshots, self._removed):
                path.chmod(0o700)
            self._lock = lock_file(root / "lock", 0)
        except TimeoutError as error:
            raise BusyError(f"another snapshotter works in {root}") from error
        except OSError as error:
            raise from_oserror(error, f"prepare the folder {root}") from error

    @property
    def database(self) -> Path:
        """Returns the path of the database of metadata."""
        return self.root / "metadata.db"

    def close(self) -> None:
        """Let another snapshotter work here."""
        os.close(self._lock)

    def fs(self, number: int) -> Path:
        """What an ordinary snapshot itself holds."""
        return self._snapshots / str(number) / "fs"

    def work(self, number: int) -> Path:
        """Overlayfs's own."""
        return self._snapshots / str(number) / "work"

    def make(self, snapshot: Snapshot, parent: int | None) -> None:
        """Make the snapshot's directory. Its root is what containerd's is: 0755, whatever the
        image says, and the owner's that the ordinary snapshot `parent` has (user namespaces).

        Raises: BootseerError.
        """
        fs = self.fs(snapshot.number)
        try:
            if fs.parent.exists():
                # Of one whose creation failed half-way; its number was given back.
                self._set_aside(fs.parent)
            fs.parent.mkdir(mode=0o700)
            fs.mkdir(mode=0o755)
            fs.chmod(0o755)
            if parent is not None:
                status = self.fs(parent).stat(follow_symlinks=False)
                os.chown(fs, status.st_uid, status.st_gid)
            if snapshot.kind is Kind.ACTIVE:
                self.work(snapshot.number).mkdir(mode=0o711)
        except OSError as error:
            raise from_oserror(error, f"make the directory of a snapshot in {fs.parent}") from error

    def set_aside(self, in_use: frozenset[int]) -> None:
        """Move the directories of all other snapshots out of the way, for `empty`."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._snapshots.iterdir():
                if not path.name.isdecimal() or int(path.name) not in in_use:
                    self._set_aside(path)

    def _set_aside(self, path: Path) -> None:
        try:
            path.rename(self._removed / f"{path.name}-{secrets.token_hex(8)}")
        except OSError as error:
            _log.warning("cannot move the directory %s of no snapshot away: %s", path, error)

    def empty(self) -> None:
        """Remove what was set aside. May take long; never raises."""
        for path in self._removed.iterdir():
            try:
                remove_tree(path)
            except OSError as error:
                _log.warning("cannot remove all of %s: %s", path, error)

    def usage(self, number: int) -> Usage:
        """What the snapshot takes now. Names that vanish meanwhile do not count, nor does what lies
        deeper than a path can say."""
        size_bytes = 0
        inodes: set[int] = set()
        for status in statuses_below(self.fs(number)):
            if status.st_ino not in inodes:
                inodes.add(status.st_ino)
                size_bytes += status.st_blocks * 512
        # The root of the snapshot counts as well.
        return Usage(size_bytes, len(inodes) + 1)
