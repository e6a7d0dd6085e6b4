"""Executes a plan: deletes, looking twice before and once after.

Alone deletes what others published. Between the plan and the deletion a node may have published
a record that needs what the plan is rid of, so records go first; then everything is listed and
marked again, and content goes only if both times nothing needed it. An object that changed since it
was listed stays. What nevertheless was needed a moment later is found by a third look.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from msgspec import Struct

from bootseer.blob.keys import blob_key, index_key
from bootseer.errors import BootseerError, BusyError, NoSpaceError
from bootseer.gc.inventory import Inventory, look_at_each, take_inventory
from bootseer.gc.plan import CONTENT, Plan, make_plan, stages
from bootseer.gc.retention import Rules
from bootseer.store import FileInfo, Store
from bootseer.store.objects.lease import LeaseRenewal

_log = logging.getLogger(__name__)

_LEASE_KEY = "leases/gc"
_LEASE_S = 60.0
_AT_ONCE = 100
"""Objects that are looked at, then deleted: few, so that hardly any changes in between."""


class Collected(Struct, frozen=True):
    """What was done."""

    deleted_count: int
    freed_bytes: int
    spared: tuple[str, ...]
    """Keys of the plan that turned out to be needed or changed."""
    broken: tuple[str, ...]
    """Keys of images' records that were published meanwhile and lack something now."""


def collect(
    store: Store,
    inventory: Inventory,
    plan: Plan,
    rules: Rules,
    *,
    owner: str,
    on_deleted: Callable[[int], None] = lambda size_bytes: None,
) -> Collected:
    """Delete what `plan`, made of `inventory` by `rules`, says.

    Raises: BusyError or NoSpaceError where another node collects; UnavailableError,
    PermissionDeniedError: what was deleted until then is gone, and nothing that remains misses it.
    """
    with _alone(store, owner):
        deleter = _Deleter(store, inventory, on_deleted)
        records = [key for key in plan.deletions if not key.startswith(CONTENT)]
        deleter.delete(records)
        if content := [key for key in plan.deletions if key.startswith(CONTENT)]:
            # Whatever records are left now stay.
            left = Rules(grace_s=rules.grace_s)
            again = make_plan(take_inventory(store), left)
            unneeded = set(again.deletions)
            deleter.spared += [key for key in content if key not in unneeded]
            deleter.delete(key for key in content if key in unneeded)
        broken = _mend(store, deleter.deleted)
        _end_leases(store, inventory, rules, owner)
        store.sweep(max(rules.grace_s, 24 * 3600))
    return Collected(
        len(deleter.deleted), deleter.freed_bytes, tuple(deleter.spared), tuple(broken)
    )


def _alone(store: Store, owner: str) -> AbstractContextManager[object]:
    """The only one who collects. Raises: BusyError, NoSpaceError."""
    try:
        lease = store.lease(_LEASE_KEY, ttl_s=_LEASE_S, owner=owner)
    except NoSpaceError as error:
        # A full store must not be full for ever. Without a lease no node collects, and as long as
        # it is full none can begin to; two at once would cost time only, since each looks twice.
        if store.exists(_LEASE_KEY):
            raise NoSpaceError(
                f"{error}; the lease of another collection is there: where none runs any more, "
                f"delete {_LEASE_KEY} in {store.url}"
            ) from error
        _log.warning("warning: collecting without a lease, for which the store has no room")
        return nullcontext()
    if lease is None:
        raise BusyError(f"another process collects in {store.url}; try again later")
    return LeaseRenewal(lease, _LEASE_S)


class _Deleter:
    def __init__(
        self, store: Store, inventory: Inventory, on_deleted: Callable[[int], None]
    ) -> None:
        self._store = store
        self._objects = inventory.objects
        self._on_deleted = on_deleted
        self.deleted: set[str] = set()
        self.freed_bytes = 0
        self.spared: list[str] = []

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, in the order of a plan, that are as they were listed."""
        for stage in stages(keys):
            for start in range(0, len(stage), _AT_ONCE):
                self._delete_at_once(stage[start : start + _AT_ONCE])

    def _delete_at_once(self, keys: Sequence[str]) -> None:
        found = look_at_each(self._store, keys, self._info)
        same: list[str] = []
        for key, info in found.items():
            known = self._objects[key]
            if info.size_bytes == known.size_bytes and info.modified_ns in (0, known.modified_ns):
                same.append(key)
            else:
                self.spared.append(key)
        self._store.delete_many(same)
        for key in same:
            size_bytes = found[key].size_bytes
            self.deleted.add(key)
            self.freed_bytes += size_bytes
            self._on_deleted(size_bytes)

    @staticmethod
    def _info(store: Store, key: str) -> FileInfo:
        return store.info(key)


def _mend(store: Store, deleted: set[str]) -> list[str]:
    """After a look at what names what is gone now: a snapshot goes too, and is made anew by the
    next set-up; the keys of images are returned."""
    if not any(key.startswith(CONTENT) for key in deleted):
        return []
    inventory = take_inventory(store)
    for key, manifest in inventory.snapshots.items():
        if any(
            index_key(target.index.digest) in deleted
            or any(blob_key(blob.digest) in deleted for blob in target.blobs)
            for target in manifest.targets
        ):
            _log.warning("the snapshot %s was published while its blob was deleted", key)
            store.delete(key)
    return [
        key
        for key, image in inventory.images.items()
        if index_key(image.index_digest) in deleted
        or any(blob_key(layer.blob_digest) in deleted for layer in image.layers)
    ]


def _end_leases(store: Store, inventory: Inventory, rules: Rules, owner: str) -> None:
    """Takes leases that expired long ago, as any node may, and gives them up."""
    if inventory.is_clock_wrong:
        return  # whether they expired is told by this node's clock
    limit_ns = inventory.now_ns - int(max(rules.grace_s, 24 * 3600) * 1e9)
    for key, one in inventory.objects.items():
        if key.startswith("leases/") and key != _LEASE_KEY and one.modified_ns < limit_ns:
            with suppress(BootseerError):
                lease = store.lease(key, ttl_s=_LEASE_S, owner=owner)
                if lease is not None:
                    lease.release()
