"""Which other image has a bundle that may serve this one: an earlier build of it, mostly.

Alone owns the records that answer this with one or two reads and no listing (docs/format/bundle.md,
"Relatives"): when a bundle is published, a record under the image's name, without tag and digest,
and one under its largest stream, say so. Edge, but for what says *pure*; thread-safe: functions and
frozen values only. Nothing here is a condition for anything: whatever is wrong, there is no bundle.
"""

import logging
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from bootseer.base.documents import Count64, Form, Sha256
from bootseer.blob.tree import Blob, Tree
from bootseer.errors import CorruptError, NotFoundError, UnknownFormatError
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.store import Store

_log = logging.getLogger(__name__)

_KEPT = 4
"""Images of one name: tags that are built in turn, for GPU and CPU, do not drive each other out."""
_STREAMS_MAX = 32
"""The largest of an image are compared; the small ones decide nothing."""


class Stream(Struct, frozen=True):
    """A stream of an image."""

    digest: Annotated[str, Meta(pattern=r"\A[a-z0-9]{1,16}:[0-9a-f]{64,128}\Z")]
    length: Count64


class Relative(Struct, frozen=True):
    """An image with a bundle."""

    index_digest: Sha256
    created_ns: Count64
    """When its bundle was made."""
    streams: Annotated[tuple[Stream, ...], Meta(max_length=_STREAMS_MAX)]
    """The largest first."""


class Relatives(Struct, frozen=True):
    """The images of one name, or of one largest stream, that have bundles."""

    images: Annotated[tuple[Relative, ...], Meta(max_length=_KEPT)]


FORM: Form[Relatives] = Form(
    type=Relatives,
    what="a record of images with bundles",
    kind="bootseer-hot-relatives",
    versions=(1,),
    size_max=64 * 1024,
    indent=1,
)


def name_of(reference: str) -> str:
    """A reference without tag and digest. Pure."""
    name = reference.partition("@")[0]
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]


def describe(index_digest: str, created_ns: int, blobs: Sequence[Blob]) -> Relative:
    """Pure."""
    streams = {Stream(blob.stream_digest, blob.stream_length) for blob in blobs}
    largest = sorted(streams, key=lambda stream: (-stream.length, stream.digest))
    return Relative(index_digest, created_ns, tuple(largest[:_STREAMS_MAX]))


def choose(own: Relative, others: Sequence[Relative]) -> Relative | None:
    """The one that shares most with `own`; of equals the newest. Pure."""
    mine = set(own.streams)

    def shared_bytes(other: Relative) -> int:
        return sum(stream.length for stream in mine.intersection(other.streams))

    fitting = [other for other in others if other.index_digest != own.index_digest]
    return max(fitting, key=lambda other: (shared_bytes(other), other.created_ns), default=None)


def _keys(own: Relative, reference: str, workload: str) -> list[str]:
    keys = [hot_store.name_key(name_of(reference), workload)]
    if own.streams:
        keys.append(hot_store.stream_key(own.streams[0].digest, workload))
    return keys


def read(store: Store, key: str) -> tuple[Relative, ...]:
    """The images that the record at `key` lists. Raises: CorruptError, UnknownFormatError,
    UnavailableError."""
    try:
        return FORM.read(store, key).images
    except NotFoundError:
        return ()


def publish(store: Store, pointer: HotPointer, reference: str, workload: str, tree: Tree) -> None:
    """Let images like this one find its bundle, to which `pointer` points. Raises: BootseerError.

    Two that publish at once may lose one of the two; the next bundle of that image mends it.
    """
    own = describe(pointer.index_digest, pointer.created_ns, tree.blobs)
    for key in _keys(own, reference, workload):
        try:
            known = read(store, key)
        except (CorruptError, UnknownFormatError) as error:
            _log.warning("it is replaced: %s", error)
            known = ()
        others = [other for other in known if other.index_digest != own.index_digest]
        kept = Relatives((own, *others[: _KEPT - 1]))
        store.publish(key, FORM.encode(kept), replace=True)


def find(store: Store, own: Relative, reference: str, workload: str) -> Relative | None:
    """The image whose bundle is most likely to serve `own`; one or two reads.

    Raises: CorruptError, UnknownFormatError, UnavailableError.
    """
    for key in _keys(own, reference, workload):
        relative = choose(own, read(store, key))
        if relative is not None:
            return relative
    return None
