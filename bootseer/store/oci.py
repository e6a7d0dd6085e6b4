"""A store beside an image in a registry: `oci://HOST/REPOSITORY@sha256:DIGEST`, or `:TAG`.

Owns what a registry can promise as a store. An object appears whole, with its manifest. Exclusive
creation is decided after the fact: of writers that met, the first by their clocks keeps the key,
the others withdraw; where the registry has no referrers API, a writer may even go unnoticed. So a
lease there is advice that may be given twice: work is done twice at worst, and what is published
is the same. Format: docs/format/oci.md.

All keys are known from one request, whose answer is kept for `FRESH_S`, and for ever about keys
that name their object's own digest. Thread-safe.
"""

import contextlib
import hashlib
import logging
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from bootseer.config import load_settings
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.registry.client import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    RegistryClient,
    digest_of,
    open_registry_client,
    parse_object,
)
from bootseer.registry.platforms import unsuitability
from bootseer.registry.reference import Reference, parse_reference
from bootseer.store.backend import FileInfo, Space
from bootseer.store.oci_objects import (
    ARTIFACT_TYPE,
    EMPTY,
    StoredObject,
    encode_object,
    objects_by_key,
)
from bootseer.store.paths import split_path
from bootseer.store.spool import SPOOL_BYTES, SpoolingWriter

_log = logging.getLogger(__name__)

PREFIX = "oci://"
FRESH_S = 1.0
"""How old an answer may be about what can change: less than the tolerance of leases, and little
beside what nodes that wait for each other wait between two looks."""
_PIECE_BYTES = 4 << 20
_UPDATES_MAX = 10
_MINE_S = 60.0
"""How long what was added to a list is looked after: another writer of that list may have read it
before, and written it since."""
_INDEX_TYPES = (INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json")


class OciBackend:
    """The objects beside one image."""

    has_atomic_rename = False
    has_atomic_put = False

    def __init__(self, url: str, deadline_s: float | None = None) -> None:
        settings = load_settings()
        self._reference = parse_reference(url.removeprefix(PREFIX))
        self.url = f"{PREFIX}{self._reference}"
        self._client = open_registry_client(
            self._reference,
            hosts_dir=settings.registry_hosts_dir,
            deadline_s=deadline_s or settings.deadline_s,
        )
        self._lock = threading.RLock()
        self._subject: Mapping[str, Any] | None = None
        self._objects: dict[str, list[StoredObject]] = {}
        self._loaded_at = float("-inf")
        self._has_empty = False
        self._mine: dict[str, tuple[float, Mapping[str, Any]]] = {}
        """What was added to the list lately, by the manifest's digest: (when, descriptor)."""

    def stat(self, path: str) -> FileInfo:
        split_path(path)
        stored = self._find(path)
        if stored is not None:
            return _info(stored)
        if not path or any(key.startswith(f"{path}/") for key in self._keys()):
            return FileInfo(path, 0, 0, True)
        raise NotFoundError(f"cannot look at {self._name(path)}: it does not exist")

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        split_path(path)
        if offset < 0 or (length is not None and length < 0):
            raise InvalidInputError(f"the range ({offset}, {length}) is negative")
        stored = self._find(path)
        if stored is None:
            if any(key.startswith(f"{path}/") for key in self._keys()):
                raise InvalidInputError(f"cannot read {self._name(path)}: it is a folder")
            raise NotFoundError(f"cannot read {self._name(path)}: it does not exist")
        end = stored.size_bytes if length is None else min(offset + length, stored.size_bytes)
        if offset >= end:
            return b""
        return self._client.read_blob(stored.digest, stored.size_bytes, offset, end)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        data = self.read(path, offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def create(self, path: str, *, overwrite: bool = False) -> SpoolingWriter:
        self._check_new(path)
        if not overwrite and self._find(path) is not None:
            raise AlreadyExistsError(f"cannot create {self._name(path)}: it exists already")
        self._check_folders(path.split("/")[:-1])
        return SpoolingWriter(partial(self._put, path, overwrite), self._name(path))

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self._check_new(source)
        self._check_new(target)
        stored = self._find(source)
        if stored is None:
            if self.stat(source).is_dir:
                raise UnsupportedError(f"{self.url} cannot rename a folder in one step")
            raise NotFoundError(f"cannot rename {self._name(source)}: it does not exist")
        if source != target:
            self._publish(target, stored.digest, stored.size_bytes, overwrite)
            self.delete(source)

    def list(self, path: str) -> Iterator[FileInfo]:
        split_path(path)
        prefix = f"{path}/" if path else ""
        found: dict[str, FileInfo] = {}
        with self._lock:
            self._refresh(FRESH_S)
            if path in self._objects:
                raise NotFoundError(f"cannot list {self._name(path)}: it is no folder")
            for key, versions in self._objects.items():
                if key.startswith(prefix):
                    name, slash, _ = key[len(prefix) :].partition("/")
                    full = prefix + name
                    found[full] = FileInfo(full, 0, 0, True) if slash else _info(versions[-1])
        if not found and path:
            raise NotFoundError(f"cannot list {self._name(path)}: it does not exist")
        return iter(sorted(found.values(), key=lambda info: info.path))

    def mkdir(self, path: str) -> None:
        """Makes nothing: a folder is there while there is an object in it."""
        self._check_folders(split_path(path))

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self._check_new(path)
        with self._lock:
            self._refresh(0.0)
            below = [key for key in self._objects if key.startswith(f"{path}/")]
            if below and not recursive:
                raise AlreadyExistsError(
                    f"cannot delete {self._name(path)}: the folder is not empty"
                )
            self._withdraw([o for key in (path, *below) for o in self._objects.pop(key, [])])

    def space(self) -> Space | None:
        """None: a registry does not tell."""
        return None

    def close(self) -> None:
        """Looks once more whether what was published is still listed. Idempotent."""
        with self._lock:
            if self._mine and self._subject is not None:
                try:
                    self._update_list(set())
                except BootseerError as error:
                    _log.warning("cannot check the list of %s: %s", self.url, error)
                self._mine.clear()
        self._client.close()

    def _name(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def _check_new(self, path: str) -> None:
        if not split_path(path):
            raise InvalidInputError(f"the root of {self.url} is a folder and stays one")

    def _check_folders(self, names: Sequence[str]) -> None:
        for count in range(1, len(names) + 1):
            path = "/".join(names[:count])
            if path in self._objects:
                raise InvalidInputError(f"{self._name(path)} is no folder")

    def _find(self, path: str) -> StoredObject | None:
        versions = self._objects.get(path)
        if versions and versions[-1].is_immutable:
            # Without the lock: no read of a layer waits for another's look for what is absent.
            return versions[-1]
        with self._lock:
            self._refresh(FRESH_S)
            versions = self._objects.get(path)
            return versions[-1] if versions else None

    def _keys(self) -> Sequence[str]:
        with self._lock:
            return tuple(self._objects)

    def _refresh(self, age_max_s: float) -> None:
        """Have a list of objects that is at most so old. With the lock held."""
        if time.monotonic() - self._loaded_at <= age_max_s:
            return
        started = time.monotonic()
        descriptors = self._client.referrers(self._subject_digest(), ARTIFACT_TYPE)
        self._objects = objects_by_key(descriptors)
        self._loaded_at = started

    def _subject_digest(self) -> str:
        """The digest of the image's manifest for this machine."""
        if self._subject is None and self._reference.digest:
            # Reading needs no more than the name; and it works after the image has been deleted.
            return self._reference.digest
        return str(self._described_subject()["digest"])

    def _described_subject(self) -> Mapping[str, Any]:
        if self._subject is None:
            self._subject = _describe(self._client, self._reference)
        return self._subject

    def _put(self, path: str, overwrite: bool, spool: IO[bytes], size_bytes: int) -> None:
        sha = hashlib.sha256()
        try:
            while piece := spool.read(_PIECE_BYTES):
                sha.update(piece)
            spool.seek(0)
            # A large spool is a file without a name, which can be opened again by its descriptor.
            small = size_bytes <= SPOOL_BYTES
            data = spool.read() if small else Path(f"/proc/self/fd/{spool.fileno()}")
        except OSError as error:
            raise from_oserror(error, f"write {self._name(path)}") from error
        digest = f"sha256:{sha.hexdigest()}"
        self._client.push_blob(digest, data)
        self._publish(path, digest, size_bytes, overwrite)

    def _publish(self, path: str, digest: str, size_bytes: int, overwrite: bool) -> None:
        """Make a blob the object at `path`."""
        with self._lock:
            subject = self._described_subject()
            self._push_empty()
            self._refresh(FRESH_S)
            older = self._objects.get(path, [])
            if older and not overwrite:
                raise AlreadyExistsError(f"cannot create {self._name(path)}: it exists already")
            written_ns = max([time.time_ns(), *(o.written_ns + 1 for o in older)])
            data, descriptor = encode_object(
                path, digest, size_bytes, written_ns, subject, replaces=overwrite
            )
            own = str(descriptor["digest"])
            is_listed = self._client.push_manifest(own, MANIFEST_TYPE, data)
            if not is_listed:
                self._mine[own] = (time.monotonic(), descriptor)
                self._update_list({o.manifest_digest for o in older})
            else:
                self._refresh(0.0)
            versions = self._objects.get(path, [])
            if not overwrite and versions and versions[-1].manifest_digest != own:
                self._withdraw([o for o in versions if o.manifest_digest == own])
                raise AlreadyExistsError(f"cannot create {self._name(path)}: it exists already")
            self._forget(older)

    def _push_empty(self) -> None:
        if not self._has_empty:
            self._client.push_blob(digest_of(EMPTY), EMPTY)
            self._has_empty = True

    def _withdraw(self, objects: Sequence[StoredObject]) -> None:
        """Take objects out of the list. With the lock held."""
        if not objects:
            return
        subject_digest = self._subject_digest()
        gone = {stored.manifest_digest for stored in objects}
        tagged = self._client.tagged_referrers(subject_digest, for_update=True)
        in_list = {entry.get("digest") for entry in tagged if isinstance(entry, dict)}
        if gone & in_list:
            self._update_list(gone)
        self._forget(objects, must=not gone <= in_list)
        self._loaded_at = float("-inf")

    def _forget(self, objects: Sequence[StoredObject], *, must: bool = False) -> None:
        """Delete manifests that are of no use any more, where the registry allows it."""
        for stored in objects:
            self._mine.pop(stored.manifest_digest, None)
            try:
                self._client.delete_manifest(stored.manifest_digest)
            except BootseerError as error:
                if must:
                    raise
                _log.debug("left %s in %s: %s", stored.manifest_digest, self.url, error)

    def _update_list(self, gone: set[str]) -> None:
        """Have the list that stands in for the referrers API name all that was added lately, and
        nothing of `gone`.

        Nothing excludes other writers: what is written is read back until it is as it should be.
        """
        subject_digest = self._subject_digest()
        gone = set(gone)
        for digest in [d for d, (when, _) in self._mine.items() if _is_old(when) or d in gone]:
            del self._mine[digest]
        for attempt in range(_UPDATES_MAX):
            started = time.monotonic()
            entries = self._client.tagged_referrers(subject_digest, for_update=True)
            there = {entry.get("digest") for entry in entries if isinstance(entry, dict)}
            missing = [entry for digest, (_, entry) in self._mine.items() if digest not in there]
            if not missing and not gone & there:
                self._objects = objects_by_key(entries)
                self._loaded_at = started
                return
            kept = [e for e in entries if not (isinstance(e, dict) and e.get("digest") in gone)]
            if attempt:
                time.sleep(random.uniform(0.0, 0.05 * attempt))
            try:
                self._client.tag_referrers(subject_digest, [*kept, *missing])
            except InvalidInputError:
                # It names a manifest that is gone: its writer withdrew it, and another one, who
                # had read the list before, wrote it back.
                gone |= self._dangling([*kept, *missing])
                for digest in gone & set(self._mine):
                    del self._mine[digest]
        raise UnavailableError(f"{self.url}: others keep changing the list of its objects")

    def _dangling(self, entries: Sequence[Any]) -> set[str]:
        """Digests of our own kind of manifests that a list names and the registry lacks."""
        found = set()
        for stored in (o for versions in objects_by_key(entries).values() for o in versions):
            try:
                self._client.resolve(stored.manifest_digest)
            except NotFoundError:
                found.add(stored.manifest_digest)
        return found


def _is_old(when: float) -> bool:
    return time.monotonic() - when > _MINE_S


def _describe(client: RegistryClient, reference: Reference) -> Mapping[str, Any]:
    """The descriptor of the image's manifest; of an index, that of this machine's platform."""
    try:
        document = client.manifest(reference.target)
    except NotFoundError as error:
        # Not as the error that it is: this is no object that may yet come.
        raise InvalidInputError(f"there is no image {reference} to keep a store beside") from error
    if document.media_type in _INDEX_TYPES and reference.digest is None:
        entries = parse_object(document.data, client.name).get("manifests")
        ranked: list[tuple[int, int, str]] = []
        for entry in entries if isinstance(entries, list) else []:
            with contextlib.suppress(AttributeError, KeyError):
                where = entry["platform"]
                names = (str(where.get(name) or "") for name in ("os", "architecture", "variant"))
                rank = unsuitability(*names)
                if rank is not None:
                    ranked.append((rank, len(ranked), str(entry["digest"])))
        if not ranked:
            raise NotFoundError(f"{reference} has no image for this machine's platform")
        document = client.manifest(min(ranked)[2])
    return {
        "mediaType": document.media_type,
        "digest": document.digest,
        "size": len(document.data),
    }


def _info(stored: StoredObject) -> FileInfo:
    return FileInfo(stored.key, stored.size_bytes, stored.written_ns, False)
