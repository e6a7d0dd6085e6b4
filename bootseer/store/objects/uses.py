"""Notes in the store of what is in use: trees that were restored or mounted lately.

Alone owns `used/HEX` (docs/format/store.md). A garbage collector spares what such a note names; who
reads a tree lazily for days repeats it. Thread-safe: functions only.
"""

import json
import logging
import re
import time
from collections.abc import Iterable

from msgspec import Struct

from bootseer.errors import BootseerError, CorruptError, NotFoundError, UnknownFormatError
from bootseer.store.objects.store import Store

_log = logging.getLogger(__name__)

FOLDER = "used/"
RENEWED_AFTER_S = 20 * 3600
"""A note younger than this is not written again: a thousand nodes that start at once write a few
notes, and a day later a few more."""

_SKEW_S = 3600.0
"""A clock that is behind by less lets a note become less than a day old."""
_KIND = "bootseer-use"
_VERSION = 1
_BYTES_MAX = 4 * 2**20
_DIGEST = re.compile(r"(?:sha256|blake3):[0-9a-f]{64}")


class Use(Struct, frozen=True):
    """A tree and the blobs that it is read from."""

    index_digest: str
    blob_digests: tuple[str, ...]


def use_key(index_digest: str) -> str:
    """Where the note of a tree lies."""
    return FOLDER + index_digest.partition(":")[2]


def note_use(store: Store, index_digest: str, blob_digests: Iterable[str]) -> None:
    """Let collectors know that the tree with this index, read from these blobs, is in use now.

    Costs one look at the store, and at most once in `RENEWED_AFTER_S` a write. Never raises: at
    worst a collector that was told to remove the tree does so.
    """
    if store.url.startswith("oci:"):
        return  # what lies beside an image in a registry, goes with it
    key = use_key(index_digest)
    try:
        try:
            age_s = (time.time_ns() - store.info(key).modified_ns) / 1e9
            # A note from the future is written again: this node's clock may be behind for good.
            if -_SKEW_S < age_s < RENEWED_AFTER_S:
                return
        except NotFoundError:
            pass
        store.publish(key, encode_use(Use(index_digest, tuple(blob_digests))), replace=True)
    except (BootseerError, OSError) as error:
        _log.info("cannot note the use of %s: %s", index_digest, error)


def encode_use(use: Use) -> bytes:
    """Deterministic. Pure."""
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "index_digest": use.index_digest,
        "blob_digests": sorted(set(use.blob_digests)),
    }
    return json.dumps(document, indent=1).encode("ascii") + b"\n"


def read_use(store: Store, key: str) -> Use:
    """Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError."""
    return decode_use(store.read(key, 0, _BYTES_MAX + 1), key)


def decode_use(data: bytes, key: str) -> Use:
    """The note that lies at `key`. Pure. Raises: CorruptError, UnknownFormatError."""
    try:
        if len(data) > _BYTES_MAX:
            raise ValueError
        document = json.loads(data)
        if document["kind"] != _KIND or document["version"] != _VERSION:
            raise UnknownFormatError(f"{key} is no note of a use that this release reads")
        use = Use(document["index_digest"], tuple(document["blob_digests"]))
        if not all(_DIGEST.fullmatch(digest) for digest in (use.index_digest, *use.blob_digests)):
            raise ValueError
    except UnknownFormatError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptError(f"{key} is no note of a use") from None
    if use_key(use.index_digest) != key:
        raise CorruptError(f"{key} is the note of another tree")
    return use
