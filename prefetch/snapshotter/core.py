"""What containerd asks of a snapshotter. The gRPC service only translates to and from this.

Alone decides when a snapshot becomes remote, and what is tidied up when. An image that the store
knows is never unpacked: `prepare` answers, for each of its layers, that the snapshot exists.
Whatever keeps us from that leads to an ordinary snapshot, which containerd fills.

Thread-safe. Its only state in memory is what may be lost: all else is in `metadata`, in directories
and in the servers of mounts, which outlive this process.
"""

import contextlib
import logging
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
)
from bootseer.prefetch.snapshotter.chain_trees import ChainTrees
from bootseer.prefetch.snapshotter.directories import Directories
from bootseer.prefetch.snapshotter.filters import any_of
from bootseer.prefetch.snapshotter.lazy_trees import LazyTrees
from bootseer.prefetch.snapshotter.metadata import Metadata
from bootseer.prefetch.snapshotter.pulled import PulledImages
from bootseer.prefetch.snapshotter.snapshot import (
    ImageMount,
    Kind,
    Lower,
    Mount,
    Snapshot,
    TreeKey,
    Usage,
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
_CALM_S = 0.1
"""No further layer for so long: that was the image's last one, and the image can be mounted."""


class Snapshotter:
    """The snapshots below `root`."""

    def __init__(
        self,
        settings: Settings,
        root: Path,
        content: Path,
        *,
        linger_s: float,
        on_mount: Callable[[ImageMount], None] | None = None,
    ) -> None:
        """An image's mount outlives its last container by `linger_s`, so that a restart finds it.
        `content`: see `PulledImages`. `on_mount` is called for each container of CRI over a served
        image, from any thread.

        Raises: BusyError where another one works there; BootseerError.
        """
        self._settings = settings
        self._linger_s = linger_s
        self._on_mount = on_mount
        self._directories = Directories(root)
        self._metadata = Metadata(self._directories.database)
        self._chains = ChainTrees(settings, self._metadata)
        self._pulled = PulledImages(settings, content)
        self._lazy_trees = LazyTrees(settings, self._directories.trees)
        self._wake = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        # chain id -> when its image is to be mounted.
        self._due: dict[str, float] = {}
        self._tidier = threading.Thread(target=self._tidy_until_closed, name="tidy", daemon=True)

    def start(self) -> None:
        """Begin to tidy up; first, mount what existing snapshots need."""
        self._tidier.start()

    def close(self) -> None:
        """End, leaving every mount to containers and to the next snapshotter."""
        self._closing = True
        self._wake.set()
        if self._tidier.is_alive():
            self._tidier.join(_END_S)
        if self._tidier.is_alive():
            _log.info("leaving an image that is being mounted to the next snapshotter")
            return
        self._chains.close()
        self._metadata.close()
        self._directories.close()

    # ---- operations ---------------------------------------------------------------------------

    def prepare(self, key: str, parent: str, labels: Mapping[str, str]) -> tuple[Mount, ...]:
        """Make an active snapshot; how it is mounted.

        Raises: AlreadyExistsError where `key` exists, or where the chain that `labels` names is
        there now and needs no unpacking; NotFoundError, InvalidInputError for the parent;
        UnavailableError where the parent's tree cannot be mounted; NoSpaceError.
        """
        chain_id = wanted_chain(labels)
        if chain_id is not None:
            if self._has_remote(chain_id, parent, labels):
                raise AlreadyExistsError(f"the target snapshot {chain_id} is there")
            self._pulled.goes_on(chain_named(parent))
        return self._create(Kind.ACTIVE, key, parent, labels)

    def view(self, key: str, parent: str, labels: Mapping[str, str]) -> tuple[Mount, ...]:
        """Make a view snapshot; how it is mounted. Raises: as `prepare`."""
        return self._create(Kind.VIEW, key, parent, labels)

    def mounts(self, key: str) -> tuple[Mount, ...]:
        """How an active or view snapshot is mounted. Mounts its image again where the server of
        that died. Raises: NotFoundError, BusyError where it is neither, UnavailableError."""
        snapshot, *ancestors = self._metadata.with_ancestors(key)
        if snapshot.kind is Kind.COMMITTED:
            raise BusyError(f"the snapshot {key[:200]} is committed: it cannot be mounted")
        with self._lower_directories(lower_of(ancestors), snapshot.labels) as directories:
            return self._mounts(snapshot, directories)

    def commit(self, name: str, key: str, parent: str, labels: Mapping[str, str]) -> None:
        """Turn an active snapshot into a committed one.

        Raises: NotFoundError, AlreadyExistsError, BusyError where it is not active;
        InvalidInputError where `parent` is another one than it has.
        """
        snapshot = self._metadata.get(key)
        if parent not in ("", snapshot.parent):
            raise InvalidInputError(f"the parent of the snapshot {key[:200]} cannot be changed")
        self._metadata.commit(name, key, labels, self._directories.usage(snapshot.number))
        # By its name: not every client says before it unpacks what that is going to be.
        if chain_id := chain_named(name):
            self._pulled.unpacked(chain_id, chain_named(snapshot.parent))
            self._wake.set()

    def remove(self, key: str) -> None:
        """Forget a snapshot; its directory and mount go later.

        Raises: NotFoundError, BusyError where others lie on it.
        """
        self._metadata.remove(key)
        self._wake.set()

    def stat(self, key: str) -> Snapshot:
        """Raises: NotFoundError."""
        return self._metadata.get(key)

    def update(self, key: str, labels: Mapping[str, str], paths: Sequence[str]) -> Snapshot:
        """Change labels. Raises: NotFoundError, InvalidInputError."""
        return self._metadata.update(key, labels, paths)

    def list(self, filters: Sequence[str]) -> list[Snapshot]:
        """The snapshots that a filter accepts. Raises: InvalidInputError."""
        accept = any_of(filters)
        # Remote ones first: containerd takes the first that is labelled with the chain it wants,
        # and any client may have labelled its own so.
        found = sorted(self._metadata.all(), key=lambda snapshot: not snapshot.chain_id)
        return [snapshot for snapshot in found if accept(snapshot)]

    def usage(self, key: str) -> Usage:
        """What a snapshot itself takes. Raises: NotFoundError."""
        snapshot = self._metadata.get(key)
        if snapshot.kind is Kind.ACTIVE:
            return self._directories.usage(snapshot.number)
        return snapshot.usage

    def cleanup(self) -> None:
        """Remove, in the background, what removed snapshots left."""
        self._wake.set()

    # ---- inside -------------------------------------------------------------------------------

    def _has_remote(self, chain_id: str, parent: str, labels: Mapping[str, str]) -> bool:
        if self._metadata.find_remote(chain_id, parent) is not None:
            return True
        if not self._chains.can_serve(chain_id):
            return False
        self._metadata.create_remote(chain_id, parent, labels)
        with self._lock:
            self._due.pop(parent, None)
            self._due[chain_id] = time.monotonic() + _CALM_S
        self._wake.set()
        return True

    def _create(
        self, kind: Kind, key: str, parent: str, labels: Mapping[str, str]
    ) -> tuple[Mount, ...]:
        ancestors = self._metadata.with_ancestors(parent) if parent else []
        lower = lower_of(ancestors)
        above = lower.numbers[0] if lower.numbers else None
        begin_ns, began_ns = time.time_ns(), time.monotonic_ns()
        with self._lower_directories(lower, labels) as directories:
            waited_ns = time.monotonic_ns() - began_ns
            snapshot = self._metadata.create(
                kind, key, parent, labels, lambda made: self._directories.make(made, above)
            )
            container = container_of(key)
            if self._on_mount and container and lower.chain_id:
                fresh_ns = self._lazy_trees.first_use(directories[-1])
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
        """The directories to mount over, the uppermost first; kept while the block runs."""
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

    def _mounts(self, snapshot: Snapshot, lower: Sequence[Path]) -> tuple[Mount, ...]:
        fs = self._directories.fs(snapshot.number)
        return mounts_of(snapshot, lower, fs, self._directories.work(snapshot.number))

    # ---- tidying up ---------------------------------------------------------------------------

    def _tidy_until_closed(self) -> None:
        for work in (self._restore, self._empty, self._retire):
            self._guard(work)
        while not self._closing:
            self._wake.wait(self._pause_s())
            self._wake.clear()
            if not self._closing:
                self._guard(self._mount_pulled)
                self._guard(self._pulled.index_next)
                self._guard(self._empty)
                self._guard(self._retire)

    @staticmethod
    def _guard(work: Callable[[], None]) -> None:
        try:
            work()
        except (BootseerError, OSError) as error:
            _log.warning("tidying up is put off: %s", error)
        except Exception:
            # Without this thread nothing would be removed any more.
            _log.exception("tidying up failed")

    def _pause_s(self) -> float:
        with self._lock:
            due_s = min(self._due.values(), default=float("inf"))
        due_s = min(due_s, self._pulled.due_s())
        return min(max(due_s - time.monotonic(), 0.0), _TIDY_S)

    def _mount_pulled(self) -> None:
        """Mount images that have just been pulled, so that what their starts touch is on its way
        before there is a container, or before one is started on a standby node."""
        now_s = time.monotonic()
        with self._lock:
            due = [chain_id for chain_id, due_s in self._due.items() if due_s <= now_s]
            for chain_id in due:
                del self._due[chain_id]
        for chain_id in due:
            # Each by itself: the others are due all the same.
            try:
                # Brings the index to this node.
                key = self._tree_key(chain_id, self._settings.workload)
                if not self._linger_s:
                    # It would be taken off at once.
                    continue
                with self._lazy_trees.using(key, chain_id):
                    _log.info("mounted %s, which has been pulled", chain_id)
            except (BootseerError, OSError) as error:
                _log.warning(
                    "%s, which has been pulled, is mounted when a container needs it: %s",
                    chain_id,
                    error,
                )

    def _restore(self) -> None:
        """Mount what snapshots show and no server serves any more."""
        for chain_id, workload in self._chains_in_use():
            try:
                with self._lazy_trees.using(self._tree_key(chain_id, workload), chain_id):
                    _log.debug("%s is mounted", chain_id)
            except (BootseerError, OSError) as error:
                _log.warning("containers of %s cannot be started now: %s", chain_id, error)

    def _empty(self) -> None:
        self._metadata.numbers(self._directories.set_aside)
        self._directories.empty()

    def _retire(self) -> None:
        self._lazy_trees.retire(self._trees_in_use, self._linger_s)

    def _chains_in_use(self) -> frozenset[tuple[str, str]]:
        return chains_in_use(self._metadata.all(), self._settings.workload)

    def _trees_in_use(self) -> frozenset[TreeKey]:
        trees = ((self._metadata.tree_of(chain), load) for chain, load in self._chains_in_use())
        return frozenset(TreeKey(digest, load) for digest, load in trees if digest)
