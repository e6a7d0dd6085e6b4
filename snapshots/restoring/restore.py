"""Puts a snapshot's targets in place: fetched, verified, staged beside them, then moved.

Until every target is staged and verified nothing that a job could see has changed. The caller
holds the locks of the targets and has called `staging.recover`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.blob.keys import blob_key
from bootseer.blob.pack.stat_record import Records
from bootseer.blob.tree import Tree
from bootseer.errors import (
    AlreadyExistsError,
    InvalidInputError,
)
from bootseer.linux import mount_table
from bootseer.linux.root_paths import resolve_in_root
from bootseer.snapshots.catalogue.admission import admit_tree
from bootseer.snapshots.catalogue.catalogue import load_encoded_tree, load_tree
from bootseer.snapshots.catalogue.manifest import Manifest, Target
from bootseer.snapshots.restoring import staging as staging_folders
from bootseer.snapshots.setup.fingerprint import base_part_name
from bootseer.snapshots.targets.paths import text_of
from bootseer.snapshots.targets.scan import NOTHING, Scan, base_digest
from bootseer.store import Store
from bootseer.store.backend import HasDescriptor
from bootseer.transfer.attempt import Attempt

# Names whose directory knows its own path: such a tree stagings nowhere else.
_BOUND_NAMES = (b"pyvenv.cfg", b"conda-meta", b"site-packages", b"dist-packages")


Fill = Callable[[Target, Tree, Path], str]
"""Makes a target's tree at a path that does not exist, whole or not at all. Returns its
`tree_fingerprint.fingerprint_of_restored`, or nothing where it is not known."""
# File systems of one disk, whose device numbers files show; any other is taken for a remote one.
LOCAL_KINDS = frozenset({b"ext2", b"ext3", b"ext4", b"f2fs", b"ramfs", b"tmpfs", b"xfs"})


class Placed(Struct, frozen=True):
    """A target and where it lies on this host."""

    target: Target
    path: Path


def place(manifest: Manifest, root: Path) -> list[Placed]:
    """Where each target lies. Raises: InvalidInputError where two are one directory here."""
    placed = [Placed(target, resolve_in_root(root, target.path)) for target in manifest.targets]
    paths = [item.path for item in placed]
    for one in paths:
        if any(other != one and other.is_relative_to(one) for other in paths) or (
            paths.count(one) > 1
        ):
            raise InvalidInputError(f"two targets of this snapshot meet in {one} on this host")
    return placed


def check_base(manifest: Manifest, target: Target, scanned: Scan) -> None:
    """Whether a snapshot fits on what is there. Raises: AlreadyExistsError where it does not."""
    wanted = next(
        (part.value for part in manifest.parts if part.name == base_part_name(target.path)),
        NOTHING,
    )
    if target.whole:
        wanted = NOTHING
    if base_digest(scanned) != wanted:
        shown = text_of(target.path)
        raise AlreadyExistsError(
            f"{shown} is not empty; move it away first"
            if target.whole
            else f"{shown} is not as it was before the set-up; this snapshot does not fit on it"
        )


def restore(
    manifest: Manifest,
    placed: Sequence[Placed],
    bases: Mapping[bytes, str],
    store: Store,
    *,
    fill: Fill,
    on_finished: staging_folders.OnFinished,
    privileges: bool,
) -> None:
    """Put all targets of a snapshot in place, or change nothing.

    What is there (`bases`) has been found to fit (`check_base`). `fill` makes each target's tree,
    beside it. `privileges`: see `admit_tree`. `on_finished` is called for each target before a
    crash could no longer be recovered from. Raises: CorruptError, NotFoundError, UnavailableError,
    DeadlineError, NoSpaceError, PermissionDeniedError: nothing has changed, unless the message says
    that a restore could not be *finished*; the next run goes on with it.
    """
    stagings: list[staging_folders.Staging] = []
    fingerprints: list[str] = []
    try:
        for item in placed:
            tree, encoded = load_encoded_tree(store, item.target)
            admit_tree(item.target, tree, privileges=privileges)
            staging = staging_folders.make_staging(item.path)
            stagings.append(staging)
            fingerprints.append(fill(item.target, tree, staging.tree))
            staging_folders.write_plan(
                staging,
                stagings[0],
                fingerprint=manifest.fingerprint,
                base=bases[item.target.path],
                encoded_tree=encoded,
                deletions=item.target.deletions,
            )
        staging_folders.commit(stagings)
        staging_folders.complete(stagings, fingerprints, on_finished)
    except BaseException:
        if not staging_folders.is_committed(stagings):
            staging_folders.remove(stagings)
        raise


class Fetched(Struct, frozen=True):
    """What `fetch_tree` did."""

    moved_bytes: int
    """Bytes of blobs that came from the store."""
    records: Records


def fetch_tree(
    store: Store,
    target: Target,
    tree: Tree,
    directory: Path,
    deadline_s: float,
    *,
    recorded: bytes = b"",
) -> Fetched:
    """Extract a target's tree to `directory`, whole or not at all. `recorded`: see
    `blob.extract`. Raises: as `restore`."""
    # Here: a mount, which should be there at once, needs none of it.
    from bootseer.base.progress import Progress
    from bootseer.blob.extract.extraction import extract
    from bootseer.snapshots.restoring.fetch import FrameSource, plan_frames

    label = f"restoring {text_of(target.path)}"
    local = find_local_blobs(store, tree)
    if local is not None:
        with Progress(label, sum(tree.columns.extent_length)) as progress:
            result = extract(
                tree,
                local.read,
                directory,
                files=local.files,
                recorded=recorded,
                on_progress=progress.advance,
            )
        if len(tree.blobs) == 1:
            return Fetched(tree.blobs[0].size_bytes, result.records)
        return Fetched(plan_frames(tree).wanted_bytes, result.records)
    plan = plan_frames(tree)
    with (
        Progress(label, plan.wanted_bytes) as progress,
        FrameSource(store, plan, deadline_s=deadline_s, on_progress=progress.advance) as source,
    ):
        result = extract(tree, source.read, directory, is_verified=True, recorded=recorded)
    return Fetched(plan.wanted_bytes, result.records)


def check_relocatable(tree: Tree) -> None:
    """Whether a tree may be restored to another path. Raises: InvalidInputError."""
    names = tree.columns.names
    for bound in _BOUND_NAMES:
        if bound in names:
            raise InvalidInputError(
                f"this snapshot holds {bound.decode()}: it works only at the path where it was "
                "made; restore it without --to, or with --relocate"
            )


def one_directory(manifest: Manifest) -> Target:
    """The target of a snapshot of one whole directory. Raises: InvalidInputError."""
    if len(manifest.targets) != 1 or not manifest.targets[0].whole:
        raise InvalidInputError("--to needs a snapshot of one whole directory")
    return manifest.targets[0]


def restore_to(
    store: Store, manifest: Manifest, directory: Path, *, deadline_s: float, privileges: bool
) -> None:
    """A snapshot of one plain directory, at another path. Raises: InvalidInputError for more than
    one target, a difference, or a tree that knows its path; AlreadyExistsError."""
    target = one_directory(manifest)
    tree = load_tree(store, target)
    check_relocatable(tree)
    admit_tree(target, tree, privileges=privileges)
    fetch_tree(store, target, tree, Path(os.path.abspath(directory)), deadline_s)


class LocalBlobs:
    """Open files, one for each of a tree's blobs. Closed when it is dropped."""

    def __init__(self, readers: list[HasDescriptor]) -> None:
        self._readers = readers

    @property
    def files(self) -> list[int]:
        """Their descriptors."""
        return [reader.fileno() for reader in self._readers]

    def read(self, blob: int, offset: int, length: int) -> bytes:
        """Stored bytes of a blob; fewer at its end. Raises: UnavailableError."""
        buffer = bytearray(length)
        count = self._readers[blob].read_into(offset, memoryview(buffer), Attempt())
        return bytes(memoryview(buffer)[:count])


def find_local_blobs(store: Store, tree: Tree) -> LocalBlobs | None:
    """The tree's blobs, if all of them are files on disks or in the memory of this node, because
    the store is a folder there; else None, and the store is asked, in parallel and with deadlines.
    Raises: NotFoundError, UnavailableError."""
    readers: list[HasDescriptor] = []
    devices = {one.device for one in mount_table.mount_points() if one.kind in LOCAL_KINDS}
    for blob in tree.blobs:
        reader = store.backend.open_reader(blob_key(blob.digest))
        if not isinstance(reader, HasDescriptor):
            return None
        if os.fstat(reader.fileno()).st_dev not in devices:
            return None
        readers.append(reader)
    return LocalBlobs(readers)
