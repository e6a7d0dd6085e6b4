"""Gives an image that has no bundle the bundle of a similar image: an earlier build, mostly.

Alone owns the records that name similar images with one or two reads and no listing
(docs/format/bundle.md, "Similar images"): when a bundle is published, one record under the image's
name, without tag and digest, and one under its largest stream, list the image. Edge, but for the
functions that are marked *pure*; functions and frozen values only, safe from any thread. All of it
is bounded, since it happens in the process that serves a start, and none of it is a condition for a
start: whatever is wrong, there is no bundle.
"""

import logging
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from bootseer.base.documents import Count64, Form, Sha256
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import BootseerError, CorruptError, NotFoundError, UnknownFormatError
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.format import Bundle
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.prefetch.bundle.translation import translate
from bootseer.prefetch.cache.kept_indexes import read_kept_tree
from bootseer.prefetch.index.catalogue import read_tree
from bootseer.settings.config import Settings
from bootseer.store import Store

_log = logging.getLogger(__name__)

_HEADER_BYTES_MAX = 8 * 2**20
_INDEX_BYTES_MAX = 64 * 2**20
_KEPT = 4
"""Images per record: tags that are built in turn, for GPU and CPU, do not drive each other out."""
_STREAMS_MAX = 32
"""The largest of an image are compared; the small ones decide nothing."""


class Stream(Struct, frozen=True):
    """The digest and length of one stream (uncompressed layer) of an image."""

    digest: Annotated[str, Meta(pattern=r"\A[a-z0-9]{1,16}:[0-9a-f]{64,128}\Z")]
    length: Count64


class SimilarImage(Struct, frozen=True):
    """An image that has a bundle, and its largest streams."""

    index_digest: Sha256
    created_ns: Count64
    """When its bundle was made."""
    streams: Annotated[tuple[Stream, ...], Meta(max_length=_STREAMS_MAX)]
    """The largest first."""


class SimilarImages(Struct, frozen=True):
    """The images of one name, or of one largest stream, that have bundles."""

    images: Annotated[tuple[SimilarImage, ...], Meta(max_length=_KEPT)]


FORM: Form[SimilarImages] = Form(
    type=SimilarImages,
    what="a record of images with bundles",
    kind="bootseer-hot-relatives",
    versions=(1,),
    size_max=64 * 1024,
    indent=1,
)


def name_of(reference: str) -> str:
    """Returns a reference without its tag and digest. Pure."""
    name = reference.partition("@")[0]
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]


def describe_image(index_digest: str, created_ns: int, blobs: Sequence[Blob]) -> SimilarImage:
    """Returns the entry of an image with these blobs in a record of similar images. Pure."""
    streams = {Stream(blob.stream_digest, blob.stream_length) for blob in blobs}
    largest = sorted(streams, key=lambda stream: (-stream.length, stream.digest))
    return SimilarImage(index_digest, created_ns, tuple(largest[:_STREAMS_MAX]))


def choose_similar(own: SimilarImage, others: Sequence[SimilarImage]) -> SimilarImage | None:
    """Returns the image that shares most bytes with `own`; of equals the newest. Pure."""
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
    """Returns the images that the record at `key` lists. Raises: CorruptError, UnknownFormatError,
    UnavailableError."""
    try:
        return FORM.read(store, key).images
    except NotFoundError:
        return ()


def publish_similar(
    store: Store, pointer: HotPointer, reference: str, workload: str, tree: Tree
) -> None:
    """Lets similar images find the bundle to which `pointer` points. Raises: BootseerError.

    Of two nodes that publish at once one entry may be lost; the next bundle of that image adds it.
    """
    own = describe_image(pointer.index_digest, pointer.created_ns, tree.blobs)
    for key in _keys(own, reference, workload):
        try:
            known = read_similar(store, key)
        except (CorruptError, UnknownFormatError) as error:
            _log.warning("a record of similar images is replaced: %s", error)
            known = ()
        others = [other for other in known if other.index_digest != own.index_digest]
        kept = SimilarImages((own, *others[: _KEPT - 1]))
        store.publish(key, FORM.encode(kept), replace=True)


def find_similar(
    store: Store, own: SimilarImage, reference: str, workload: str
) -> SimilarImage | None:
    """Returns the image whose bundle is most likely to serve `own`; costs one or two reads.

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
    """Returns the bundle of a similar image, translated for the image with this tree, and the
    pointer to it; None where no similar image has a bundle, or no frame of it serves.

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
    old = _old_tree(settings, store, similar.index_digest)
    lengths = [blob.stream_length for blob in old.blobs]
    bundle = hot_store.read_bundle(store, pointer, lengths)
    translated = translate(bundle, old, tree, index_digest)
    _log.info(
        "of the bundle of the similar image %s, %d of %d frames serve",
        similar.index_digest,
        len(translated.frames),
        len(bundle.frames),
    )
    return (pointer, translated) if translated.frames else None


def _old_tree(settings: Settings, store: Store, index_digest: str) -> Tree:
    """Returns the tree of an index from the node's copy, else from the store. It is not kept, since
    it is needed once."""
    try:
        return read_kept_tree(settings.cache_dir, index_digest, run_dir=settings.run_dir)
    except BootseerError:
        return read_tree(store, index_digest, bytes_max=_INDEX_BYTES_MAX)
