"""Operations of the snapshotter, which the gRPC service calls.

An image of the store is never unpacked: for each of its layers, `prepare` answers that the snapshot
exists. If the store cannot serve the image, `prepare` makes an ordinary snapshot, which containerd
fills. A background thread mounts images and removes unused mounts and directories.

Thread-safe. State that must survive this process lies in the database, in directories and in the
servers of mounts, which outlive this process.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    BusyError,
    InvalidInputError,
    UnavailableError,
    from_oserror,
)
from bootseer.linux.disk_usage import statuses_below
from bootseer.linux.locks import lock_file
from bootseer.linux.private_files import make_private_directory
from bootseer.linux.removal import remove_tree
from bootseer.prefetch.snapshotter.chain_trees import ChainTrees
from bootseer.prefetch.snapshotter.lazy_trees import LazyTrees
from bootseer.prefetch.snapshotter.metadata import SnapshotDatabase
from bootseer.prefetch.snapshotter.pulled import DueChains, PulledImages
from bootseer.prefetch.snapshotter.snapshot import (
    ImageMount,
    Lower,
    Snapshot,
    SnapshotKind,
    SnapshotMount,
    SnapshotUsage,
    TreeKey,
    any_of,
    chain_named,
    chains_in_use,
    container_of,
    lower_of,
    mounts_of,
    wanted_chain,
    workload_of,
)
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

_TIDY_S = 10.0
_END_S = 5.0
_QUIET_S = 0.1
"""If no further layer is prepared for this time, the last one was the image's uppermost."""


class Snapshotter:
    """Snapshotter of one containerd."""

    def __init__(
        self,
        settings: Settings,
        root: Path,
        content: Path,
        *,
        linger_s: float,
        on_mount: Callable[[ImageMount], None] | None = None,
    ) -> None:
        """Lock the folder `root` and open its database.

        Args:
            settings: The settings.
            root: Folder of the snapshots.
            content: Folder of containerd's content store.
            linger_s: Time for which an image stays mounted after its last container, so that a
                restart finds the mount.
            on_mount: Called for each CRI container on a served image, from any thread.

        Raises: BusyError if another snapshotter uses `root`; BootseerError.
        """
        self._settings = settings
        self._linger_s = linger_s
        self._on_mount = on_mount
        self._directories = SnapshotDirectories(root)
        self._database = SnapshotDatabase(self._directories.database)
        self._chains = ChainTrees(settings, self._database)
        self._pulled = PulledImages(settings, content)
        self._lazy_trees = LazyTrees(settings, self._directories.trees)
        self._wake = threading.Event()
        self._closing = False
        # Chains whose images are to be mounted.
        self._due = DueChains()
        self._tidier = threading.Thread(target=self._tidy_until_closed, name="tidy", daemon=True)

    def start(self) -> None:
        """Start the background thread, which first mounts the images of existing snapshots."""
        self._tidier.start()

    def close(self) -> None:
        """Stop. Every mount stays, for containers and for the next snapshotter."""
        self._closing = True
        self._wake.set()
        if self._tidier.is_alive():
            self._tidier.join(_END_S)
        if self._tidier.is_alive():
            _log.info("leaving an image that is being mounted to the next snapshotter")
            return
        self._chains.close()
        self._database.close()
        self._directories.close()

    # ---- operations ---------------------------------------------------------------------------

    def prepare(
        self, key: str, parent: str, labels: Mapping[str, str]
    ) -> tuple[SnapshotMount, ...]:
        """Make an active snapshot. Return its mounts.

        Raises: AlreadyExistsError if `key` exists, or if the chain that `labels` names needs no
        unpacking; NotFoundError, InvalidInputError for the parent; UnavailableError if the
        parent's tree cannot be mounted; NoSpaceError.
        """
        chain_id = wanted_chain(labels)
        if chain_id is not None:
            if self._has_remote(chain_id, parent, labels):
                raise AlreadyExistsError(f"the target snapshot {chain_id} is there")
            self._pulled.layer_begun(chain_named(parent))
        return self._create(SnapshotKind.ACTIVE, key, parent, labels)

    def view(self, key: str, parent: str, labels: Mapping[str, str]) -> tuple[SnapshotMount, ...]:
        """Make a view snapshot. Return its mounts. Raises: as `prepare`."""
        return self._create(SnapshotKind.VIEW, key, parent, labels)

    def mounts(self, key: str) -> tuple[SnapshotMount, ...]:
        """Return the mounts of an active or view snapshot; mount its image again if necessary.

        Raises: NotFoundError; BusyError if the snapshot is committed; UnavailableError.
        """
        snapshot, *ancestors = self._database.with_ancestors(key)
        if snapshot.kind is SnapshotKind.COMMITTED:
            raise BusyError(f"the snapshot {key[:200]} is committed: it cannot be mounted")
        with self._lower_directories(lower_of(ancestors), snapshot.labels) as directories:
            return self._mounts(snapshot, directories)

    def commit(self, name: str, key: str, parent: str, labels: Mapping[str, str]) -> None:
        """Turn an active snapshot into a committed one.

        Raises: NotFoundError, AlreadyExistsError; BusyError if the snapshot is not active;
        InvalidInputError if its parent is not `parent`.
        """
        snapshot = self._database.get(key)
        if parent not in ("", snapshot.parent):
            raise InvalidInputError(f"the parent of the snapshot {key[:200]} cannot be changed")
        self._database.commit(name, key, labels, self._directories.usage(snapshot.number))
        # By name: not every client labels the snapshot with its chain before it unpacks.
        if chain_id := chain_named(name):
            self._pulled.layer_unpacked(chain_id, chain_named(snapshot.parent))
            self._wake.set()

    def remove(self, key: str) -> None:
        """Remove a snapshot; its directory and mount are removed later.

        Raises: NotFoundError; BusyError if the snapshot is a parent.
        """
        self._database.remove(key)
        self._wake.set()

    def stat(self, key: str) -> Snapshot:
        """Return a snapshot. Raises: NotFoundError."""
        return self._database.get(key)

    def update(self, key: str, labels: Mapping[str, str], paths: Sequence[str]) -> Snapshot:
        """Change labels of a snapshot. Raises: NotFoundError, InvalidInputError."""
        return self._database.update(key, labels, paths)

    def list(self, filters: Sequence[str]) -> list[Snapshot]:
        """Return the snapshots that at least one filter accepts. Raises: InvalidInputError."""
        accept = any_of(filters)
        # Remote snapshots first: containerd takes the first one that is labelled with the wanted
        # chain, and any client may put that label on a snapshot of its own.
        found = sorted(self._database.all(), key=lambda snapshot: not snapshot.chain_id)
        return [snapshot for snapshot in found if accept(snapshot)]

    def usage(self, key: str) -> SnapshotUsage:
        """Return the disk usage of a snapshot without its parents. Raises: NotFoundError."""
        snapshot = self._database.get(key)
        if snapshot.kind is SnapshotKind.ACTIVE:
            return self._directories.usage(snapshot.number)
        return snapshot.usage

    def cleanup(self) -> None:
        """Remove the directories of removed snapshots in the background."""
        self._wake.set()

    # ---- inside -------------------------------------------------------------------------------

    def _has_remote(self, chain_id: str, parent: str, labels: Mapping[str, str]) -> bool:
        if self._database.find_remote(chain_id, parent) is not None:
            return True
        if not self._chains.can_serve(chain_id):
            return False
        self._database.create_remote(chain_id, parent, labels)
        self._due.discard(parent)
        self._due.add(chain_id, _QUIET_S)
        self._wake.set()
        return True

    def _create(
        self, kind: SnapshotKind, key: str, parent: str, labels: Mapping[str, str]
    ) -> tuple[SnapshotMount, ...]:
        ancestors = self._database.with_ancestors(parent) if parent else []
        lower = lower_of(ancestors)
        above = lower.numbers[0] if lower.numbers else None
        begin_ns, began_ns = time.time_ns(), time.monotonic_ns()
        with self._lower_directories(lower, labels) as directories:
            waited_ns = time.monotonic_ns() - began_ns
            snapshot = self._database.create(
                kind, key, parent, labels, lambda made: self._directories.make(made, above)
            )
            container = container_of(key)
            if self._on_mount and container and lower.chain_id:
                fresh_ns = self._lazy_trees.pop_mount_time(directories[-1])
                self._on_mount(
                    ImageMount(
                        container,
                        directories[-1],
                        *(fresh_ns or (begin_ns, waited_ns)),
                        is_live=fresh_ns is None,
                    )
                )
            return self._mounts(snapshot, directories)

    @contextlib.contextmanager
    def _lower_directories(
        self, lower: Lower, labels: Mapping[str, str]
    ) -> Iterator[Sequence[Path]]:
        """Yield the directories below a snapshot, the uppermost first; they stay until the end."""
        directories = [self._directories.fs(number) for number in lower.numbers]
        if not lower.chain_id:
            yield directories
            return
        key = self._tree_key(lower.chain_id, workload_of(labels, self._settings.workload))
        with self._lazy_trees.using(key, lower.chain_id) as path:
            yield [*directories, path]

    def _tree_key(self, chain_id: str, workload: str) -> TreeKey:
        try:
            return TreeKey(self._chains.index_digest(chain_id), workload)
        except BootseerError as error:
            raise UnavailableError(
                f"the image with the chain {chain_id} cannot be served now: {error}"
            ) from error

    def _mounts(self, snapshot: Snapshot, lower: Sequence[Path]) -> tuple[SnapshotMount, ...]:
        fs = self._directories.fs(snapshot.number)
        return mounts_of(snapshot, lower, fs, self._directories.work(snapshot.number))

    # ---- tidying up ---------------------------------------------------------------------------

    def _tidy_until_closed(self) -> None:
        for work in (self._mount_images_in_use, self._remove_directories, self._retire_trees):
            self._log_failure(work)
        while not self._closing:
            due_s = min(self._due.next_s(), self._pulled.next_s())
            self._wake.wait(min(max(due_s - time.monotonic(), 0.0), _TIDY_S))
            self._wake.clear()
            if not self._closing:
                self._log_failure(self._mount_due_images)
                self._log_failure(self._pulled.index_next)
                self._log_failure(self._remove_directories)
                self._log_failure(self._retire_trees)

    @staticmethod
    def _log_failure(work: Callable[[], None]) -> None:
        try:
            work()
        except (BootseerError, OSError) as error:
            _log.warning("tidying up is put off: %s", error)
        except Exception:
            # Without this thread nothing would be removed any more.
            _log.exception("tidying up failed")

    def _mount_due_images(self) -> None:
        """Mount images that were just pulled, so that prefetching begins before the container."""
        for chain_id in self._due.take():
            # A failure must not keep the other images from being mounted.
            try:
                # Brings the index to this node.
                key = self._tree_key(chain_id, self._settings.workload)
                if not self._linger_s:
                    # The mount would be removed at once.
                    continue
                with self._lazy_trees.using(key, chain_id):
                    _log.info("mounted %s, which has been pulled", chain_id)
            except (BootseerError, OSError) as error:
                _log.warning(
                    "%s, which has been pulled, is mounted when a container needs it: %s",
                    chain_id,
                    error,
                )

    def _mount_images_in_use(self) -> None:
        """Mount the images of existing snapshots whose servers have ended."""
        for chain_id, workload in self._chains_in_use():
            try:
                with self._lazy_trees.using(self._tree_key(chain_id, workload), chain_id):
                    _log.debug("%s is mounted", chain_id)
            except (BootseerError, OSError) as error:
                _log.warning("containers of %s cannot be started now: %s", chain_id, error)

    def _remove_directories(self) -> None:
        with self._database.numbers() as numbers:
            self._directories.set_aside_unused(numbers)
        self._directories.remove_set_aside()

    def _retire_trees(self) -> None:
        self._lazy_trees.retire(self._trees_in_use, self._linger_s)

    def _chains_in_use(self) -> frozenset[tuple[str, str]]:
        return chains_in_use(self._database.all(), self._settings.workload)

    def _trees_in_use(self) -> frozenset[TreeKey]:
        trees = ((self._database.tree_of(chain), load) for chain, load in self._chains_in_use())
        return frozenset(TreeKey(digest, load) for digest, load in trees if digest)


# ---- the folder of a snapshotter -----------------------------------------------------------------

#    lock          locked by the snapshotter that uses the folder
#    metadata.db   see `metadata`
#    snapshots/N/  fs, and for an active snapshot work
#    trees/ID/     mount point of a served tree
#    removed/      directories that are being removed


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
