"""Operations of `bootseer cache`: list, explain, import and delete kept caches.

Reads the store and the node; `import_cache` and `delete` write to the store. Main thread.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.launch.caches.finding import Cache, CacheJob, KeepRequest, find_caches
from bootseer.launch.caches.records import CacheRecord, read_record, records
from bootseer.launch.caches.restoring import generation
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.archive import import_target
from bootseer.snapshots.capture import make_manifest
from bootseer.snapshots.diff import Difference, compare_parts, nearest
from bootseer.snapshots.manifest import Manifest
from bootseer.store import Store


class CacheListing(Struct, frozen=True):
    """A cache that the store has, or that this node has a record of."""

    key: str
    name: str
    generation: Manifest | None
    """Newest generation; None: the store has none."""
    record: CacheRecord | None
    """This node's record of the cache."""


class CacheExplanation(Struct, frozen=True):
    """State of one cache of a command: whether a start would find it and, if not, the reason."""

    cache: Cache
    generation: Manifest | None
    record: CacheRecord | None
    nearest: Manifest | None
    """If there is no generation: the one of the same cache whose key differs least."""
    differences: tuple[Difference, ...]

    @property
    def reason(self) -> str:
        """Sentence for people that says whether a start would find the cache."""
        if self.generation is not None:
            return f"the store has {self.generation.file_count} names, by {self.generation.node}"
        if self.nearest is None:
            return f"the store has no cache called {self.cache.name}"
        names = ", ".join(one.part for one in self.differences)
        return f"the most similar one, by {self.nearest.node}, differs in {names}"


def list_caches(settings: Settings, store: Store) -> Iterator[CacheListing]:
    """Yield the caches of the store, newest first, then those that only this node has."""
    known = {record.key: record for record in records(settings.cache_dir)}
    for manifest in _generations(store):
        record = known.pop(manifest.fingerprint, None)
        yield CacheListing(manifest.fingerprint, manifest.cache, manifest, record)
    for record in known.values():
        yield CacheListing(record.key, record.name, None, record)


def _generations(store: Store) -> Iterator[Manifest]:
    return (manifest for manifest in catalogue.list_all(store) if manifest.cache)


def find_generation(store: Store, text: str) -> Manifest:
    """Return the newest generation of the cache whose key is, or begins with, `text`.

    Raises: NotFoundError, InvalidInputError.
    """
    manifest = catalogue.find(store, text)
    if not manifest.cache:
        raise NotFoundError(f"{text} is a snapshot, not a kept cache; see `snapshot show`")
    return manifest


def explain(
    settings: Settings, store: Store, request: KeepRequest, job: CacheJob
) -> list[CacheExplanation]:
    """Return the state of each cache that a start of the job on this host would use."""
    found = []
    stored: list[Manifest] | None = None
    for cache in find_caches(settings, request, job):
        newest = generation(store, cache.key)
        near: Manifest | None = None
        differences: tuple[Difference, ...] = ()
        if newest is None:
            stored = list(_generations(store)) if stored is None else stored
            near = nearest(cache.parts, (one for one in stored if one.cache == cache.name))
            differences = compare_parts(near.parts, cache.parts) if near else ()
        record = read_record(settings.cache_dir, cache.key)
        found.append(
            CacheExplanation(cache, newest[0] if newest else None, record, near, differences)
        )
    return found


def import_cache(
    settings: Settings,
    store: Store,
    archive: Path,
    name: str,
    request: KeepRequest,
    job: CacheJob,
    on_progress: Callable[[int], None],
) -> Manifest:
    """Publish the contents of an archive as the newest generation of the cache `name` of a job.

    Raises: InvalidInputError if the job has no such cache; as `archive.import_target`.
    """
    caches = {cache.name: cache for cache in find_caches(settings, request, job)}
    if name not in caches:
        known = ", ".join(caches) or "none"
        raise InvalidInputError(f"the command has no cache called {name!r}; it has {known}")
    cache = caches[name]
    target = import_target(settings, store, archive, cache.target, on_progress)
    manifest = make_manifest(cache.parts, [target], setup_ns=0, node=settings.node)
    catalogue.publish(store, manifest, replace=True)
    return manifest


def delete(store: Store, text: str) -> Manifest:
    """Delete a cache's newest generation from the store. Raises: as `find_generation`."""
    manifest = find_generation(store, text)
    store.delete(catalogue.manifest_key(manifest.fingerprint))
    return manifest
