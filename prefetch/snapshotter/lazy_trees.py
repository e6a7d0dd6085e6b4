"""FUSE mounts below the roots of containers: one for each tree and workload, shared by all.

The servers are processes of their own, found by their state folders (`served.service`), so a new
snapshotter finds the mounts of its predecessor. An unmounted tree is still served as long as the
root of a container uses it. No function touches files in a mount, which could hang. Thread-safe.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.errors import BootseerError, UnavailableError
from bootseer.fuse.kernel.unmount import detach
from bootseer.linux import mount_table
from bootseer.prefetch.serve.plan import ServeOptions, begin_serving
from bootseer.prefetch.snapshotter.snapshot import TreeKey
from bootseer.served.ending import sweep
from bootseer.served.service import ServiceState, live_mounts
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

PURPOSE = "containerd"
"""Purpose (`ServiceState.purpose`) of a mount that serves an image for containerd."""

_FRESH_S = 60.0
"""A mount was made for the container that is created within this time after the mount."""
_WAIT_S = 60.0
"""Wait for another thread that mounts the same tree; every mount gives up after less."""


class LazyTrees:
    """FUSE mounts below one folder."""

    def __init__(self, settings: Settings, folder: Path, *, purpose: str = PURPOSE) -> None:
        self._purpose = purpose
        self._settings = settings
        self._folder = mount_table.absolute(folder)
        self._lock = threading.Lock()
        self._key_locks: dict[TreeKey, threading.Lock] = defaultdict(threading.Lock)
        self._holds: dict[TreeKey, int] = defaultdict(int)
        self._mounting: set[Path] = set()
        self._unused_since_s: dict[TreeKey, float] = {}
        # Begin and duration of mounts that no container has used yet.
        self._fresh_ns: dict[Path, tuple[int, int]] = {}

    @contextlib.contextmanager
    def using(
        self, key: TreeKey, name: str, *, is_local: bool = False, settings: Settings | None = None
    ) -> Iterator[Path]:
        """Mount a tree if necessary, yield its mount point, and keep the mount until the end.

        `name`: for messages and `bootseer status`. `is_local`: see `ServeOptions`. `settings`:
        those of the start that mounts the tree; by default those of the node. Raises:
        UnavailableError.
        """
        with self._lock:
            self._holds[key] += 1
            lock = self._key_locks[key]
        try:
            if not lock.acquire(timeout=_WAIT_S):
                raise UnavailableError(f"others have been mounting {name} for {_WAIT_S:g} s")
            try:
                path = self.mounted().get(key)
                if path is None:
                    path = self._mount(key, name, is_local, settings or self._settings)
            finally:
                lock.release()
            yield path
        finally:
            with self._lock:
                self._holds[key] -= 1
                if not self._holds[key]:
                    del self._holds[key]

    def pop_mount_time(self, path: Path) -> tuple[int, int] | None:
        """Return begin (since 1970) and duration of the mount at `path` in nanoseconds.

        Only the first call soon after the mount gets them; all others get None.
        """
        with self._lock:
            self._forget_old()
            return self._fresh_ns.pop(path, None)

    def _forget_old(self) -> None:
        oldest_ns = time.time_ns() - int(_FRESH_S * 1e9)
        self._fresh_ns = {
            path: found for path, found in self._fresh_ns.items() if sum(found) > oldest_ns
        }

    def retire(self, in_use: Callable[[], frozenset[TreeKey]], linger_s: float) -> None:
        """Unmount trees that were unused for `linger_s`, and remove leftovers of dead servers.

        `in_use` returns the trees in use; it may be called several times. Never raises.
        """
        sweep(self._settings.run_dir)
        now_s = time.monotonic()
        mounted = self.mounted()
        unused = mounted.keys() - in_use()
        self._unused_since_s = {key: self._unused_since_s.get(key, now_s) for key in unused}
        for key in unused:
            if now_s - self._unused_since_s[key] >= linger_s:
                self._unmount(key, mounted[key], in_use)
        self._remove_empty()

    def _unmount(self, key: TreeKey, path: Path, in_use: Callable[[], frozenset[TreeKey]]) -> None:
        with self._lock:
            lock = self._key_locks[key]
        with lock:
            with self._lock:
                if self._holds.get(key):
                    return
            # Asked again: a new snapshot may use the tree, and its `using` may have ended.
            if key in in_use():
                return
            try:
                detach(path, lazy=True)
                _log.info("unmounted the tree %s from %s", key.index_digest, path)
            except BootseerError as error:
                _log.warning("cannot unmount %s, which no snapshot uses: %s", path, error)

    def mounted(self) -> dict[TreeKey, Path]:
        """Return the mount point of each tree that is mounted and served now."""
        there = {mount.path for mount in mount_table.find_mounts("bootseer-image")}
        found: dict[TreeKey, Path] = {}
        for _, state in live_mounts(self._settings.run_dir):
            path = Path(state.directory)
            if self._is_ours(state) and path in there and _serves(state):
                found[TreeKey(state.index_digest, state.workload, state.owner)] = path
        return found

    def _is_ours(self, state: ServiceState) -> bool:
        return state.purpose == self._purpose and Path(state.directory).parent == self._folder

    def _mount(self, key: TreeKey, name: str, is_local: bool, settings: Settings) -> Path:
        path = self._folder / secrets.token_hex(8)
        begin_ns, began_ns = time.time_ns(), time.monotonic_ns()
        with self._lock:
            self._mounting.add(path)
        try:
            path.mkdir(mode=0o755)
            begin_serving(
                settings,
                name,
                key.index_digest,
                path,
                ServeOptions(
                    workload=key.workload,
                    purpose=self._purpose,
                    is_local=is_local,
                    owner=key.owner,
                ),
            ).wait()
        except (BootseerError, OSError) as error:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise UnavailableError(f"the tree of {name} cannot be mounted now: {error}") from error
        finally:
            with self._lock:
                self._mounting.discard(path)
        with self._lock:
            self._forget_old()
            self._fresh_ns[path] = begin_ns, time.monotonic_ns() - began_ns
        return path

    def _remove_empty(self) -> None:
        """Remove the mount points on which nothing is mounted any more."""
        with self._lock:
            unmounted = set(self._folder.iterdir()) - self._mounting
        # The mount table is read last, so that a tree mounted since is in it.
        for path in unmounted - {mount.path for mount in mount_table.fuse_mounts()}:
            with contextlib.suppress(OSError):
                path.rmdir()


def _serves(state: ServiceState) -> bool:
    # The lock of the state folder is no proof: a process that removes the folder of a dead server
    # holds it for a moment. A worker goes on serving after its supervisor was killed.
    return any(process.lives() for process in state.processes)
