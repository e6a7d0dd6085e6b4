"""Restoring of the newest generation of a cache into its folder, before the command begins.

The files are extracted, not mounted: the job writes more files beside them, they are many and
small, and a library is mapped as a whole (docs/decisions). Files that the folder has already stay,
unit by unit; new ones appear only after all of them were fetched and their digests compared. One
thread; the processes of a node take turns.
"""

import contextlib
import os
import shutil
import stat
from pathlib import Path

from msgspec.structs import replace

from bootseer.base.documents import ReadableStore
from bootseer.blob.build import build_tree
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError, NoSpaceError, from_oserror
from bootseer.fanout.whole_reads import StartDocuments
from bootseer.launch.caches.finding import Cache
from bootseer.launch.caches.records import (
    IN_PLACE,
    MISS,
    RESTORED,
    CacheRecord,
    RestoreResult,
    read_record,
)
from bootseer.launch.caches.units import by_unit
from bootseer.linux.private_files import make_directory
from bootseer.linux.removal import remove_tree
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.catalogue import admit_tree
from bootseer.snapshots.fetch import fetch_tree
from bootseer.snapshots.manifest import Manifest, Target
from bootseer.snapshots.scan import STAGING_PREFIX, scan
from bootseer.snapshots.staging import move_into
from bootseer.snapshots.targets import locked
from bootseer.store import Store

_STAGING = os.fsdecode(STAGING_PREFIX) + "cache"
_LOCK_S = 60.0


def generation(store: ReadableStore, key: str) -> tuple[Manifest, Target] | None:
    """Return the newest generation of a cache; None if there is none.

    Raises: CorruptError, UnavailableError, DeadlineError.
    """
    manifest = catalogue.load(store, key)
    if manifest is None:
        return None
    if not manifest.cache or len(manifest.targets) != 1 or not manifest.targets[0].whole:
        raise CorruptError(f"the snapshot {key[:12]} is not a generation of a cache")
    return manifest, manifest.targets[0]


def restore(settings: Settings, store: Store, cache: Cache) -> RestoreResult:
    """Bring the cache's folder up to its newest generation; make the folder if it is missing.

    Raises: CorruptError if content does not match its digest; NotFoundError, NoSpaceError,
    UnavailableError, DeadlineError, BusyError. On an error the folder is as it was.
    """
    _make_folder(cache)
    documents = StartDocuments(settings, store)
    found = generation(documents, cache.key)
    if found is None:
        return RestoreResult(MISS, "the store has no generation with this key")
    manifest, target = found
    known = read_record(settings.cache_dir, cache.key) or CacheRecord(
        key=cache.key, name="", folder=""
    )
    if documents.reads_store:
        catalogue.note_used(store, manifest)
    if known.index == target.index.digest and any(cache.folder.iterdir()):
        catalogue.decline_index(settings, target)
        return RestoreResult(IN_PLACE, "this node has the newest generation", index=known.index)
    moved_bytes, count = extract_missing(settings, store, cache.folder, target)
    if not count:
        return RestoreResult(IN_PLACE, "this node has all files of it", index=target.index.digest)
    return RestoreResult(
        RESTORED,
        "files are small, and more are written beside them",
        moved_bytes,
        count,
        target.index.digest,
    )


def _make_folder(cache: Cache) -> None:
    try:
        make_directory(cache.folder)
    except OSError as error:
        raise from_oserror(error, f"make the folder {cache.folder}") from error


def extract_missing(
    settings: Settings, store: Store, folder: Path, target: Target
) -> tuple[int, int]:
    """Extract the files that `folder` lacks. Return (bytes moved, files). Raises: as `restore`."""
    data = catalogue.read_encoded_tree(store, target, settings)
    tree = admit_tree(target, data, privileges=False)
    with locked(settings.run_dir, [folder], deadline_s=min(_LOCK_S, settings.deadline_s)):
        here = by_unit(path for path, entry in scan(folder).items() if not stat.S_ISDIR(entry.mode))
        paths = tree_files(tree)
        missing = {path for unit, ps in by_unit(paths).items() if unit not in here for path in ps}
        if not missing:
            return 0, 0
        staging = folder / _STAGING
        try:
            # A killed process may have left it; the lock says that nobody else uses it.
            remove_tree(staging)
            _check_room(folder, sum(paths[path] for path in missing))
            part = tree if len(missing) == len(paths) else part_of(tree, missing)
            # A part of a generation is not fetched by fan-out: only some nodes lack it.
            start = settings if part is tree else None
            fetched = fetch_tree(store, target, part, staging, settings.deadline_s, start=start)
            _move(staging, folder)
        except OSError as error:
            raise from_oserror(error, f"restore the cache in {folder}") from error
        finally:
            with contextlib.suppress(OSError):
                remove_tree(staging)
    return fetched.moved_bytes, len(missing)


def tree_files(tree: Tree) -> dict[bytes, int]:
    """Return the size of each entry of a tree that is not a directory, by path."""
    return {
        path: tree.columns.size_bytes[number]
        for path, number in tree.walk()
        if not stat.S_ISDIR(tree.mode(number))
    }


def part_of(tree: Tree, paths: set[bytes]) -> Tree:
    """Return the tree reduced to `paths` and the directories above them. Pure.

    Blobs without content in the smaller tree are left out.
    """
    names = set(paths)
    for path in paths:
        while path := path.rpartition(b"/")[0]:
            names.add(path)
    found = [(path, number) for path, number in tree.walk() if path in names]
    numbers = {0: 0}
    for _, number in found:
        numbers.setdefault(number, len(numbers))
    inodes = [tree.inode(number) for number in numbers]
    # A tree needs one blob, even if all its files are empty.
    used = sorted({extent.blob for inode in inodes for extent in inode.extents} or {0})
    blobs = {blob: position for position, blob in enumerate(used)}
    inodes = [
        replace(
            inode,
            extents=tuple(replace(one, blob=blobs[one.blob]) for one in inode.extents),
        )
        for inode in inodes
    ]
    pairs = [(path, numbers[number]) for path, number in found]
    return build_tree(pairs, inodes, [tree.blobs[blob] for blob in used])


def _check_room(folder: Path, content_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    # Leave as much again for the job.
    if free < 2 * content_bytes:
        raise NoSpaceError(f"{folder} has no room for a cache of {content_bytes} bytes")


def _move(staging: Path, folder: Path) -> None:
    source = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            move_into(source, place)
        finally:
            os.close(place)
    finally:
        os.close(source)
