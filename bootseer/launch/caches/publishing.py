"""Makes the next generation of a cache: the last one, and what this node has beyond it.

Of the nodes that have something new one publishes, under a lease; the others then find that nothing
of theirs is new any more. A killed publisher leaves nothing that can be seen, and its lease ends.
Content that the last generation has is not stored again. One thread.
"""

import logging
import random
import time

from msgspec import Struct

from bootseer.errors import BootseerError, BusyError, CorruptError, NotFoundError
from bootseer.launch.caches.contents import Contents, look, only
from bootseer.launch.caches.finding import Cache
from bootseer.launch.caches.restoring import bring_in, generation, tree_files
from bootseer.launch.caches.units import new_units, of_start, within
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.capture import Change, capture, make_manifest
from bootseer.snapshots.manifest import Manifest, Target
from bootseer.store import LeaseWatch, Store
from bootseer.store.objects.lease import LeaseRenewal

_log = logging.getLogger(__name__)

LEASE_S = 30.0
_POLL_S = 0.5
_ATTEMPTS = 5
PUBLISHED, NOTHING_NEW, LEFT = "published", "nothing new", "left"


class Published(Struct, frozen=True):
    """What came of it."""

    how: str
    """PUBLISHED, NOTHING_NEW, or LEFT, since others were publishing all the time."""
    new_files: int = 0
    new_bytes: int = 0
    stored_bytes: int = 0
    index: str = ""


class Since(Struct, frozen=True):
    """When what is looked at began."""

    begun_ns: int
    """This start: in a folder that is not ours, what is older is nobody's business."""
    read_until_ns: int = 0
    """What was read between the beginning and then, was read by the job."""
    is_damaged: bool = False
    """What was the newest generation then could not be restored, since it is damaged."""


def publish(
    settings: Settings, store: Store, cache: Cache, since: Since, *, wait_s: float
) -> Published:
    """Publish what is new in the cache's folder; others are waited for at most `wait_s`.

    Raises: BusyError where something goes on writing; NoSpaceError, UnavailableError,
    DeadlineError, PermissionDeniedError: the last generation stays as it is.
    """
    deadline_s = time.monotonic() + wait_s
    watch = LeaseWatch()
    while True:
        found, replace = _newest(store, cache, since)
        there = _names(store, found)
        contents = _look(settings, cache, since, there)
        new = _new(contents, there, found, since)
        if not new:
            return Published(NOTHING_NEW, index=found[1].index.digest if found else "")
        key = catalogue.lease_key(cache.key)
        lease = store.lease(key, ttl_s=LEASE_S, owner=settings.node, watch=watch)
        if lease is not None:
            with LeaseRenewal(lease, LEASE_S):
                # Somebody may have published between our look and our lease.
                again, replace = _newest(store, cache, since)
                if _created_ns(again) != _created_ns(found):
                    continue
                count = len(new)
                size = sum(contents.files[path].size_bytes for path in new)
                target = _publish(settings, store, cache, since, again, replace=replace)
                stored = target.blob.size_bytes + target.index.size_bytes
                return Published(PUBLISHED, count, size, stored, target.index.digest)
        if time.monotonic() > deadline_s:
            return Published(LEFT)
        # Spread: many nodes of a job are ready at the same moment.
        time.sleep(_POLL_S * random.uniform(0.5, 1.5))


_Generation = tuple[Manifest, Target]


def _newest(store: Store, cache: Cache, since: Since) -> tuple[_Generation | None, bool]:
    """The newest generation, and whether something damaged is in its place."""
    try:
        found = generation(store, cache.key)
    except CorruptError as error:
        _log.warning("%s; it is replaced", error)
        return None, True
    if found and since.is_damaged and _created_ns(found) < since.begun_ns:
        return None, True
    return found, False


def _created_ns(found: _Generation | None) -> int:
    return found[0].created_ns if found else 0


def _look(settings: Settings, cache: Cache, since: Since, there: dict[bytes, int]) -> Contents:
    """What the next generation may hold: what belongs to the key, and has room."""
    contents = look(cache.folder, read_ns=(since.begun_ns, since.read_until_ns))
    if not cache.is_ours:
        contents = only(contents, of_start(contents.files, there, since.begun_ns))
    return only(contents, within(contents.files, settings.keep_limit_bytes))


def _names(store: Store, found: _Generation | None) -> dict[bytes, int]:
    """What the generation has: path and size."""
    if found is None:
        return {}
    try:
        return tree_files(catalogue.load_tree(store, found[1]))
    except (CorruptError, NotFoundError) as error:
        _log.warning("%s; it is made anew", error)
        return {}


def _new(
    contents: Contents, there: dict[bytes, int], found: _Generation | None, since: Since
) -> set[bytes]:
    """The paths of what the generation lacks."""
    # What another node of this start has published is as good as ours.
    with_changed = _created_ns(found) < since.begun_ns
    units = new_units(contents.files, there, with_changed=with_changed)
    return {path for paths in units.values() for path in paths}


def _publish(
    settings: Settings,
    store: Store,
    cache: Cache,
    since: Since,
    found: _Generation | None,
    *,
    replace: bool,
) -> Target:
    base = found[1] if found else None
    if base is not None:
        try:
            bring_in(settings, store, cache.folder, base)
        except (CorruptError, NotFoundError) as error:
            _log.warning("%s; the cache is stored anew, without it", error)
            base, replace = None, True
    there = _names(store, found) if base else {}
    for attempt in range(_ATTEMPTS):
        try:
            contents = _look(settings, cache, since, there)
            change = Change(cache.target, cache.folder, {}, contents.scanned)
            target = capture(store, settings.cache_dir, change, base=base, replace=replace)
            break
        except BusyError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_POLL_S)
    manifest = make_manifest(cache.parts, [target], setup_ns=0, node=settings.node)
    catalogue.publish(store, manifest, replace=True)
    return target


def publish_quietly(
    settings: Settings, store: Store, cache: Cache, since: Since, *, wait_s: float
) -> Published:
    """`publish`, but a failure is one line in the log."""
    try:
        return publish(settings, store, cache, since, wait_s=wait_s)
    except (BootseerError, OSError) as error:
        _log.warning("the cache %s is not published: %s", cache.name, error)
        return Published(f"failed: {error}")
