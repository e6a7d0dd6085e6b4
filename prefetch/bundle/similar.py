"""Bundles of similar images, for an image that has none yet: mostly those of an earlier build.

Owns the records by which similar images are found in one or two reads, without a listing
(docs/format/bundle.md, "Similar images"). When a bundle is published, its image is added to two
records: one under the image's name, without tag and digest, and one under its largest stream. All
work is bounded, since it is done by the process that serves a start. Functions and frozen values
only; thread-safe.
"""

import logging
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from bootseer.base.documents import Count64, DocumentFormat, Sha256
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import BootseerError, CorruptError, NotFoundError, UnknownFormatError
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.format import Bundle
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.prefetch.bundle.translation import translate
from bootseer.prefetch.cache.indexes import read_kept_tree
from bootseer.prefetch.index.catalogue import read_tree
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
