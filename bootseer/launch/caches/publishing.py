"""Publishing of a cache's next generation: the last one plus the new files of this node.

One of the nodes that have new files publishes, under a lease; the others then find that their files
are no longer new. A killed publisher leaves nothing visible, and its lease expires. Content of the
last generation is not stored again. One thread.
"""

import logging
import random
import time

from msgspec import Struct

from bootseer.errors import BootseerError, BusyError, CorruptError, NotFoundError
from bootseer.launch.caches.contents import Contents, only, read_contents
from bootseer.launch.caches.finding import Cache
from bootseer.launch.caches.restoring import extract_missing, generation, tree_files
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
"""Outcomes; LEFT: other nodes were publishing until the deadline."""


class PublishResult(Struct, frozen=True):
    """Outcome of publishing one cache."""

    how: str
    """PUBLISHED, NOTHING_NEW, LEFT, or "failed: " and the reason."""
    new_files: int = 0
    stored_bytes: int = 0
    index: str = ""


class PublishingStart(Struct, frozen=True):
    """Start whose caches are published."""

    begun_ns: int
    """Time when the start began. In a folder that others use too, older files are left out."""
    read_until_ns: int = 0
    """End of the time, from `begun_ns` on, in which every read of a file was the job's."""
    is_damaged: bool = False
    """Whether the generation that was newest when the start began was damaged and not restored."""


def publish(
    settings: Settings, store: Store, cache: Cache, start: PublishingStart, *, wait_s: float
) -> PublishResult:
    """Publish new files in the cache's folder; wait for other publishers at most `wait_s`.

    Raises: BusyError if files keep changing; NoSpaceError, UnavailableError, DeadlineError,
    PermissionDeniedError. On an error the last generation stays.
    """
    deadline_s = time.monotonic() + wait_s
    watch = LeaseWatch()
    while True:
        found, replace = _newest(store, cache, start)
        there = _sizes(store, found)
        contents = _candidates(settings, cache, start, there)
        new = _new_paths(contents, there, found, start)
        if not new:
            return PublishResult(NOTHING_NEW, index=found[1].index.digest if found else "")
        key = catalogue.lease_key(cache.key)
        lease = store.lease(key, ttl_s=LEASE_S, owner=settings.node, watch=watch)
        if lease is not None:
            with LeaseRenewal(lease, LEASE_S):
                # Another node may have published before this one got the lease.
                again, replace = _newest(store, cache, start)
                if _created_ns(again) != _created_ns(found):
                    continue
                count = len(new)
                target = _publish(settings, store, cache, start, again, replace=replace)
                stored = target.blob.size_bytes + target.index.size_bytes
                return PublishResult(PUBLISHED, count, stored, target.index.digest)
        if time.monotonic() > deadline_s:
            return PublishResult(LEFT)
        # Random, since many nodes of a job are ready at the same moment.
        time.sleep(_POLL_S * random.uniform(0.5, 1.5))


_Generation = tuple[Manifest, Target]


def _newest(store: Store, cache: Cache, start: PublishingStart) -> tuple[_Generation | None, bool]:
    """Return the newest generation, and whether there is a damaged one in its place."""
    try:
        found = generation(store, cache.key)
    except CorruptError as error:
        _log.warning("%s; it is replaced", error)
        return None, True
    if found and start.is_damaged and _created_ns(found) < start.begun_ns:
        return None, True
    return found, False


def _created_ns(found: _Generation | None) -> int:
    return found[0].created_ns if found else 0


def _candidates(
    settings: Settings, cache: Cache, start: PublishingStart, there: dict[bytes, int]
) -> Contents:
    """Return the files for the next generation: those of the key, within the size limit."""
    contents = read_contents(cache.folder, read_ns=(start.begun_ns, start.read_until_ns))
    if not cache.is_ours:
        contents = only(contents, of_start(contents.files, there, start.begun_ns))
    return only(contents, within(contents.files, settings.keep_limit_bytes))


def _sizes(store: Store, found: _Generation | None) -> dict[bytes, int]:
    if found is None:
        return {}
    try:
        return tree_files(catalogue.load_tree(store, found[1]))
    except (CorruptError, NotFoundError) as error:
        _log.warning("%s; it is made anew", error)
        return {}


def _new_paths(
    contents: Contents, there: dict[bytes, int], found: _Generation | None, start: PublishingStart
) -> set[bytes]:
    # A generation made since this start began is by another of its nodes, and just as good.
    with_changed = _created_ns(found) < start.begun_ns
    units = new_units(contents.files, there, with_changed=with_changed)
    return {path for paths in units.values() for path in paths}


def _publish(
    settings: Settings,
    store: Store,
    cache: Cache,
    start: PublishingStart,
    found: _Generation | None,
    *,
    replace: bool,
) -> Target:
    base = found[1] if found else None
    if base is not None:
        try:
            extract_missing(settings, store, cache.folder, base)
        except (CorruptError, NotFoundError) as error:
            _log.warning("%s; the cache is stored anew, without it", error)
            base, replace = None, True
    there = _sizes(store, found) if base else {}
    for attempt in range(_ATTEMPTS):
        try:
            contents = _candidates(settings, cache, start, there)
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
    settings: Settings, store: Store, cache: Cache, start: PublishingStart, *, wait_s: float
) -> PublishResult:
    """Call `publish`, and turn a failure into one line in the log."""
    try:
        return publish(settings, store, cache, start, wait_s=wait_s)
    except (BootseerError, OSError) as error:
        _log.warning("the cache %s is not published: %s", cache.name, error)
        return PublishResult(f"failed: {error}")
