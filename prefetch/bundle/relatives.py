"""Which other image has a bundle that may serve this one: an earlier build of it, mostly.

Alone owns the records that answer this with one or two reads and no listing (docs/format/bundle.md,
"Relatives"): when a bundle is published, a record under the image's name, without tag and digest,
and one under its largest stream, say so. Edge, but for what says *pure*; thread-safe: functions and
frozen values only. Nothing here is a condition for anything: whatever is wrong, there is no bundle.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from bootseer.blob.tree import Blob, Tree
from bootseer.checked_json import SHA256, count_in, digest_in, list_in, parse_versioned
from bootseer.errors import CorruptError, NotFoundError, UnknownFormatError
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.store import Store

_log = logging.getLogger(__name__)

_KIND = "bootseer-hot-relatives"
_VERSION = 1
_RECORD_BYTES_MAX = 64 * 1024
_STREAM = re.compile(r"[a-z0-9]{1,16}:[0-9a-f]{64,128}")

_KEPT = 4
"""Images of one name: tags that are built in turn, for GPU and CPU, do not drive each other out."""
_STREAMS_MAX = 32
"""The largest of an image are compared; the small ones decide nothing."""


class Relative(Struct, frozen=True):
    """An image with a bundle."""

    index_digest: str
    created_ns: int
    """When its bundle was made."""
    streams: tuple[tuple[str, int], ...]
    """(digest, length) of its streams, the largest first."""


def name_of(reference: str) -> str:
    """A reference without tag and digest. Pure."""
    name = reference.partition("@")[0]
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]


def describe(index_digest: str, created_ns: int, blobs: Sequence[Blob]) -> Relative:
    """Pure."""
    streams = sorted(
        {(blob.stream_digest, blob.stream_length) for blob in blobs},
        key=lambda stream: (-stream[1], stream[0]),
    )
    return Relative(index_digest, created_ns, tuple(streams[:_STREAMS_MAX]))


def choose(own: Relative, others: Sequence[Relative]) -> Relative | None:
    """The one that shares most with `own`; of equals the newest. Pure."""
    mine = dict(own.streams)

    def shared_bytes(other: Relative) -> int:
        return sum(length for digest, length in other.streams if mine.get(digest) == length)

    fitting = [other for other in others if other.index_digest != own.index_digest]
    return max(fitting, key=lambda other: (shared_bytes(other), other.created_ns), default=None)


def encode(relatives: Sequence[Relative]) -> bytes:
    """Deterministic. Pure."""
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "images": [
            {
                "index_digest": relative.index_digest,
                "created_ns": relative.created_ns,
                "streams": [
                    {"digest": digest, "length": length} for digest, length in relative.streams
                ],
            }
            for relative in relatives
        ],
    }
    return json.dumps(document, indent=1).encode("ascii") + b"\n"


def decode(data: bytes, where: str) -> list[Relative]:
    """Pure. Raises: CorruptError, UnknownFormatError."""
    document = parse_versioned(
        data, _RECORD_BYTES_MAX, _KIND, _VERSION, where, "no record of images with bundles"
    )
    return [_relative(entry, where) for entry in list_in(document, "images", dict, _KEPT, where)]


def _relative(entry: Mapping[str, Any], where: str) -> Relative:
    return Relative(
        digest_in(entry, "index_digest", where, SHA256),
        count_in(entry, "created_ns", where, 2**63),
        tuple(
            (digest_in(one, "digest", where, _STREAM), count_in(one, "length", where, 2**63))
            for one in list_in(entry, "streams", dict, _STREAMS_MAX, where)
        ),
    )


def _keys(own: Relative, reference: str, workload: str) -> list[str]:
    keys = [hot_store.name_key(name_of(reference), workload)]
    if own.streams:
        keys.append(hot_store.stream_key(own.streams[0][0], workload))
    return keys


def read(store: Store, key: str) -> list[Relative]:
    """The images that the record at `key` lists. Raises: as `decode`, UnavailableError."""
    try:
        data = store.read(key, 0, _RECORD_BYTES_MAX + 1)
    except NotFoundError:
        return []
    return decode(data, f"{store.url}/{key}")


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
            known = []
        others = [other for other in known if other.index_digest != own.index_digest]
        store.publish(key, encode([own, *others][:_KEPT]), replace=True)


def find(store: Store, own: Relative, reference: str, workload: str) -> Relative | None:
    """The image whose bundle is most likely to serve `own`; one or two reads.

    Raises: CorruptError, UnknownFormatError, UnavailableError.
    """
    for key in _keys(own, reference, workload):
        relative = choose(own, read(store, key))
        if relative is not None:
            return relative
    return None
