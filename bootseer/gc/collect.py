"""Execution of a plan: deletion of objects, with checks before and after.

A node may publish a record that needs an object of the plan while the collection runs. So records
are deleted first; then the store is listed and marked again, and content is deleted only if nothing
needed it both times. An object that changed since it was listed stays. A last listing finds records
that were published too late for these checks.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from msgspec import Struct

from bootseer.errors import BootseerError, BusyError, NoSpaceError
from bootseer.gc.inventory import Inventory, StoredObject, read_each, take_inventory
from bootseer.gc.plan import CollectionPlan, Rules, make_plan, stages
from bootseer.store import FileInfo, Store
from bootseer.store.objects.lease import LeaseRenewal

_log = logging.getLogger(__name__)

_LEASE_KEY = "leases/gc"
_LEASE_S = 60.0
_CHECKED_COUNT = 100
"""Most records that are checked and then deleted together: few, so that hardly any record changes
between its check and its deletion."""
_DELETED_COUNT = 1000
"""Objects that one request to a bucket deletes."""


class Collected(Struct, frozen=True):
    """Result of a collection."""

    deleted_count: int
    freed_bytes: int
    spared: tuple[str, ...]
    """Keys of the plan that turned out to be needed or changed."""
    broken: tuple[str, ...]
    """Keys of image records that were published during the collection and now lack an object."""


def collect(
    store: Store,
    inventory: Inventory,
    plan: CollectionPlan,
    rules: Rules,
    *,
    owner: str,
    on_deleted: Callable[[int], None] = lambda size_bytes: None,
) -> Collected:
    """Delete the objects of `plan`, which was made of `inventory` by `rules`.

    Raises: BusyError or NoSpaceError if another node collects; UnavailableError or
    PermissionDeniedError if the store fails: some objects are deleted then, but no object that
    remains needs them.
    """
    with _collection_lease(store, owner):
        deleter = _Deleter(store, inventory, on_deleted)
        content = [key for key in plan.deletions if inventory.is_content(key)]
        deleter.delete([key for key in plan.deletions if not inventory.is_content(key)])
        if content:
            # Without the user's rules, all remaining records stay.
            no_rules = Rules(grace_s=rules.grace_s)
            again = take_inventory(store, inventory.formats)
            unneeded = set(make_plan(again, no_rules).deletions)
            deleter.spared += [key for key in content if key not in unneeded]
            # Content never changes, so the new listing is check enough.
            deleter.delete([key for key in content if key in unneeded], again)
        broken = _handle_broken_records(store, inventory, deleter.deleted)
        _end_leases(store, inventory, rules, owner)
        store.sweep(max(rules.grace_s, 24 * 3600))
    return Collected(
        len(deleter.deleted), deleter.freed_bytes, tuple(deleter.spared), tuple(broken)
    )


def _collection_lease(store: Store, owner: str) -> AbstractContextManager[object]:
    """Hold the lease of the only collection in this store. Raises: BusyError, NoSpaceError."""
    try:
        lease = store.lease(_LEASE_KEY, ttl_s=_LEASE_S, owner=owner)
    except NoSpaceError as error:
        # A full store must be collected even if it has no room for a lease. Two collections at once
        # cost time only, since each checks everything twice.
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
        self._inventory = inventory
        self._on_deleted = on_deleted
        self.deleted: set[str] = set()
        self.freed_bytes = 0
        self.spared: list[str] = []

    def delete(self, keys: Sequence[str], again: Inventory | None = None) -> None:
        """Delete unchanged objects in the order of a plan.

        The present state of each object is taken from the inventory `again`, if given; otherwise
        the store is asked.
        """
        count = _DELETED_COUNT if again else _CHECKED_COUNT
        for stage in stages(self._inventory, keys):
            for start in range(0, len(stage), count):
                batch = stage[start : start + count]
                if again:
                    now = {key: again.objects[key] for key in batch}
                    self._delete_unchanged(now, again.now_ns)
                else:
                    self._delete_unchanged(read_each(self._store, batch, Store.info), 0)

    def _delete_unchanged(
        self, now: Mapping[str, FileInfo | StoredObject], unknown_ns: int
    ) -> None:
        """Delete the objects that did not change since they were listed.

        `unknown_ns`: `modified_ns` in `now` of an object for which the storage tells no time.
        """
        unchanged: list[str] = []
        for key, one in now.items():
            listed = self._inventory.objects[key]
            is_as_old = one.modified_ns in (unknown_ns, listed.modified_ns)
            is_unchanged = one.size_bytes == listed.size_bytes and is_as_old
            (unchanged if is_unchanged else self.spared).append(key)
        self._store.delete_many(unchanged)
        for key in unchanged:
            size_bytes = now[key].size_bytes
            self.deleted.add(key)
            self.freed_bytes += size_bytes
            self._on_deleted(size_bytes)


def _handle_broken_records(store: Store, inventory: Inventory, deleted: set[str]) -> list[str]:
    """Delete the records that need a deleted object and that a start makes again (snapshots).

    Return the keys of the other records that need a deleted object (images).
    """
    gone = {key for key in deleted if inventory.is_content(key)}
    if not gone:
        return []
    broken = []
    remaining = take_inventory(store, inventory.formats)
    for key, entry in remaining.entries():
        if gone.isdisjoint(remaining.objects[key].links.needs):
            continue
        if entry.is_remade:
            _log.warning("the %s %s was published while it lost its content", entry.kind, key)
            store.delete(key)
        else:
            broken.append(key)
    return broken


def _end_leases(store: Store, inventory: Inventory, rules: Rules, owner: str) -> None:
    """Take leases that expired long ago, as any node may, and release them."""
    if inventory.is_clock_wrong:
        return  # This node's clock decides whether a lease has expired.
    limit_ns = inventory.now_ns - int(max(rules.grace_s, 24 * 3600) * 1e9)
    for key, one in inventory.objects.items():
        if key.startswith("leases/") and key != _LEASE_KEY and one.modified_ns < limit_ns:
            with suppress(BootseerError):
                lease = store.lease(key, ttl_s=_LEASE_S, owner=owner)
                if lease is not None:
                    lease.release()
