"""Bundles of similar images, for an image that has none yet: mostly those of an earlier build.

Owns the records by which similar images are found in one or two reads, without a listing
(docs/format/bundle.md, "Similar images"). When a bundle is published, its image is added to two
records: one under the image's name, without tag and digest, and one under its largest stream. All
work is bounded, since it is done by the process that serves a start. `translate` makes the bundle
of a similar image one for this image. Thread-safe: functions and frozen values.
"""

import logging
import stat
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import replace

from bootseer.base.documents import Count64, DocumentFormat, Sha256
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import BootseerError, CorruptError, NotFoundError, UnknownFormatError
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.format import (
    SECTOR_BYTES,
    Bundle,
    BundleExtent,
    BundleFrame,
    SectorMarks,
    sectors_of,
)
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.prefetch.cache.indexes import read_kept_tree
from bootseer.prefetch.index.catalogue import read_tree
from bootseer.prefetch.index.stream_contents import StreamContents
from bootseer.settings.config import Settings
from bootseer.store import Store

_log = logging.getLogger(__name__)

_HEADER_BYTES_MAX = 8 * 2**20
_INDEX_BYTES_MAX = 64 * 2**20
_KEPT = 4
"""Images per record: enough for tags that are built in turn, such as for GPU and CPU."""
_STREAMS_MAX = 32
"""Streams per image that are compared, the largest ones."""


class LayerStream(Struct, frozen=True):
    """Digest and length of a stream (uncompressed layer) of an image."""

    digest: Annotated[str, Meta(pattern=r"\A[a-z0-9]{1,16}:[0-9a-f]{64,128}\Z")]
    length: Count64


class SimilarImage(Struct, frozen=True):
    """Image with a bundle, described by its largest streams."""

    index_digest: Sha256
    created_ns: Count64
    """Time when the bundle was made."""
    streams: Annotated[tuple[LayerStream, ...], Meta(max_length=_STREAMS_MAX)]
    """Streams, the largest first."""


class SimilarImages(Struct, frozen=True):
    """Record of the images with bundles that share a name or their largest stream."""

    images: Annotated[tuple[SimilarImage, ...], Meta(max_length=_KEPT)]


FORM: DocumentFormat[SimilarImages] = DocumentFormat(
    type=SimilarImages,
    what="a record of images with bundles",
    kind="bootseer-hot-relatives",
    version=1,
    size_max=64 * 1024,
    indent=1,
)


def name_of(reference: str) -> str:
    """Return a reference without its tag and digest. Pure."""
    name = reference.partition("@")[0]
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]


def describe_image(index_digest: str, created_ns: int, blobs: Sequence[Blob]) -> SimilarImage:
    """Return the description of an image with these blobs. Pure."""
    streams = {LayerStream(blob.stream_digest, blob.stream_length) for blob in blobs}
    largest = sorted(streams, key=lambda stream: (-stream.length, stream.digest))
    return SimilarImage(index_digest, created_ns, tuple(largest[:_STREAMS_MAX]))


def choose_similar(own: SimilarImage, others: Sequence[SimilarImage]) -> SimilarImage | None:
    """Return the other image that shares most bytes with `own`; of equals the newest. Pure."""
    mine = set(own.streams)

    def shared_bytes(other: SimilarImage) -> int:
        return sum(stream.length for stream in mine.intersection(other.streams))

    fitting = [other for other in others if other.index_digest != own.index_digest]
    return max(fitting, key=lambda other: (shared_bytes(other), other.created_ns), default=None)


def _keys(own: SimilarImage, reference: str, workload: str) -> list[str]:
    keys = [hot_store.name_key(name_of(reference), workload)]
    if own.streams:
        keys.append(hot_store.stream_key(own.streams[0].digest, workload))
    return keys


def read_similar(store: Store, key: str) -> tuple[SimilarImage, ...]:
    """Read a record. Raises: CorruptError, UnknownFormatError, UnavailableError."""
    try:
        return FORM.read(store, key).images
    except NotFoundError:
        return ()


def publish_similar(
    store: Store, pointer: HotPointer, reference: str, workload: str, tree: Tree
) -> None:
    """Add the image of a new bundle to its two records of similar images. Raises: BootseerError.

    If two nodes publish at once, one entry may be lost until the image's next bundle.
    """
    own = describe_image(pointer.index_digest, pointer.created_ns, tree.blobs)
    for key in _keys(own, reference, workload):
        try:
            known = read_similar(store, key)
        except (CorruptError, UnknownFormatError) as error:
            _log.warning("replacing a damaged record of similar images: %s", error)
            known = ()
        others = [other for other in known if other.index_digest != own.index_digest]
        kept = SimilarImages((own, *others[: _KEPT - 1]))
        store.publish(key, FORM.encode(kept), replace=True)


def find_similar(
    store: Store, own: SimilarImage, reference: str, workload: str
) -> SimilarImage | None:
    """Return the image whose bundle is most likely to serve `own`, after one or two reads.

    Raises: CorruptError, UnknownFormatError, UnavailableError.
    """
    for key in _keys(own, reference, workload):
        similar = choose_similar(own, read_similar(store, key))
        if similar is not None:
            return similar
    return None


def reuse_bundle(
    settings: Settings, store: Store, index_digest: str, reference: str, workload: str, tree: Tree
) -> tuple[HotPointer, Bundle] | None:
    """Return the bundle of a similar image, translated for the image with `tree`, and its pointer.

    Return None if no similar image has a bundle, or no frame of the bundle can be used.
    Raises: BootseerError.
    """
    own = describe_image(index_digest, 0, tree.blobs)
    similar = find_similar(store, own, reference, workload)
    if similar is None:
        return None
    pointer = hot_store.read_pointer(store, similar.index_digest, workload)
    if pointer is None:
        return None
    if pointer.header_bytes > _HEADER_BYTES_MAX:
        raise CorruptError(f"the bundle {pointer.bundle_digest} is too large to be translated")
    try:
        old = read_kept_tree(settings.cache_dir, similar.index_digest, run_dir=settings.run_dir)
    except BootseerError:
        # Read from the store, and not kept: this start needs it once.
        old = read_tree(store, similar.index_digest, bytes_max=_INDEX_BYTES_MAX)
    lengths = [blob.stream_length for blob in old.blobs]
    bundle = hot_store.read_bundle(store, pointer, lengths)
    translated = translate(bundle, old, tree, index_digest)
    _log.info(
        "the bundle of the similar image %s is used: %d of its %d frames",
        similar.index_digest,
        len(translated.frames),
        len(bundle.frames),
    )
    return (pointer, translated) if translated.frames else None


# ---- translation of a bundle ---------------------------------------------------------------------

# A bundle can serve another image that has many of the same files, such as a rebuild. Bytes of a
# stream that both images have (`Blob.stream_digest`) keep their place. All other bytes of the
# bundle belong to files of the old image. They are moved to a file of the new image with the same
# content, preferably the one at the same path. Only whole sectors of file contents are moved, no
# tar headers. Pure.


EXTENT_COUNT_MAX = 100_000
"""The most extents of a bundle that are translated, in the order of use; the rest is left out. It
takes about a second in a process that has a start to serve, and is far more than a start needs."""

STEP_COUNT_MAX = 2**22
"""The most pairs of an old content and a new extent that are examined, about forty for each extent
of a bundle: a tree may claim that millions of files share their bytes."""

_SHARE = 8
"""A frame is used if at least 1 / `_SHARE` of its content is found in the new image. For less than
that, faults are cheaper: each fetches 128 KiB of a blob, a fourth of a bundle's frame."""

_Piece: TypeAlias = tuple[BundleExtent, int]
"""Extent of a new stream, and its position in the frame's content."""


def translate(bundle: Bundle, old: Tree, new: Tree, new_index_digest: str) -> Bundle:
    """Return `bundle`, made for the tree `old`, with the extents of the streams of `new`.

    Frames with too little content of `new` are left out, maybe all. No sector is in the bundle
    twice. Raises: CorruptError for a tree with impossible contents.
    """
    places = _Places(old, new)
    frames: list[BundleFrame] = []
    extent_count = 0
    for frame in bundle.frames:
        extent_count += len(frame.extents)
        if extent_count > EXTENT_COUNT_MAX:
            break
        pieces: list[_Piece] = []
        for extent, position in zip(frame.extents, frame.positions, strict=True):
            places.add_pieces(extent, position, pieces)
        if sum(extent.length for extent, _ in pieces) * _SHARE >= frame.stream_length:
            extents, positions = zip(*pieces, strict=True)
            frames.append(replace(frame, extents=extents, positions=positions))
    return Bundle(new_index_digest, bundle.header_bytes, tuple(frames))


def shared_streams(old: Sequence[Blob], new: Sequence[Blob]) -> dict[int, int]:
    """Map each old blob to the new blob with the same stream, by their numbers. Pure."""
    numbers = {(blob.stream_digest, blob.stream_length): n for n, blob in enumerate(new)}
    found = {}
    for number, blob in enumerate(old):
        other = numbers.get((blob.stream_digest, blob.stream_length))
        if other is not None:
            found[number] = other
    return found


class _Places:
    """Map from bytes of the old image's streams to places in the new image's streams."""

    def __init__(self, old: Tree, new: Tree) -> None:
        self._old = old
        self._new = new
        self._shared = shared_streams(old.blobs, new.blobs)
        self._taken = [SectorMarks() for _ in new.blobs]
        self._steps_left = STEP_COUNT_MAX
        # Sectors of the new streams in whose middle a file begins. A tar stream has none.
        self._split_sectors = {
            (blob, offset // SECTOR_BYTES)
            for blob, offset in zip(
                new.columns.extent_blob, new.columns.extent_blob_offset, strict=True
            )
            if offset % SECTOR_BYTES
        }
        self._contents = StreamContents(old)
        self._new_extents_by_inode: dict[int, list[tuple[int, int, int, int]]] = {}

    def add_pieces(self, extent: BundleExtent, position: int, pieces: list[_Piece]) -> None:
        """Append the parts of an extent that the new image has; `position` is the extent's."""
        number = self._shared.get(extent.blob)
        if number is None:
            self._add_contents(extent, position, pieces)
        elif self._take(number, extent.offset, extent.length):
            pieces.append((BundleExtent(number, extent.offset, extent.length), position))

    def _take(self, blob: int, offset: int, length: int) -> bool:
        """Take sectors of a new stream. Return False if one of them is already taken."""
        first, end = sectors_of(offset, length)
        taken = self._taken[blob]
        if taken.gaps(first, end) != [(first, end)]:
            return False
        taken.take(first, end)
        return True

    def _add_contents(self, extent: BundleExtent, position: int, pieces: list[_Piece]) -> None:
        """Append the parts of an extent whose files have the same content in the new image."""
        columns = self._old.columns
        starts, numbers = self._contents.layout(extent.blob)
        offset, extent_end = extent.offset, extent.offset + extent.length
        i = max(bisect_right(starts, offset) - 1, 0)
        while i < len(starts) and starts[i] < extent_end and self._steps_left > 0:
            self._steps_left -= 1
            number = numbers[i]
            start = starts[i]
            end = start + columns.extent_length[number]
            # Tar fills the last sector of a file with zeros.
            room_end = min(
                starts[i + 1] if i + 1 < len(starts) else extent_end,
                end + -end % SECTOR_BYTES,
                extent_end,
            )
            i += 1
            first, last = max(start, offset), min(end, extent_end)
            if first >= last:
                continue
            inode = self._contents.inode_of(number)
            has_one_extent = columns.extent_start[inode + 1] - columns.extent_start[inode] == 1
            targets = self._new_extents(inode)
            # Added to an offset in the old stream: the offset in the file.
            to_file = columns.extent_file_offset[number] - start
            self._steps_left -= len(targets)
            for file_offset, blob, blob_offset, length in targets:
                low = max(first + to_file, file_offset)
                high = min(last + to_file, file_offset + length)
                # Added to an offset in the file: the offset in the new stream.
                to_blob = blob_offset - file_offset
                # Whole sectors of the new stream; only its last sector may be partial.
                low += -(low + to_blob) % SECTOR_BYTES
                gap = -(high + to_blob) % SECTOR_BYTES
                gap = min(gap, self._new.blobs[blob].stream_length - high - to_blob)
                if gap:
                    ends_both_files = (
                        has_one_extent and high == end + to_file == file_offset + length
                    )
                    has_sector_alone = (
                        len(targets) == 1
                        and (blob, (high + to_blob) // SECTOR_BYTES) not in self._split_sectors
                    )
                    if ends_both_files and has_sector_alone and high - to_file + gap <= room_end:
                        high += gap
                    else:
                        high -= (high + to_blob) % SECTOR_BYTES
                if low < high and self._take(blob, low + to_blob, high - low):
                    place = position + low - to_file - offset
                    pieces.append((BundleExtent(blob, low + to_blob, high - low), place))

    def _new_extents(self, inode: int) -> list[tuple[int, int, int, int]]:
        """Return the extents of the new file with the content of the old inode."""
        found = self._new_extents_by_inode.get(inode)
        if found is None:
            number = self._new_inode(inode)
            found = [] if number is None else self._new.extents(number)
            self._new_extents_by_inode[inode] = found
        return found

    def _new_inode(self, inode: int) -> int | None:
        """Return the new inode with the content of an old one; None if there is none.

        Of several such inodes, the one at the same path is returned, if any.
        """
        old = self._old.columns
        number = old.digest[inode]
        if not number or not stat.S_ISREG(old.mode[inode]):
            return None
        digest = old.digests[32 * (number - 1) : 32 * number]
        found = self._inode_by_digest.get(digest)
        if found is None or digest not in self._repeated_digests:
            return found
        same = self._new.resolve(self._old.path(inode))
        return same if same is not None and _digest(self._new, same) == digest else found

    @cached_property
    def _inode_by_digest(self) -> dict[bytes, int]:
        """Map from the digest of a content to the first new inode that has it."""
        digests, numbers = _digests(self._new), self._new.columns.digest
        inodes = range(self._new.inode_count - 1, -1, -1)
        return {digests[numbers[i]]: i for i in inodes if numbers[i]}

    @cached_property
    def _repeated_digests(self) -> set[bytes]:
        """Digests of contents that several new inodes have."""
        digests, counts = _digests(self._new), Counter(self._new.columns.digest)
        return {digests[number] for number, count in counts.items() if number and count > 1}


def _digests(tree: Tree) -> list[bytes]:
    heap = tree.columns.digests
    return [b"", *(heap[i : i + 32] for i in range(0, len(heap), 32))]


def _digest(tree: Tree, inode: int) -> bytes:
    number = tree.columns.digest[inode]
    return tree.columns.digests[32 * (number - 1) : 32 * number] if number else b""
