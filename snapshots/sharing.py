"""Sharing of content between snapshots: a new snapshot refers to blobs of earlier ones.

The new snapshot's own tree has every name and attribute. For a file whose content is in a blob of
an earlier snapshot of the same directory, the tree refers to that blob. There is no chain: a
manifest lists every blob that it needs.

`choose_blobs` decides what is shared and is pure; `find_reusable_files` reads the store and the
files.
"""

import logging
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from bootseer.base.content_digest import ContentHasher, content_digest
from bootseer.blob.pack.frame_writer import usable_cpus
from bootseer.blob.pack.packing import ReusedContent, ReusedFiles
from bootseer.blob.tree import Extent, Tree
from bootseer.errors import BootseerError
from bootseer.snapshots import catalogue
from bootseer.snapshots.diff import nearest
from bootseer.snapshots.key_parts import Part
from bootseer.snapshots.manifest import EARLIER_MAX, Manifest, Target
from bootseer.snapshots.scan import Entry, Scan
from bootseer.store import Store

logger = logging.getLogger(__name__)
# Bounds of the search among the newest snapshots, for which all nodes wait.
_COMPARED_MAX = 100
_COMPARING_S = 5.0
# Parts of the key that are equal for environments with much in common.
_KIND = ("interpreter", "platform", "machine", "libc", "kind")
_READ_BYTES = 1 << 20
_THREADS_MAX = 4
_BYTECODE_HEAD_BYTES = 16
"""Size of the head of a `.pyc` file (PEP 552)."""

Place = tuple[int, int, int, int]
"""Extent: file offset, blob, offset in the blob's stream, length."""


class Rule(Struct, frozen=True):
    """Conditions under which storing a difference pays."""

    shared_bytes_min: int = 1 << 20
    """Least number of shared bytes: below, a restore would need more requests for little."""
    shared_ratio_min: float = 0.5
    """Least share of all content that is shared: below, the environments differ too much."""
    used_ratio_min: float = 0.25
    """Least share of a blob that is used: below, the store would keep the blob for little, so the
    needed content is stored again. This also ends chains of small differences."""
    blobs_max: int = EARLIER_MAX


RULE = Rule()


def choose_blobs(
    base: Tree, found: Iterable[Sequence[Place]], whole_bytes: int, rule: Rule = RULE
) -> frozenset[int]:
    """Return the numbers of the base's blobs that the new snapshot should refer to.

    Empty if the snapshot should be stored as a whole. Pure.

    `found`: places of new files' content in the base's blobs, for the files for which they are
    known; `whole_bytes`: size of all new files.
    """
    uses = list(found)
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


def _may_share(parts: Sequence[Part], paths: Iterable[bytes], manifest: Manifest) -> bool:
    """Return whether a snapshot is of similar directories on the same kind of machine.

    The environment of one project often contains files of another's. Pure.
    """
    wanted, found = set(paths), {target.path for target in manifest.targets}
    then = {part.name: part.value for part in manifest.parts}
    now = {part.name: part.value for part in parts}
    return (found >= wanted or len(found) == len(wanted) == 1) and all(
        then.get(name) == now.get(name) for name in _KIND
    )


def earlier_snapshots(store: Store) -> list[Manifest]:
    """Return the newest snapshots that could be read in a few seconds, without kept caches.

    Never raises: without any, the new snapshot is stored as a whole.
    """
    try:
        newest = catalogue.list_newest(store, _COMPARED_MAX, within_s=_COMPARING_S)
        return [one for one in newest if not one.cache]
    except (BootseerError, OSError) as error:
        logger.info("no earlier snapshot is looked at: %s", error)
        return []


def find_base(
    earlier: Iterable[Manifest], parts: Sequence[Part], paths: Sequence[bytes]
) -> Manifest | None:
    """Return the earlier snapshot that has most in common, told by the parts of the keys. Pure."""
    return nearest(parts, (one for one in earlier if _may_share(parts, paths, one)))


def find_reusable_files(
    store: Store, target: Target, host: Path, scanned: Scan, paths: Iterable[bytes], rule: Rule
) -> ReusedFiles:
    """Return the files at `paths` below `host` whose content blobs of `target` hold, if that pays.

    `target` is of an earlier snapshot; `scanned` is a scan of `host`. Never raises: on an error
    files are stored anew.
    """
    try:
        base = catalogue.load_tree(store, target)
        # Checked here, before a thousand nodes restore.
        if catalogue.find_cut_blob(store, target):
            return ReusedFiles()
        files = [path for path in paths if stat.S_ISREG(scanned[path].mode)]
        same = _find_same(base, host, scanned, files)
        first = {(scanned[path].device, scanned[path].inode): path for path in files}
        whole_bytes = sum(_content_bytes(host, path, scanned[path]) for path in first.values())
        found = [same[path].places(base) for path in first.values() if path in same]
        chosen = sorted(choose_blobs(base, found, whole_bytes, rule))
        return _reused_files(base, chosen, same)
    except (BootseerError, OSError) as error:
        logger.info("nothing of the snapshot of %s is used: %s", host, error)
        return ReusedFiles()


def _content_bytes(host: Path, path: bytes, entry: Entry) -> int:
    """Return the size of a file, without the holes of a large file."""
    if entry.size_bytes < _READ_BYTES:
        return entry.size_bytes
    return min(entry.size_bytes, 512 * os.lstat(os.path.join(os.fsencode(host), path)).st_blocks)


class _Match(Struct, frozen=True):
    """Place of a file's content in the base."""

    number: int
    """Number of the inode in the base."""
    digest: bytes
    """Digest of the new file."""
    status: os.stat_result
    head: bytes = b""
    """First bytes of the new file, if those in the base differ."""

    def places(self, base: Tree) -> list[Place]:
        """Return the places of all bytes except the head."""
        return list(_behind(len(self.head), base.extents(self.number)))


def _find_same(
    base: Tree, host: Path, scanned: Scan, files: Sequence[bytes]
) -> dict[bytes, _Match]:
    """Return the files whose content is in the base."""
    known: dict[bytes, int] = {}
    sizes = set()
    for number in range(base.inode_count):
        inode = base.inode(number)
        # A file with holes is stored anew, so that the restored file has the same holes.
        if inode.digest and sum(one.length for one in inode.extents) == inode.size_bytes > 0:
            known.setdefault(inode.digest, number)
            sizes.add(inode.size_bytes)
    candidates = [path for path in files if scanned[path].size_bytes in sizes]
    top = os.fsencode(host)

    def find(path: bytes) -> _Match | None:
        return _match(base, known, path, os.path.join(top, path))

    with ThreadPoolExecutor(min(usable_cpus(), _THREADS_MAX)) as pool:
        found = zip(candidates, pool.map(find, candidates), strict=True)
        return {path: match for path, match in found if match is not None}


def _match(base: Tree, known: Mapping[bytes, int], path: bytes, host: bytes) -> _Match | None:
    try:
        fd = os.open(host, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None  # the packer says so, or has an explanation
    try:
        status = os.fstat(fd)
        hasher = ContentHasher()
        pieces = []
        while data := os.read(fd, _READ_BYTES):
            hasher.update(data)
            if path.endswith(b".pyc"):
                pieces.append(data)
    except OSError:
        return None
    finally:
        os.close(fd)
    digest = hasher.digest()
    if digest in known:
        return _Match(known[digest], digest, status)
    content = b"".join(pieces)
    then = bytecode_then(base, path, content)
    number = known.get(content_digest(then)) if then else None
    if number is None:
        return None
    return _Match(number, digest, status, content[:_BYTECODE_HEAD_BYTES])


def bytecode_then(base: Tree, path: bytes, content: bytes) -> bytes:
    """Return a bytecode file with its source's time in `base`; empty if that is unknown. Pure.

    A reinstalled package has files with other times, which Python writes into the otherwise equal
    bytecode (PEP 552: magic, flags, the source's time and size). Nothing of the base has to be
    fetched to find this out.
    """
    folder, _, name = path.rpartition(b"/")
    above = folder.rpartition(b"/")
    if above[2] != b"__pycache__" or len(content) <= _BYTECODE_HEAD_BYTES or any(content[4:8]):
        return b""
    source = base.resolve((above[0] + b"/" if above[0] else b"") + name.partition(b".")[0] + b".py")
    if source is None:
        return b""
    time_s = base.columns.mtime_ns[source] // 10**9 & 0xFFFFFFFF
    return content[:8] + time_s.to_bytes(4, "little") + content[12:]


def _reused_files(base: Tree, chosen: Sequence[int], same: Mapping[bytes, _Match]) -> ReusedFiles:
    # Number 0 is the new blob.
    numbers = {blob: 1 + i for i, blob in enumerate(chosen)}
    files = {}
    for path, match in same.items():
        extents = [
            Extent(offset, numbers[blob], blob_offset, length)
            for offset, blob, blob_offset, length in match.places(base)
            if blob in numbers
        ]
        # All of it, or nothing.
        held_bytes = len(match.head) + sum(extent.length for extent in extents)
        if held_bytes == base.columns.size_bytes[match.number]:
            files[path] = ReusedContent(tuple(extents), match.digest, match.status, match.head)
    return ReusedFiles([base.blobs[blob] for blob in chosen], files) if files else ReusedFiles()


def _behind(start: int, extents: Iterable[Place]) -> Iterator[Place]:
    """Yield the parts of extents at or behind the offset `start` in their file."""
    for offset, blob, blob_offset, length in extents:
        skipped = max(0, start - offset)
        if skipped < length:
            yield offset + skipped, blob, blob_offset + skipped, length - skipped
