"""What people ask of kept caches: which there are, whether they are of use, and why not.

Reads store and node; `import_cache` and `delete` write to the store. Main thread.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.launch.caches.finding import Cache, Job, Wish, find_caches
from bootseer.launch.caches.records import Record, read_record, records
from bootseer.launch.caches.restoring import generation
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.archive import import_target
from bootseer.snapshots.capture import make_manifest
from bootseer.snapshots.diff import Difference, compare_parts, nearest
from bootseer.snapshots.manifest import Manifest
from bootseer.store import Store


class Listed(Struct, frozen=True):
    """A cache that the store has, or that this node knows of."""

    key: str
    name: str
    generation: Manifest | None
    """The newest generation; None: the store has none."""
    record: Record | None
    """What this node knows of it."""


class Explained(Struct, frozen=True):
    """One cache of a command: whether a start would have it, and if not, why."""

    cache: Cache
    generation: Manifest | None
    record: Record | None
    nearest: Manifest | None
    """Of a miss, the generation of the same cache that differs least."""
    differences: tuple[Difference, ...]

    @property
    def reason(self) -> str:
        """Returns a sentence for people."""
        if self.generation is not None:
            return f"the store has {self.generation.file_count} names, by {self.generation.node}"
        if self.nearest is None:
            return f"the store has no cache called {self.cache.name}"
        names = ", ".join(one.part for one in self.differences)
        return f"the nearest, by {self.nearest.node}, differs in {names}"


def list_caches(settings: Settings, store: Store) -> Iterator[Listed]:
    """The caches of the store, newest first, then those that only this node knows of."""
    known = {record.key: record for record in records(settings.cache_dir)}
    for manifest in _generations(store):
        record = known.pop(manifest.fingerprint, None)
        yield Listed(manifest.fingerprint, manifest.cache, manifest, record)
    for record in known.values():
        yield Listed(record.key, record.name, None, record)


def _generations(store: Store) -> Iterator[Manifest]:
    return (manifest for manifest in catalogue.list_all(store) if manifest.cache)


def find_generation(store: Store, text: str) -> Manifest:
    """The newest generation of the cache with this key, or start of a key.

    Raises: NotFoundError, InvalidInputError.
    """
    manifest = catalogue.find(store, text)
    if not manifest.cache:
        raise NotFoundError(f"{text} is a snapshot and no kept cache; see `snapshot show`")
    return manifest


def explain(settings: Settings, store: Store, wish: Wish, job: Job) -> list[Explained]:
    """What a start of the job on this host would find. Changes nothing."""
    found = []
    stored: list[Manifest] | None = None
    for cache in find_caches(settings, wish, job):
        newest = generation(store, cache.key)
        near: Manifest | None = None
        differences: tuple[Difference, ...] = ()
        if newest is None:
            stored = list(_generations(store)) if stored is None else stored
            near = nearest(cache.parts, (one for one in stored if one.cache == cache.name))
            differences = compare_parts(near.parts, cache.parts) if near else ()
        record = read_record(settings.cache_dir, cache.key)
        found.append(Explained(cache, newest[0] if newest else None, record, near, differences))
    return found


def import_cache(
    settings: Settings,
    store: Store,
    archive: Path,
    name: str,
    wish: Wish,
    job: Job,
    on_progress: Callable[[int], None],
) -> Manifest:
    """Make what an archive holds the newest generation of the cache `name` of a job on this host.

    Raises: InvalidInputError where the job has no such cache; as `archive.import_archive`.
    """
    caches = {cache.name: cache for cache in find_caches(settings, wish, job)}
    if name not in caches:
        known = ", ".join(caches) or "none"
        raise InvalidInputError(f"the command has no cache called {name!r}; it has {known}")
    cache = caches[name]
    target = import_target(settings, store, archive, cache.target, on_progress)
    manifest = make_manifest(cache.parts, [target], setup_ns=0, node=settings.node)
    catalogue.publish(store, manifest, replace=True)
    return manifest


def delete(store: Store, text: str) -> Manifest:
    """Take a cache's newest generation out of the store; `gc` then removes its content.

    Raises: as `find_generation`.
    """
    manifest = find_generation(store, text)
    store.delete(catalogue.manifest_key(manifest.fingerprint))
    return manifest
