"""Packs what a set-up did, and publishes it.

Alone owns the way from a diff to blobs in the store. Nothing is visible before the manifest, which
comes last; what an interrupted capture leaves is unnamed temporary files, gone with the process,
and blobs that no manifest names.
"""

import logging
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from msgspec import Struct, field

import bootseer
from bootseer.base.progress import Progress
from bootseer.base.redact import redact
from bootseer.blob.index import codec as index
from bootseer.blob.pack.packing import Others, pack_directory
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, from_oserror
from bootseer.linux.private_files import private_directory
from bootseer.snapshots.capture.diff import diff
from bootseer.snapshots.capture.layering import RULE, Rule, find_others
from bootseer.snapshots.catalogue.admission import privileged
from bootseer.snapshots.catalogue.catalogue import publish, publish_target
from bootseer.snapshots.catalogue.manifest import (
    NOTHING_OUTSIDE,
    OUTSIDE_PATHS_MAX,
    Manifest,
    Outside,
    Stored,
    Target,
)
from bootseer.snapshots.setup.fingerprint import Part, fingerprint
from bootseer.snapshots.targets.paths import text_of
from bootseer.snapshots.targets.scan import Scan
from bootseer.store import Store

logger = logging.getLogger(__name__)


class Change(Struct, frozen=True):
    """A target before and after the set-up."""

    path: bytes
    """Absolute, as the job sees it."""
    host: Path
    before: Scan
    after: Scan
    identities: Mapping[bytes, tuple[int, int]] = field(default_factory=dict)
    """See `pack_directory`."""


def capture(
    store: Store,
    cache_dir: Path,
    change: Change,
    *,
    base: Target | None = None,
    rule: Rule = RULE,
    replace: bool = False,
) -> Target:
    """Pack one target's difference into the store. Not visible as a snapshot yet.

    `base`: an earlier snapshot of the same directory; what its blobs have is not stored again,
    where that pays by `rule`. Raises: BusyError where something still writes to the target;
    NoSpaceError; UnavailableError.
    """
    difference = diff(change.before, change.after)
    paths = [path for path in difference.packed_paths() if not is_device(change, path)]
    others = Others()
    if base is not None:
        others = find_others(store, base, change.host, change.after, paths, rule)
    try:
        folder = private_directory(cache_dir / "snapshots")
        # Without a name: it goes with the process, however that ends.
        with tempfile.TemporaryFile(dir=folder) as file:
            tree, blob = _pack(change, paths, cast(BinaryIO, file), others)
            if inodes := privileged(tree):
                logger.warning(
                    "%d files in %s have set-user-ID or set-group-ID bits or capabilities: nodes "
                    "restore these with BOOTSEER_RESTORE_PRIVILEGES=on only",
                    len(inodes),
                    text_of(change.path),
                )
            encoded = index.encode(tree)
            stored = Stored(index.digest(encoded), len(encoded))
            data = Path(f"/proc/self/fd/{file.fileno()}")
            publish_target(store, blob, data, stored, encoded, replace=replace)
    except BootseerError:
        raise
    except OSError as error:
        what = f"capture {text_of(change.path)} by way of {cache_dir / 'snapshots'}"
        raise from_oserror(error, what) from error
    whole = len(change.before) <= 1
    return make_target(change.path, tree, blob, stored, whole=whole, deletions=difference.deleted)


def make_target(
    path: bytes,
    tree: Tree,
    blob: Stored,
    stored: Stored,
    *,
    whole: bool,
    deletions: tuple[bytes, ...],
) -> Target:
    """What a manifest says of a tree that is in the store as `blob` and, encoded, as `stored`."""
    return Target(
        path=path,
        whole=whole,
        blob=blob,
        index=stored,
        deletions=deletions,
        file_count=tree.name_count,
        content_bytes=sum(
            tree.columns.size_bytes[number]
            for number in range(tree.inode_count)
            if stat.S_ISREG(tree.columns.mode[number])
        ),
        earlier=tuple(Stored(one.digest, one.size_bytes) for one in tree.blobs[1:]),
    )


def is_device(change: Change, path: bytes) -> bool:
    """Extractions refuse devices: one of them would make the whole snapshot useless."""
    mode = change.after[path].mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        logger.warning("the device node %s is left out", text_of(change.path + b"/" + path))
        return True
    return False


def _pack(
    change: Change, paths: Sequence[bytes], file: BinaryIO, others: Others
) -> tuple[Tree, Stored]:
    total = sum(
        change.after[path].size_bytes
        for path in paths
        if stat.S_ISREG(change.after[path].mode) and path not in others.files
    )
    with Progress(f"packing {text_of(change.path)}", total) as progress:
        tree = pack_directory(
            change.host,
            file,
            paths=paths,
            others=others,
            identities=change.identities,
            on_progress=progress.advance,
        )
    file.flush()
    blob = tree.blobs[0]
    return tree, Stored(blob.digest, blob.size_bytes)


def make_manifest(
    parts: Sequence[Part],
    targets: Sequence[Target],
    *,
    setup_ns: int,
    node: str,
    name: str = "",
    outside: Outside = NOTHING_OUTSIDE,
) -> Manifest:
    """The manifest of captured targets."""
    shown = tuple(redact(path) for path in outside.paths[:OUTSIDE_PATHS_MAX])
    return Manifest(
        fingerprint=fingerprint(parts),
        parts=tuple(sorted(parts)),
        targets=tuple(targets),
        created_ns=time.time_ns(),
        setup_ns=setup_ns,
        node=node,
        name=name,
        version=bootseer.__version__,
        outside=Outside(
            paths=shown, is_complete=outside.is_complete, path_count=len(outside.paths)
        ),
    )


def create(
    store: Store, cache_dir: Path, changes: Sequence[Change], *, node: str, name: str = ""
) -> Manifest:
    """Capture existing directories as they are, and publish them; keyed by what they hold."""
    targets = [capture(store, cache_dir, change) for change in changes]
    parts = [Part("kind", "created from directories")]
    for target in targets:
        shown = text_of(target.path)
        parts.append(Part(f"target {shown}", target.index.digest))
    manifest = make_manifest(parts, targets, setup_ns=0, node=node, name=name)
    publish(store, manifest)
    return manifest
