"""What a new snapshot need not store, since an earlier one's blobs hold it: only a difference.

The set-up has run as always, and its result is captured exactly: every name and attribute is in the
new snapshot's own tree. But of a file whose content an earlier snapshot of the same directory has,
the tree names the place in that one's blob, as an image's tree names places in its layers. So there
is no chain to follow and nothing to undo; what a snapshot needs is what its manifest lists.

`choose_blobs` decides, and is pure. `find_base` reads the store, `find_others` also the files.
"""

import logging
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from bootseer.blob.frame_writer import usable_cpus
from bootseer.blob.keys import blob_key
from bootseer.blob.pack import Elsewhere, Others
from bootseer.blob.tree import Tree
from bootseer.content_digest import ContentHasher
from bootseer.errors import BootseerError
from bootseer.snapshots import catalogue
from bootseer.snapshots.explain import nearest
from bootseer.snapshots.manifest import EARLIER_MAX, Manifest, Target
from bootseer.snapshots.scan import Scan
from bootseer.snapshots.setup.fingerprint import Part
from bootseer.store import Store

logger = logging.getLogger(__name__)

# Of the newest: after a set-up that took minutes, looking should take a second.
_COMPARED_MAX = 100
# What must be the same for two environments to have much in common.
_KIND = ("interpreter", "platform", "machine", "libc", "kind")
_READ_BYTES = 1 << 20
_THREADS_MAX = 4

Same = Mapping[bytes, int]
"""Path -> the number of an inode in the base's tree that has the same content."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When it pays to store a difference only."""

    shared_bytes_min: int = 1 << 20
    """Below, a restore would make more requests for nothing."""
    shared_ratio_min: float = 0.5
    """Of all content. Below, the environment is another one, and its own blob serves it better."""
    used_ratio_min: float = 0.25
    """Of what a blob holds. Below, it would be kept in the store for little; what is still needed
    of it is stored again, which also ends chains of small differences."""
    blobs_max: int = EARLIER_MAX


RULE = Rule()


def choose_blobs(
    base: Tree, found: Iterable[int], whole_bytes: int, rule: Rule = RULE
) -> frozenset[int]:
    """The base's blobs, by number, that the new snapshot should take content from; none: it should
    be stored whole. Pure.

    `found`: the inodes of the base with content that a new file has, one for each such file;
    `whole_bytes`: of all new files.
    """
    uses = [base.extents(number) for number in found]
    kept = frozenset(range(len(base.blobs)))
    while True:
        used: defaultdict[int, int] = defaultdict(int)
        for extents in uses:
            if all(blob in kept for _, blob, _, _ in extents):
                for _, blob, _, length in extents:
                    used[blob] += length
        worth = [
            blob
            for blob, count in used.items()
            if count >= rule.used_ratio_min * base.blobs[blob].stream_length
        ]
        most = sorted(worth, key=lambda blob: (-used[blob], blob))[: rule.blobs_max]
        if kept == frozenset(most):
            break
        kept = frozenset(most)
    shared_bytes = sum(used[blob] for blob in kept)
    is_worth_it = shared_bytes >= max(1, rule.shared_bytes_min, rule.shared_ratio_min * whole_bytes)
    return kept if is_worth_it else frozenset()


def may_share(parts: Sequence[Part], paths: Iterable[bytes], manifest: Manifest) -> bool:
    """Whether a snapshot is of the same directories on the same kind of machine. Pure."""
    then = {part.name: part.value for part in manifest.parts}
    now = {part.name: part.value for part in parts}
    return {target.path for target in manifest.targets} >= set(paths) and all(
        then.get(name) == now.get(name) for name in _KIND
    )


def find_base(store: Store, parts: Sequence[Part], paths: Sequence[bytes]) -> Manifest | None:
    """The earlier snapshot that has most in common, as far as can be told from what the two were
    made from. Never raises: without one the new snapshot is stored whole."""
    try:
        newest = catalogue.list_newest(store, _COMPARED_MAX)
        return nearest(parts, (one for one in newest if may_share(parts, paths, one)))
    except (BootseerError, OSError) as error:
        logger.info("no earlier snapshot is looked at: %s", error)
        return None


def find_others(
    store: Store, target: Target, host: Path, scanned: Scan, paths: Iterable[bytes], rule: Rule
) -> Others:
    """What of the files at `paths` below `host`, as `scanned`, is in the blobs of `target`, an
    earlier snapshot's, where it pays. Never raises: what cannot be told is stored anew."""
    try:
        base = catalogue.load_tree(store, target)
        for blob in target.blobs:
            # Better than to find out on a thousand nodes.
            if store.size(blob_key(blob.digest)) != blob.size_bytes:
                return Others()
        files = [path for path in paths if stat.S_ISREG(scanned[path].mode)]
        same, statuses = _find_same(base, host, scanned, files)
        first = {(scanned[path].device, scanned[path].inode): path for path in files}
        whole_bytes = sum(scanned[path].size_bytes for path in first.values())
        found = [same[path] for path in first.values() if path in same]
        chosen = sorted(choose_blobs(base, found, whole_bytes, rule))
        return _others(base, chosen, same, statuses)
    except (BootseerError, OSError) as error:
        logger.info("nothing of the snapshot of %s is used: %s", host, error)
        return Others()


def _find_same(
    base: Tree, host: Path, scanned: Scan, files: Sequence[bytes]
) -> tuple[dict[bytes, int], dict[bytes, os.stat_result]]:
    """Which files have content that is in the base, and what they were when they were read."""
    known: dict[bytes, int] = {}
    sizes = set()
    for number in range(base.inode_count):
        inode = base.inode(number)
        # Of files with holes a restored one should have the same.
        if inode.digest and sum(one.length for one in inode.extents) == inode.size_bytes > 0:
            known.setdefault(inode.digest, number)
            sizes.add(inode.size_bytes)
    candidates = [path for path in files if scanned[path].size_bytes in sizes]
    same, statuses = {}, {}
    top = os.fsencode(host)
    with ThreadPoolExecutor(min(usable_cpus(), _THREADS_MAX)) as pool:
        hashed = pool.map(lambda path: _hash(os.path.join(top, path)), candidates)
        for path, (digest, status) in zip(candidates, hashed, strict=True):
            if status is not None and digest in known:
                same[path], statuses[path] = known[digest], status
    return same, statuses


def _hash(path: bytes) -> tuple[bytes, os.stat_result | None]:
    """A file's content digest and attributes, or None where it cannot be read as a file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b"", None  # the packer says so, or has an explanation
    try:
        status = os.fstat(fd)
        hasher = ContentHasher()
        while data := os.read(fd, _READ_BYTES):
            hasher.update(data)
        return hasher.digest(), status
    except OSError:
        return b"", None
    finally:
        os.close(fd)


def _others(
    base: Tree,
    chosen: Sequence[int],
    same: Same,
    statuses: Mapping[bytes, os.stat_result],
) -> Others:
    # Number 0 is the new blob.
    numbers = {blob: 1 + i for i, blob in enumerate(chosen)}
    files = {}
    for path, inode_number in same.items():
        inode = base.inode(inode_number)
        if inode.digest and all(extent.blob in numbers for extent in inode.extents):
            extents = tuple(replace(extent, blob=numbers[extent.blob]) for extent in inode.extents)
            files[path] = Elsewhere(extents, inode.digest, statuses[path])
    return Others([base.blobs[blob] for blob in chosen], files) if files else Others()
