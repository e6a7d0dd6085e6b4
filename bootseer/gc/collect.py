"""Executes a plan: deletes, looking twice before and once after.

Alone deletes what others published. Between the plan and the deletion a node may have published
a record that needs what the plan is rid of, so records go first; then everything is listed and
marked again, and content goes only if both times nothing needed it. An object that changed since it
was listed stays. What nevertheless was needed a moment later is found by a third look.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from msgspec import Struct

from bootseer.errors import BootseerError, BusyError, NoSpaceError
from bootseer.gc.inventory import Inventory, Object, look_at_each, take_inventory
from bootseer.gc.plan import Plan, make_plan, stages
from bootseer.gc.retention import Rules
from bootseer.store import FileInfo, Store
from bootseer.store.objects.lease import LeaseRenewal

_log = logging.getLogger(__name__)

_LEASE_KEY = "leases/gc"
_LEASE_S = 60.0
_LOOKED_AT_ONCE = 100
"""Records that are looked at, then deleted: few, so that hardly any changes in between."""
_AT_ONCE = 1000
"""What one request of a bucket deletes."""


class Collected(Struct, frozen=True):
    """The result of a collection."""

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
        content = [key for key in plan.deletions if inventory.is_content(key)]
        deleter.delete([key for key in plan.deletions if not inventory.is_content(key)])
        if content:
            # Whatever records are left now stay.
            left = Rules(grace_s=rules.grace_s)
            again = take_inventory(store, inventory.formats)
            unneeded = set(make_plan(again, left).deletions)
            deleter.spared += [key for key in content if key not in unneeded]
            # Content is never written otherwise: what was listed just now is looked at enough.
            deleter.delete([key for key in content if key in unneeded], again)
        broken = _mend(store, inventory, deleter.deleted)
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
        self._inventory = inventory
        self._on_deleted = on_deleted
        self.deleted: set[str] = set()
        self.freed_bytes = 0
        self.spared: list[str] = []

    def delete(self, keys: Sequence[str], again: Inventory | None = None) -> None:
        """Delete objects, in the order of a plan, that are as they were listed, as far as `again`
        tells, or else a look at each."""
        at_once = _AT_ONCE if again else _LOOKED_AT_ONCE
        for stage in stages(self._inventory, keys):
            for start in range(0, len(stage), at_once):
                some = stage[start : start + at_once]
                if again:
                    self._delete_same({key: again.objects[key] for key in some}, again.now_ns)
                else:
                    self._delete_same(look_at_each(self._store, some, Store.info), 0)

    def _delete_same(self, found: Mapping[str, FileInfo | Object], ageless_ns: int) -> None:
        """Delete the objects that did not change since they were listed. `ageless_ns`: the time of
        objects whose time the storage does not tell."""
        same: list[str] = []
        for key, one in found.items():
            known = self._inventory.objects[key]
            is_as_old = one.modified_ns in (ageless_ns, known.modified_ns)
            is_same = one.size_bytes == known.size_bytes and is_as_old
            (same if is_same else self.spared).append(key)
        self._store.delete_many(same)
        for key in same:
            size_bytes = found[key].size_bytes
            self.deleted.add(key)
            self.freed_bytes += size_bytes
            self._on_deleted(size_bytes)


def _mend(store: Store, inventory: Inventory, deleted: set[str]) -> list[str]:
    """Look for records that need an object which is gone now. Delete those that a start makes again
    (snapshots); return the keys of the others (images)."""
    gone = {key for key in deleted if inventory.is_content(key)}
    if not gone:
        return []
    broken = []
    left = take_inventory(store, inventory.formats)
    for key, entry in left.entries():
        if gone.isdisjoint(left.objects[key].links.needs):
            continue
        if entry.is_remade:
            _log.warning("the %s %s was published while it lost its content", entry.kind, key)
            store.delete(key)
        else:
            broken.append(key)
    return broken


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
