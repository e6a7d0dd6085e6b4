"""Snapshots in the store: where they lie, how they are found, in which order they are published.

Alone owns the keys. A manifest is published after everything that it names, so a snapshot that
can be found can be restored. Thread-safe as the store is.
"""

import logging
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import Form
from bootseer.base.progress import Progress
from bootseer.blob.index import codec as index
from bootseer.blob.keys import blob_key, index_key
from bootseer.blob.tree import Tree
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    from_oserror,
)
from bootseer.snapshots.catalogue.manifest import Key, Manifest, Stored, Target, is_name
from bootseer.snapshots.catalogue.manifest_codec import (
    INDEX_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    decode,
    encode,
)
from bootseer.store import Store
from bootseer.store.objects.uses import note_use

logger = logging.getLogger(__name__)

FOLDER = "snapshots/"
NAMES = "snapshots/names/"
_MANIFEST_KEY = re.compile(r"snapshots/([0-9a-f]{64})\.json")
_HEX = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{4,64}")
_THREADS_MAX = 16
_PIECE_BYTES = 1024 * 1024


class _Name(Struct, frozen=True):
    fingerprint: Key


_NAME_FORM: Form[_Name] = Form(
    type=_Name, what="a name of a snapshot (give it anew)", versions=(1,), size_max=4096
)


def manifest_key(fingerprint: str) -> str:
    """The key of a snapshot's manifest."""
    return f"{FOLDER}{fingerprint}.json"


def lease_key(fingerprint: str) -> str:
    """The key of the lease of the node that makes a snapshot."""
    return f"leases/snapshots/{fingerprint}"


def load(store: Store, fingerprint: str) -> Manifest | None:
    """The snapshot with exactly this key, or None.

    Raises: CorruptError, UnknownFormatError, UnavailableError, DeadlineError.
    """
    key = manifest_key(fingerprint)
    try:
        data = store.read(key, 0, MANIFEST_BYTES_MAX + 1)
    except NotFoundError:
        return None
    return decode(data, fingerprint)


def exists(store: Store, fingerprint: str) -> bool:
    """Whether the snapshot is there, without reading it."""
    return store.exists(manifest_key(fingerprint))


def find(store: Store, text: str) -> Manifest:
    """The snapshot with this key, beginning of a key (4 digits or more) or name.

    Raises: NotFoundError; InvalidInputError where several keys begin so.
    """
    manifest = load(store, fingerprint_of(store, text))
    if manifest is None:
        raise _no_snapshot(store, text)
    return manifest


def _no_snapshot(store: Store, text: str) -> NotFoundError:
    return NotFoundError(f"there is no snapshot {text} in {store.url}; see `snapshot list`")


def fingerprint_of(store: Store, text: str) -> str:
    """The key that `find` would load. Raises: as `find`."""
    key = text
    if is_name(text):
        named = _read_name(store, text)
        if named is not None:
            key = named
        elif not _PREFIX.fullmatch(text):
            raise NotFoundError(
                f"there is no snapshot called {text!r} in {store.url}; see `snapshot list`; of a "
                "key give at least 4 digits"
            )
    if not _PREFIX.fullmatch(key):
        raise InvalidInputError(f"{text!r} is neither a snapshot's name nor the start of its key")
    keys = [key] if _HEX.fullmatch(key) else list(fingerprints(store, key))
    if len(keys) > 1:
        raise InvalidInputError(f"{len(keys)} snapshots begin with {key}; give more digits")
    if not keys:
        raise _no_snapshot(store, text)
    return keys[0]


def fingerprints(store: Store, prefix: str = "") -> Iterator[str]:
    """The keys of all snapshots, readable or not, that begin with `prefix`, sorted."""
    for info in store.list(FOLDER + prefix):
        if match := _MANIFEST_KEY.fullmatch(info.path):
            yield match[1]


def list_all(store: Store) -> Iterator[Manifest]:
    """Every snapshot that can be read, newest first; damaged ones are logged and left out."""
    return _read_all(store, fingerprints(store))


def list_newest(store: Store, count: int, *, within_s: float | None = None) -> Iterator[Manifest]:
    """`list_all`, but only of the `count` that were published last. Those that are not asked for
    within `within_s` seconds are left out."""
    infos = sorted(store.list(FOLDER), key=lambda info: info.modified_ns, reverse=True)
    matches = [match for info in infos if (match := _MANIFEST_KEY.fullmatch(info.path))]
    return _read_all(store, [match[1] for match in matches[:count]], within_s)


def _read_all(
    store: Store, keys: Iterable[str], within_s: float | None = None
) -> Iterator[Manifest]:
    end = None if within_s is None else time.monotonic() + within_s

    def read(key: str) -> Manifest | None:
        if end is not None and time.monotonic() > end:
            return None
        try:
            return load(store, key)
        except BootseerError as error:
            logger.warning("snapshot %s is left out: %s", key[:12], error)
            return None

    from concurrent.futures import ThreadPoolExecutor  # here: no restore lists snapshots

    # A store may take 50 ms for each.
    with ThreadPoolExecutor(_THREADS_MAX) as pool:
        found = [manifest for manifest in pool.map(read, keys) if manifest is not None]
    return iter(sorted(found, key=lambda manifest: manifest.created_ns, reverse=True))


def _read_name(store: Store, name: str) -> str | None:
    try:
        return read_pointer(store, f"{NAMES}{name}.json")
    except NotFoundError:
        return None


def read_pointer(store: Store, key: str) -> str:
    """The fingerprint that the name at `key` stands for.

    Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError.
    """
    return _NAME_FORM.read(store, key).fingerprint


def publish_target(
    store: Store, blob: Stored, data: Path, tree: Stored, encoded: bytes, *, replace: bool
) -> None:
    """Store a target's blob and its encoded tree.

    What is there already, by digest, is not sent again; with `replace` it is: a reader found it
    damaged.
    """
    for key, size_bytes, content in (
        (blob_key(blob.digest), blob.size_bytes, data),
        (index_key(tree.digest), tree.size_bytes, encoded),
    ):
        with Progress("storing", size_bytes) as progress:
            pieces = _Pieces(content, progress) if isinstance(content, Path) else content
            # A cut-off object under the right name must not make every later restore fail.
            if not store.publish(key, pieces, replace=replace) and _is_other(
                store, key, size_bytes
            ):
                store.publish(key, pieces, replace=True)


def _is_other(store: Store, key: str, size_bytes: int) -> bool:
    try:
        return store.size(key) != size_bytes
    except NotFoundError:
        return True


class _Pieces:
    """The content of a file, each time from its beginning, with a progress bar."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._path = path
        self._progress = progress

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb", buffering=0) as file:
                while piece := file.read(_PIECE_BYTES):
                    self._progress.advance(len(piece))
                    yield piece
        except OSError as error:
            raise from_oserror(error, f"read {self._path}") from error


def publish(store: Store, manifest: Manifest, *, replace: bool = False) -> bool:
    """Make the snapshot visible; everything that it names is in the store already.

    False: another node published this key first, and its snapshot stays. Raises: BusyError where
    a garbage collector has taken something of it at the same moment; it is not visible then.
    """
    key = manifest_key(manifest.fingerprint)
    done = store.publish(key, encode(manifest), replace=replace)
    # What lay there unneeded was not sent again. A collector looks at the manifests right before
    # it deletes, and we after we published, so one of both notices.
    for target in manifest.targets:
        blobs = (blob_key(blob.digest) for blob in target.blobs)
        for needed in (*blobs, index_key(target.index.digest)):
            if done and not store.exists(needed):
                store.delete(key)
                raise BusyError(f"{needed} was deleted while it was needed; run it again")
    if manifest.name:
        _tell_moved(store, manifest)
        named = _NAME_FORM.encode(_Name(manifest.fingerprint))
        store.publish(f"{NAMES}{manifest.name}.json", named, replace=True)
    return done


def _tell_moved(store: Store, manifest: Manifest) -> None:
    """Say so where a name stands for another snapshot until now."""
    try:
        before = _read_name(store, manifest.name)
    except CorruptError:
        return  # replaced now
    if before not in (None, manifest.fingerprint):
        logger.warning(
            "the name %s stood for snapshot %s until now, which is found by its key from here on",
            manifest.name,
            str(before)[:12],
        )


def note_used(store: Store, manifest: Manifest) -> None:
    """Let garbage collectors know that the snapshot is in use now. Never raises."""
    for target in manifest.targets:
        note_use(store, target.index.digest, [blob.digest for blob in target.blobs])


def find_cut_blob(store: Store, target: Target) -> Stored | None:
    """The first of the blobs that a target is read from which does not have its size in the store.

    Raises: NotFoundError where one is missing; UnavailableError.
    """
    for blob in target.blobs:
        if store.size(blob_key(blob.digest)) != blob.size_bytes:
            return blob
    return None


def load_tree(store: Store, target: Target) -> Tree:
    """A target's tree; see `load_encoded_tree`."""
    return load_encoded_tree(store, target)[0]


def load_encoded_tree(store: Store, target: Target) -> tuple[Tree, bytes]:
    """A target's tree, verified against its digest and against the blobs that the manifest names,
    and its encoded form.

    Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError.
    """
    data = read_encoded_tree(store, target)
    return decode_tree(target, data), data


def read_encoded_tree(store: Store, target: Target) -> bytes:
    """A target's encoded tree, verified against its digest. Raises: as `load_encoded_tree`."""
    stored = target.index
    if stored.size_bytes > INDEX_BYTES_MAX:
        raise CorruptError(f"the index {stored.digest} is too large")
    data = store.read(index_key(stored.digest), 0, stored.size_bytes + 1)
    if len(data) != stored.size_bytes or index.digest(data) != stored.digest:
        raise CorruptError(f"the index {stored.digest} in {store.url} does not match its digest")
    return data


def decode_tree(target: Target, data: bytes) -> Tree:
    """The target's tree in `data`, which `read_encoded_tree` gave, checked against its blobs.

    Raises: CorruptError.
    """
    tree = index.decode(data, is_verified=True)
    blobs = [(blob.digest, blob.size_bytes) for blob in tree.blobs]
    if blobs != [(blob.digest, blob.size_bytes) for blob in target.blobs]:
        raise CorruptError(f"the index {target.index.digest} belongs to other blobs")
    return tree
