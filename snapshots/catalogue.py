"""Snapshots in the store: keys, names, publishing, verifying, and admission of trees.

A manifest is published after everything that it names, so a snapshot that can be found can be
restored. `admit_tree` decides what a restore takes of a tree: a user who may write to a store must
not thereby become root on the nodes that restore from it. `FORMATS` tells the garbage collector
what snapshots need. Thread-safe as the store is; one `Verifier` is for one thread.
"""

import logging
import re
import stat
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from bootseer.base.documents import DocumentFormat, ReadableStore
from bootseer.base.progress import ProgressBar
from bootseer.blob import index
from bootseer.blob.keys import blob_key, index_key
from bootseer.blob.tree import Tree
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnknownFormatError,
    from_oserror,
)
from bootseer.fanout.whole_reads import decline_whole, read_whole
from bootseer.settings.config import Settings
from bootseer.snapshots.manifest import (
    INDEX_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    Key,
    Manifest,
    Stored,
    StoredIndex,
    Target,
    decode,
    encode,
    is_name,
)
from bootseer.snapshots.scan import STAGING_PREFIX, text_of
from bootseer.store import Store
from bootseer.store.objects.records import ONE_DOCUMENT, Links, ObjectFormat, RecordEntry
from bootseer.store.objects.uses import note_use
from bootseer.transfer.ranges import Chunk, digests_of, even_chunks

logger = logging.getLogger(__name__)
FOLDER = "snapshots/"
_NAMES = "snapshots/names/"
_MANIFEST_KEY = re.compile(r"snapshots/([0-9a-f]{64})\.json")
_HEX = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{4,64}")
_THREADS_MAX = 16
_PIECE_BYTES = 1024 * 1024


class _Name(Struct, frozen=True):
    fingerprint: Key


_NAME_FORM: DocumentFormat[_Name] = DocumentFormat(
    type=_Name, what="a name of a snapshot (give it anew)", version=1, size_max=4096
)


def manifest_key(fingerprint: str) -> str:
    """Return the store key of a snapshot's manifest."""
    return f"{FOLDER}{fingerprint}.json"


def lease_key(fingerprint: str) -> str:
    """Return the store key of the lease of the node that makes a snapshot."""
    return f"leases/snapshots/{fingerprint}"


def load(store: ReadableStore, fingerprint: str) -> Manifest | None:
    """Return the snapshot with exactly this key, or None.

    Raises: CorruptError, UnknownFormatError, UnavailableError, DeadlineError.
    """
    key = manifest_key(fingerprint)
    try:
        data = store.read(key, 0, MANIFEST_BYTES_MAX + 1)
    except NotFoundError:
        return None
    return decode(data, fingerprint)


def exists(store: Store, fingerprint: str) -> bool:
    """Return whether the snapshot is in the store, without reading it."""
    return store.exists(manifest_key(fingerprint))


def find(store: Store, text: str, documents: ReadableStore | None = None) -> Manifest:
    """Return the snapshot with this key, beginning of a key (4 digits or more) or name.

    `documents` are read in place of those of the store, such as a `StartDocuments`.

    Raises: NotFoundError; InvalidInputError if several keys begin with `text`.
    """
    manifest = load(documents or store, fingerprint_of(store, text, documents))
    if manifest is None:
        raise _no_snapshot(store, text)
    return manifest


def _no_snapshot(store: Store, text: str) -> NotFoundError:
    return NotFoundError(f"there is no snapshot {text} in {store.url}; see `snapshot list`")


def fingerprint_of(store: Store, text: str, documents: ReadableStore | None = None) -> str:
    """Return the key of the snapshot that `find` returns. Raises: as `find`."""
    key = text
    if is_name(text):
        named = _read_name(documents or store, text)
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
    """Yield the keys of all snapshots, readable or not, that begin with `prefix`, sorted."""
    for info in store.list(FOLDER + prefix):
        if match := _MANIFEST_KEY.fullmatch(info.path):
            yield match[1]


def list_all(store: Store) -> Iterator[Manifest]:
    """Yield the snapshots that can be read, newest first; damaged ones are logged and left out."""
    return _read_all(store, fingerprints(store))


def list_newest(store: Store, count: int, *, within_s: float | None = None) -> Iterator[Manifest]:
    """Return the `count` most recently published snapshots, as `list_all` does.

    Snapshots that were not requested within `within_s` seconds are left out.
    """
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


def _read_name(store: ReadableStore, name: str) -> str | None:
    try:
        return read_pointer(store, f"{_NAMES}{name}.json")
    except NotFoundError:
        return None


def read_pointer(store: ReadableStore, key: str) -> str:
    """Return the key of the snapshot that has the name stored at `key`.

    Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError.
    """
    return _NAME_FORM.read(store, key).fingerprint


def stored_index(encoded: bytes) -> StoredIndex:
    """Return the manifest's entry for an encoded tree."""
    return StoredIndex(index.digest(encoded), len(encoded), digests_of(encoded))


def store_target(
    store: Store,
    path: bytes,
    tree: Tree,
    file: BinaryIO,
    *,
    whole: bool,
    deletions: tuple[bytes, ...] = (),
    replace: bool = False,
) -> Target:
    """Store a target's blob, which `file` holds, and its encoded tree; return its manifest entry.

    Objects that exist are not sent again, unless `replace`: then a reader found them damaged.
    """
    file.flush()
    encoded = index.encode(tree)
    blob, *earlier = (Stored(one.digest, one.size_bytes) for one in tree.blobs)
    target = Target(
        path=path,
        whole=whole,
        blob=blob,
        index=stored_index(encoded),
        deletions=deletions,
        file_count=tree.name_count,
        content_bytes=sum(
            size_bytes
            for size_bytes, mode in zip(tree.columns.size_bytes, tree.columns.mode, strict=True)
            if stat.S_ISREG(mode)
        ),
        earlier=tuple(earlier),
    )
    for key, size_bytes, content in (
        (blob_key(blob.digest), blob.size_bytes, Path(f"/proc/self/fd/{file.fileno()}")),
        (index_key(target.index.digest), target.index.size_bytes, encoded),
    ):
        with ProgressBar("storing", size_bytes) as progress:
            pieces = _Pieces(content, progress) if isinstance(content, Path) else content
            # A cut-off object under the right name must not make every later restore fail.
            if not store.publish(key, pieces, replace=replace) and _has_other_size(
                store, key, size_bytes
            ):
                store.publish(key, pieces, replace=True)
    return target


def _has_other_size(store: Store, key: str, size_bytes: int) -> bool:
    try:
        return store.size(key) != size_bytes
    except NotFoundError:
        return True


class _Pieces:
    """Content of a file in pieces, with a progress bar; may be iterated several times."""

    def __init__(self, path: Path, progress: ProgressBar) -> None:
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

    Return False if another node published this key first; its snapshot stays. Raises: BusyError if
    a garbage collector deleted an object of the snapshot meanwhile; it is not visible then.
    """
    key = manifest_key(manifest.fingerprint)
    is_ours = store.publish(key, encode(manifest), replace=replace)
    # Objects that existed were not sent again. A collector reads the manifests right before it
    # deletes, and we look for the objects after publishing, so one of both notices.
    for target in manifest.targets:
        blobs = (blob_key(blob.digest) for blob in target.blobs)
        for needed in (*blobs, index_key(target.index.digest)):
            if is_ours and not store.exists(needed):
                store.delete(key)
                raise BusyError(f"{needed} was deleted while it was needed; run it again")
    if manifest.name:
        _warn_if_taken(store, manifest)
        named = _NAME_FORM.encode(_Name(manifest.fingerprint))
        store.publish(f"{_NAMES}{manifest.name}.json", named, replace=True)
    return is_ours


def _warn_if_taken(store: Store, manifest: Manifest) -> None:
    """Warn if the name of `manifest` is that of another snapshot until now."""
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
    """Note for garbage collectors that the snapshot is in use now. Never raises."""
    for target in manifest.targets:
        note_use(store, target.index.digest, [blob.digest for blob in target.blobs])


def find_cut_blob(store: Store, target: Target) -> Stored | None:
    """Return the first blob of a target whose stored size is wrong, or None.

    Raises: NotFoundError if a blob is missing; UnavailableError.
    """
    for blob in target.blobs:
        if store.size(blob_key(blob.digest)) != blob.size_bytes:
            return blob
    return None


def load_tree(store: Store, target: Target) -> Tree:
    """Return a target's tree for reading; `admit_tree` returns the tree that a restore may use.

    Raises: as `read_encoded_tree`.
    """
    return _decode_tree(target, read_encoded_tree(store, target))


def read_encoded_tree(store: Store, target: Target, start: Settings | None = None) -> bytes:
    """Return a target's encoded tree, verified against its digest.

    `start`: settings of a start whose nodes may feed each other.
    Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError.
    """
    stored = target.index
    if stored.size_bytes > INDEX_BYTES_MAX:
        raise CorruptError(f"the index {stored.digest} is too large")
    if start is not None:
        shared = read_whole(start, _index_chunks(target))
        if shared is not None and index.digest(shared) == stored.digest:
            return shared
    data = store.read(index_key(stored.digest), 0, stored.size_bytes + 1)
    if len(data) != stored.size_bytes or index.digest(data) != stored.digest:
        raise CorruptError(f"the index {stored.digest} in {store.url} does not match its digest")
    return data


def decline_index(start: Settings, target: Target) -> None:
    """Tell the other nodes of the start that this one has the target's encoded tree."""
    decline_whole(start, _index_chunks(target))


def _index_chunks(target: Target) -> tuple[Chunk, ...]:
    stored = target.index
    return even_chunks(index_key(stored.digest), stored.size_bytes, stored.chunks)


def _decode_tree(target: Target, data: bytes) -> Tree:
    """Return the tree in `data`, checked against the blobs that the manifest names."""
    tree = index.decode(data, is_verified=True)
    blobs = [(blob.digest, blob.size_bytes) for blob in tree.blobs]
    if blobs != [(blob.digest, blob.size_bytes) for blob in target.blobs]:
        raise CorruptError(f"the index {target.index.digest} belongs to other blobs")
    return tree


_CAPABILITY = b"security.capability"
_SET_ID = stat.S_ISUID | stat.S_ISGID


def admit_tree(target: Target, data: bytes, *, privileges: bool) -> Tree:
    """Return a target's tree as a restore may use it. `data` is from `read_encoded_tree`.

    Unless `privileges`, files lose set-user-ID and set-group-ID bits and capabilities, with a
    warning. The set-group-ID bit of a directory is no privilege: it decides the group of new files.

    Raises: CorruptError for other blobs than the manifest's, and for names that restores use;
    PermissionDeniedError for a device node.
    """
    tree = _decode_tree(target, data)
    where = text_of(target.path)
    if any(name.name.startswith(STAGING_PREFIX) for name in tree.children(0)):
        raise CorruptError(f"the snapshot of {where} holds a reserved name")
    # Thousands of inodes have few different modes.
    modes = set(tree.columns.mode)
    kinds = {stat.S_IFMT(mode) for mode in modes}
    if kinds & {stat.S_IFCHR, stat.S_IFBLK}:
        raise PermissionDeniedError(f"the snapshot of {where} holds a device node: not restored")
    if not privileges and (inodes := _privileged(tree, modes)):
        logger.warning(
            "%d files of the snapshot of %s lose set-user-ID and set-group-ID bits or "
            "capabilities; BOOTSEER_RESTORE_PRIVILEGES=on restores them, too",
            len(inodes),
            where,
        )
        _remove_privileges(tree)
    return tree


def privileged(tree: Tree) -> set[int]:
    """Return the inodes of files with a set-user-ID or set-group-ID bit or a capability."""
    return _privileged(tree, set(tree.columns.mode))


def _privileged(tree: Tree, modes: set[int]) -> set[int]:
    columns = tree.columns
    inodes: set[int] = set()
    if marked := {mode for mode in modes if stat.S_ISREG(mode) and mode & _SET_ID}:
        inodes.update(i for i, mode in enumerate(columns.mode) if mode in marked)
    sets = enumerate(columns.xattr_sets, 1)
    if capable := {i for i, pairs in sets if any(name == _CAPABILITY for name, _ in pairs)}:
        inodes.update(i for i, number in enumerate(columns.xattr) if number in capable)
    return inodes


def _remove_privileges(tree: Tree) -> None:
    columns = tree.columns
    columns.mode = array(
        "I", [mode & ~_SET_ID if stat.S_ISREG(mode) else mode for mode in columns.mode]
    )
    columns.xattr_sets = [
        tuple(pair for pair in pairs if pair[0] != _CAPABILITY) for pairs in columns.xattr_sets
    ]


_DAMAGE_ERRORS = (CorruptError, NotFoundError, UnknownFormatError)


class Verdict(Struct, frozen=True):
    """Result of a check of one snapshot."""

    fingerprint: str
    name: str
    problems: tuple[str, ...]
    """A sentence each; none: it is whole."""


class Verifier:
    """Checks snapshots one after the other."""

    def __init__(
        self,
        store: Store,
        *,
        quick: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Make a verifier, which compares all parts of a snapshot with their digests.

        Args:
            quick: Only check that everything exists and has the right size.
            on_progress: Gets counts of bytes read of blobs.
        """
        self._store = store
        self._quick = quick
        self._on_progress = on_progress
        self._problems: dict[str, str] = {}
        """Problem of an index or its blobs, by digest of the index; "" without one."""

    def check(self, fingerprint: str) -> Verdict:
        """Look at one snapshot: manifest, trees, and every byte of its blobs.

        Raises: UnavailableError, DeadlineError; damage is no error but a verdict.
        """
        try:
            manifest = load(self._store, fingerprint)
        except _DAMAGE_ERRORS as error:
            return Verdict(fingerprint, "", (f"its manifest cannot be read: {error}",))
        if manifest is None:
            return Verdict(fingerprint, "", ("it is gone",))
        problems = tuple(problem for target in manifest.targets if (problem := self._check(target)))
        return Verdict(fingerprint, manifest.name, problems)

    def _check(self, target: Target) -> str:
        digest = target.index.digest
        if digest not in self._problems:
            try:
                for blob in target.blobs:
                    self._check_stored(blob_key(blob.digest), blob)
                self._check_stored(index_key(target.index.digest), target.index)
                if not self._quick:
                    self._read(target)
                self._problems[digest] = ""
            except _DAMAGE_ERRORS as error:
                self._problems[digest] = str(error)
        problem = self._problems[digest]
        return f"{text_of(target.path)}: {problem}" if problem else ""

    def _check_stored(self, key: str, stored: Stored) -> None:
        try:
            size_bytes = self._store.size(key)
        except NotFoundError:
            raise NotFoundError(f"{key} is missing") from None
        if size_bytes != stored.size_bytes:
            raise CorruptError(f"{key} has {size_bytes} bytes instead of {stored.size_bytes}")

    def _read(self, target: Target) -> None:
        from bootseer.blob.read import verify  # here: no restore reads whole blobs

        tree = load_tree(self._store, target)
        keys = [blob_key(blob.digest) for blob in tree.blobs]
        verify(
            tree,
            lambda blob, offset, length: self._store.read(keys[blob], offset, length),
            self._on_progress,
        )


def _links_of_name(store: Store, key: str) -> Links:
    named = manifest_key(read_pointer(store, key))
    return Links(hangs_on=(named,), label=key[len(_NAMES) :].removesuffix(".json"))


def _links_of_manifest(store: Store, key: str) -> Links:
    manifest = load(store, key[len(FOLDER) :].removesuffix(".json"))
    if manifest is None:
        raise NotFoundError(key)
    command = next((part.value for part in manifest.parts if part.name == "command"), "")
    paths = tuple(target.path for target in manifest.targets)
    return Links(
        # Blobs of earlier snapshots as well, whether these stay or go.
        tuple(
            key
            for target in manifest.targets
            for key in (
                index_key(target.index.digest),
                *(blob_key(blob.digest) for blob in target.blobs),
            )
        ),
        entry=RecordEntry(
            "snapshot",
            manifest.fingerprint,
            manifest.created_ns,
            group=repr((command, sorted(paths))),
            targets=paths,
            trees=tuple(target.index.digest for target in manifest.targets),
            is_cache=bool(manifest.cache),
            is_remade=True,
        ),
    )


FORMATS = (
    ObjectFormat(_NAMES, _links_of_name, pattern=ONE_DOCUMENT),
    ObjectFormat(FOLDER, _links_of_manifest, pattern=ONE_DOCUMENT),
)
"""Formats of snapshots, for garbage collectors."""
