"""Backend for the objects beside an image: `oci://HOST/REPOSITORY@sha256:DIGEST`, or `:TAG`.

An object appears whole, with its manifest. Exclusive creation is decided afterwards: of several
writers of one key, the first by their clocks keeps the key and the others withdraw. On a registry
without the referrers API a writer may go unnoticed. So two nodes may hold one lease: they do the
same work twice, and publish the same result. Format: docs/format/oci.md. Thread-safe.
"""

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.registry.client import RegistryClient, open_registry_client
from bootseer.registry.documents import MANIFEST_TYPE, digest_of
from bootseer.registry.reference import Reference, parse_reference
from bootseer.settings.config import load_settings
from bootseer.store.backend import Backend, FileInfo, Traits
from bootseer.store.paths import check_range, split_path
from bootseer.store.spool import SPOOL_BYTES, SpoolingWriter
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.policy import SOON, fresh_copy, random_fraction

_log = logging.getLogger(__name__)

# ---- artifacts -----------------------------------------------------------------------------------

# An object is a blob in the image's repository and a small manifest. The manifest refers to the
# image (`subject`), and its annotations contain the object's key. Registries copy annotations into
# the list of an image's referrers, so that one list shows all keys. Malformed entries of a list are
# ignored.

ARTIFACT_TYPE = "application/vnd.bootseer.store.v1"
OBJECT_TYPE = "application/vnd.bootseer.object.v1"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
"""Configuration of an artifact without one (image specification, "Guidance for an Empty
Descriptor")."""

_KEY = "org.bootseer.key"
_DIGEST = "org.bootseer.digest"
_SIZE = "org.bootseer.size"
_WRITTEN = "org.bootseer.written_ns"
_REPLACES = "org.bootseer.replaces"
_SHA256 = re.compile("sha256:[0-9a-f]{64}")
_NUMBER = re.compile("[0-9]{1,19}")


class OciObject(Struct, frozen=True):
    """Object of a store: its key, its blob and its manifest."""

    key: str
    digest: str
    size_bytes: int
    written_ns: int
    """Time of the write by the writer's clock."""
    replaces: bool
    """Whether the object was written to replace an existing one, not to be the first."""
    manifest_digest: str

    @property
    def is_immutable(self) -> bool:
        """Whether the key contains the object's digest, so that the object can never change."""
        return self.digest.partition(":")[2] in self.key

    @property
    def order(self) -> tuple[bool, int, str]:
        """Rank among the objects of one key; the greatest is the valid one.

        That is the newest replacement, or without replacements the oldest object, so that writers
        and readers agree on the first writer.
        """
        age = self.written_ns if self.replaces else -self.written_ns
        return (self.replaces, age, self.manifest_digest)


def encode_object(
    key: str,
    digest: str,
    size_bytes: int,
    written_ns: int,
    subject: Mapping[str, Any],
    *,
    replaces: bool = False,
) -> tuple[bytes, dict[str, Any]]:
    """Return the manifest of an object, and the descriptor by which lists of referrers name it."""
    annotations = {
        _KEY: key,
        _DIGEST: digest,
        _SIZE: str(size_bytes),
        _WRITTEN: str(written_ns),
        "org.opencontainers.image.created": _rfc3339(written_ns),
    }
    if replaces:
        annotations[_REPLACES] = "true"
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": EMPTY_TYPE, "digest": digest_of(EMPTY), "size": len(EMPTY)},
        "layers": [{"mediaType": OBJECT_TYPE, "digest": digest, "size": size_bytes}],
        "subject": dict(subject),
        "annotations": annotations,
    }
    data = json.dumps(manifest, sort_keys=True).encode()
    descriptor = {
        "mediaType": MANIFEST_TYPE,
        "digest": digest_of(data),
        "size": len(data),
        "artifactType": ARTIFACT_TYPE,
        "annotations": annotations,
    }
    return data, descriptor


def _rfc3339(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def decode_object(descriptor: Mapping[str, Any]) -> OciObject | None:
    """Return the object of a descriptor in a list of referrers; None for other descriptors."""
    annotations = descriptor.get("annotations")
    manifest_digest = descriptor.get("digest")
    if not isinstance(annotations, dict) or not isinstance(manifest_digest, str):
        return None
    if descriptor.get("artifactType") != ARTIFACT_TYPE:
        return None
    names = (_KEY, _DIGEST, _SIZE, _WRITTEN)
    values = [value for name in names if isinstance(value := annotations.get(name), str)]
    if len(values) < len(names):
        return None
    key, digest, size, written = values
    if not (_SHA256.fullmatch(digest) and _SHA256.fullmatch(manifest_digest)):
        return None
    if not (_NUMBER.fullmatch(size) and _NUMBER.fullmatch(written)):
        return None
    try:
        if not split_path(key):
            return None
    except InvalidInputError:
        return None
    replaces = annotations.get(_REPLACES) == "true"
    return OciObject(key, digest, int(size), int(written), replaces, manifest_digest)


def objects_by_key(descriptors: Iterable[Any]) -> dict[str, list[OciObject]]:
    """Return the objects in a list of referrers by key, the valid one of each key last."""
    found: dict[str, list[OciObject]] = {}
    for descriptor in descriptors:
        stored = decode_object(descriptor) if isinstance(descriptor, dict) else None
        if stored is not None:
            found.setdefault(stored.key, []).append(stored)
    for versions in found.values():
        versions.sort(key=lambda stored: stored.order)
    return found


# ---- list of objects -----------------------------------------------------------------------------

FRESH_S = 1.0
"""Largest age of a cached answer: less than the tolerance of leases, and short beside the interval
at which waiting nodes ask again."""
_UPDATES_MAX = 10
_MINE_S = 60.0
"""Time for which an added object is checked: another writer that read the list before may have
written it back without the object."""


class ObjectList:
    """List of the objects beside one image, with additions and removals.

    The registry's answer is cached for `FRESH_S`, objects whose key contains their digest for ever.
    Writers on different nodes are not excluded from each other; they agree by the order of their
    requests. Thread-safe: writers of a process wait for each other, readers wait for no writer.
    """

    def __init__(self, client: RegistryClient, reference: Reference, url: str) -> None:
        """Prepare the list without a request; `url` is the store's, for messages."""
        self._client = client
        self._reference = reference
        self._url = url
        self._writing = threading.Lock()
        """Held by one writer of this process through all of its requests and pauses."""
        self._looking = threading.Lock()
        """Held during a request for the list; waiting threads use its answer."""
        self._lock = threading.Lock()
        """Held while the cached answer is replaced, never during a request."""
        self._subject: Mapping[str, Any] | None = None
        self._objects: Mapping[str, list[OciObject]] = {}
        """Cached answer. It is replaced, never changed."""
        self._loaded_at = float("-inf")
        """Time at which the cached answer was requested."""
        self._changed_at = float("-inf")
        """Time of our last change; answers requested before are outdated."""
        self._failed_at = float("-inf")
        self._failure: BootseerError | None = None
        """Error of the last failed request for the list; `_failed_at` is its time."""
        self._has_empty = False
        self._mine: dict[str, tuple[float, Mapping[str, Any]]] = {}
        """Objects added lately by the manifest's digest: (time of the addition, descriptor)."""

    def find(self, key: str) -> OciObject | None:
        """Return the newest object of a key. Raises: as `RegistryClient.manifest`."""
        versions = self._objects.get(key)
        if versions and versions[-1].is_immutable:
            # Readers of a layer do not wait for the request of a thread that needs a fresh list.
            return versions[-1]
        versions = self._refreshed(FRESH_S).get(key)
        return versions[-1] if versions else None

    def fresh(self) -> Mapping[str, OciObject]:
        """Return the newest object of each key, from an answer that is at most `FRESH_S` old.

        Raises: as `find`.
        """
        self._refreshed(FRESH_S)
        return self.known()

    def known(self) -> Mapping[str, OciObject]:
        """Return the newest object of each key from the last answer, however old."""
        return {key: versions[-1] for key, versions in self._objects.items()}

    def add(self, key: str, digest: str, size_bytes: int, *, overwrite: bool) -> None:
        """Publish a blob that the registry has as the object of a key.

        Raises: AlreadyExistsError if the key has an object and `overwrite` is not set; as
        `RegistryClient.push_blob`.
        """
        with self._writing:
            subject = self._described_subject()
            self._push_empty()
            older = self._refreshed(FRESH_S).get(key, [])
            if older and not overwrite:
                raise self._exists(key)
            written_ns = max([time.time_ns(), *(o.written_ns + 1 for o in older)])
            data, descriptor = encode_object(
                key, digest, size_bytes, written_ns, subject, replaces=overwrite
            )
            own = str(descriptor["digest"])
            is_listed = self._client.push_manifest(own, MANIFEST_TYPE, data)
            if not is_listed:
                self._mine[own] = (time.monotonic(), descriptor)
                self._update_list({o.manifest_digest for o in older})
            else:
                self._refreshed(0.0)
            versions = self._objects.get(key, [])
            if not overwrite and versions and versions[-1].manifest_digest != own:
                self._withdraw([o for o in versions if o.manifest_digest == own])
                raise self._exists(key)
            self._forget(older)

    def remove(self, key: str, *, recursive: bool) -> None:
        """Remove a key, and with `recursive` all keys below it. A missing key is no error.

        Raises: AlreadyExistsError if there are keys below and `recursive` is not set; as `add`.
        """
        with self._writing:
            objects = self._refreshed(0.0)
            below = [name for name in objects if name.startswith(f"{key}/")]
            if below and not recursive:
                raise AlreadyExistsError(
                    f"cannot delete {self._url}/{key}: the folder is not empty"
                )
            self._withdraw([o for name in (key, *below) for o in objects.get(name, [])])

    def settle(self) -> None:
        """Check that added objects are still listed, and add those that are not."""
        with self._writing:
            if self._mine and self._subject is not None:
                try:
                    self._update_list(set())
                except BootseerError as error:
                    _log.warning("cannot check the list of %s: %s", self._url, error)
                self._mine.clear()

    def _exists(self, key: str) -> AlreadyExistsError:
        return AlreadyExistsError(f"cannot create {self._url}/{key}: it exists already")

    def _refreshed(self, age_max_s: float) -> Mapping[str, list[OciObject]]:
        """Return all versions of the objects by key, from an answer at most `age_max_s` old.

        0 requires an answer that is requested from now on. Raises: as `RegistryClient.manifest`. A
        thread that waited for a request that failed raises its error too, so that threads do not
        wait one after the other for a registry that hangs.
        """
        came_at = time.monotonic()
        if (objects := self._young(came_at - age_max_s)) is not None:
            return objects
        with self._looking:
            # An answer requested after this call began is as good as one requested now.
            if (objects := self._young(came_at - age_max_s)) is not None:
                return objects
            if self._failure is not None and self._failed_at >= came_at:
                raise fresh_copy(self._failure)
            started = time.monotonic()
            try:
                descriptors = self._client.referrers(self._subject_digest(), ARTIFACT_TYPE)
            except BootseerError as error:
                self._failure, self._failed_at = error, time.monotonic()
                raise
            return self._keep(objects_by_key(descriptors), started)

    def _young(self, asked_since: float) -> Mapping[str, list[OciObject]] | None:
        """Return the cached answer if it was requested since that time and our last change."""
        with self._lock:
            is_young = self._loaded_at >= asked_since and self._loaded_at > self._changed_at
            return self._objects if is_young else None

    def _keep(
        self, objects: Mapping[str, list[OciObject]], asked_at: float
    ) -> Mapping[str, list[OciObject]]:
        """Cache an answer unless the cached one was requested later; return the cached answer."""
        with self._lock:
            if asked_at >= self._loaded_at:
                self._objects, self._loaded_at = objects, asked_at
            return self._objects

    def _subject_digest(self) -> str:
        """Return the digest of the image's manifest for this machine."""
        if self._subject is None and self._reference.digest:
            # Reading needs the digest only, and works even after the image has been deleted.
            return self._reference.digest
        return str(self._described_subject()["digest"])

    def _described_subject(self) -> Mapping[str, Any]:
        if self._subject is None:
            self._subject = _describe_subject(self._client, self._reference)
        return self._subject

    def _push_empty(self) -> None:
        if not self._has_empty:
            self._client.push_blob(digest_of(EMPTY), EMPTY)
            self._has_empty = True

    def _withdraw(self, objects: Sequence[OciObject]) -> None:
        """Remove objects from the registry's list and from the cache."""
        if not objects:
            return
        subject_digest = self._subject_digest()
        gone = {stored.manifest_digest for stored in objects}
        tagged = self._client.tagged_referrers(subject_digest, for_update=True)
        in_list = {entry.get("digest") for entry in tagged if isinstance(entry, dict)}
        if gone & in_list:
            self._update_list(gone)
        self._forget(objects, must=not gone <= in_list)
        with self._lock:
            kept = {
                key: left
                for key, versions in self._objects.items()
                if (left := [one for one in versions if one.manifest_digest not in gone])
            }
            self._objects, self._changed_at = kept, time.monotonic()

    def _forget(self, objects: Sequence[OciObject], *, must: bool = False) -> None:
        """Delete the manifests of objects if the registry allows it; with `must`, or raise."""
        for stored in objects:
            self._mine.pop(stored.manifest_digest, None)
            try:
                self._client.delete_manifest(stored.manifest_digest)
            except BootseerError as error:
                if must:
                    raise
                _log.debug("left %s in %s: %s", stored.manifest_digest, self._url, error)

    def _update_list(self, gone: set[str]) -> None:
        """Update the list that replaces the referrers API on registries without it.

        Afterwards the list has all objects added lately and none of the digests `gone`. Other
        writers are not excluded, so the list is read back and written again until it is right.
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
                self._keep(objects_by_key(entries), started)
                return
            kept = [e for e in entries if not (isinstance(e, dict) and e.get("digest") in gone)]
            if attempt:
                time.sleep(SOON.delay_s(attempt, random_fraction()))
            try:
                self._client.tag_referrers(subject_digest, [*kept, *missing])
            except InvalidInputError:
                # The list names a manifest that is deleted: its writer withdrew it, and another
                # writer, which had read the list before, wrote the entry back.
                gone |= self._dangling([*kept, *missing])
                for digest in gone & set(self._mine):
                    del self._mine[digest]
        raise UnavailableError(f"{self._url}: others keep changing the list of its objects")

    def _dangling(self, entries: Sequence[Any]) -> set[str]:
        """Return the digests of our manifests that a list names and the registry lacks."""
        found = set()
        for stored in (o for versions in objects_by_key(entries).values() for o in versions):
            try:
                self._client.resolve(stored.manifest_digest)
            except NotFoundError:
                found.add(stored.manifest_digest)
        return found


def _is_old(when: float) -> bool:
    return time.monotonic() - when > _MINE_S


def _describe_subject(client: RegistryClient, reference: Reference) -> Mapping[str, Any]:
    """Return the descriptor of the image's manifest, from an index the one for this platform.

    Raises: InvalidInputError if there is no such image, NotFoundError if it has no manifest for
    this platform; as `RegistryClient.manifest`.
    """
    try:
        document = client.manifest(reference.target)
    except NotFoundError as error:
        # Not a NotFoundError, which callers take for an object that does not exist yet.
        raise InvalidInputError(f"there is no image {reference} to keep a store beside") from error
    if reference.digest is None:
        document = client.for_this_machine(document, str(reference))
    return {
        "mediaType": document.media_type,
        "digest": document.digest,
        "size": len(document.data),
    }


# ---- backend -------------------------------------------------------------------------------------

PREFIX = "oci://"
_PIECE_BYTES = 4 << 20


class OciBackend(Backend):
    """Objects beside one image."""

    traits = Traits()

    def __init__(self, url: str, deadline_s: float | None = None) -> None:
        settings = load_settings()
        reference = parse_reference(url.removeprefix(PREFIX))
        self.url = f"{PREFIX}{reference}"
        self._client = open_registry_client(
            reference,
            hosts_dir=settings.registry_hosts_dir,
            deadline_s=deadline_s or settings.deadline_s,
            wait_budget=WAIT_BUDGET,
        )
        self._listed = ObjectList(self._client, reference, self.url)

    def stat(self, path: str) -> FileInfo:
        split_path(path)
        stored = self._listed.find(path)
        if stored is not None:
            return _info(stored)
        if not path or any(key.startswith(f"{path}/") for key in self._listed.known()):
            return FileInfo(path, 0, 0, True)
        raise NotFoundError(f"cannot look at {self._name(path)}: it does not exist")

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        stored = self._stored(path, offset, length or 0)
        left = max(0, stored.size_bytes - offset)
        file = self._client.file(stored.digest, stored.size_bytes)
        return file.read(offset, left if length is None else min(length, left))

    def _stored(self, path: str, offset: int, length: int = 0) -> OciObject:
        """Return the object at `path`, after checking the range. Raises: as `read`."""
        split_path(path)
        check_range(offset, length)
        stored = self._listed.find(path)
        if stored is None:
            if any(key.startswith(f"{path}/") for key in self._listed.known()):
                raise InvalidInputError(f"cannot read {self._name(path)}: it is a folder")
            raise NotFoundError(f"cannot read {self._name(path)}: it does not exist")
        return stored

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        if attempt is None:
            return super().read_into(path, offset, buffer)
        stored = self._stored(path, offset)
        file = self._client.file(stored.digest, stored.size_bytes)
        return file.read_into(offset, buffer, attempt)

    def create(self, path: str, *, overwrite: bool = False) -> SpoolingWriter:
        self._names_of_file(path)
        if not overwrite and self._listed.find(path) is not None:
            raise AlreadyExistsError(f"cannot create {self._name(path)}: it exists already")
        self._check_folders(path.split("/")[:-1])
        return SpoolingWriter(partial(self._put, path, overwrite), self._name(path))

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self._names_of_file(source)
        self._names_of_file(target)
        stored = self._listed.find(source)
        if stored is None:
            if self.stat(source).is_dir:
                raise UnsupportedError(f"{self.url} cannot rename a folder in one step")
            raise NotFoundError(f"cannot rename {self._name(source)}: it does not exist")
        if source != target:
            self._listed.add(target, stored.digest, stored.size_bytes, overwrite=overwrite)
            self.delete(source)

    def list(self, path: str) -> Iterator[FileInfo]:
        split_path(path)
        prefix = f"{path}/" if path else ""
        found: dict[str, FileInfo] = {}
        objects = self._listed.fresh()
        if path in objects:
            raise NotFoundError(f"cannot list {self._name(path)}: it is no folder")
        for key, stored in objects.items():
            if key.startswith(prefix):
                name, slash, _ = key[len(prefix) :].partition("/")
                full = prefix + name
                found[full] = FileInfo(full, 0, 0, True) if slash else _info(stored)
        if not found and path:
            raise NotFoundError(f"cannot list {self._name(path)}: it does not exist")
        return iter(sorted(found.values(), key=lambda info: info.path))

    def mkdir(self, path: str) -> None:
        """Check the path; nothing is created, since a folder exists while an object is in it."""
        self._check_folders(split_path(path))

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self._names_of_file(path)
        self._listed.remove(path, recursive=recursive)

    def close(self) -> None:
        """Check that published objects are still listed, and close all connections. Idempotent."""
        self._listed.settle()
        self._client.close()

    def _check_folders(self, names: Sequence[str]) -> None:
        known = self._listed.known()
        for count in range(1, len(names) + 1):
            path = "/".join(names[:count])
            if path in known:
                raise InvalidInputError(f"{self._name(path)} is no folder")

    def _put(self, path: str, overwrite: bool, spool: IO[bytes], size_bytes: int) -> None:
        sha = hashlib.sha256()
        try:
            while piece := spool.read(_PIECE_BYTES):
                sha.update(piece)
            spool.seek(0)
            # A large spool is a file without a name, which can be reopened through its descriptor.
            small = size_bytes <= SPOOL_BYTES
            data = spool.read() if small else Path(f"/proc/self/fd/{spool.fileno()}")
        except OSError as error:
            raise from_oserror(error, f"write {self._name(path)}") from error
        digest = f"sha256:{sha.hexdigest()}"
        self._client.push_blob(digest, data)
        self._listed.add(path, digest, size_bytes, overwrite=overwrite)


def _info(stored: OciObject) -> FileInfo:
    return FileInfo(stored.key, stored.size_bytes, stored.written_ns, False)
