"""Notes in the store of what is in use: trees that were restored or mounted lately.

Alone owns `used/HEX` (docs/format/store.md). A garbage collector spares what such a note names; who
reads a tree lazily for days repeats it. Thread-safe: functions only.
"""

import logging
import time
from collections.abc import Iterable

from msgspec import Struct

from bootseer.base.documents import BlobDigest, Form
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.store.objects.store import Store

_log = logging.getLogger(__name__)

FOLDER = "used/"
RENEWED_AFTER_S = 20 * 3600
"""A note younger than this is not written again: a thousand nodes that start at once write a few
notes, and a day later a few more."""

IN_USE_S = 3 * 86_400
"""What was noted as used within this time is in use: notes are renewed once a day, so that two
that fail are no harm."""

_SKEW_S = 3600.0
"""A clock that is behind by less lets a note become less than a day old."""


class Use(Struct, frozen=True):
    """A tree and the blobs that it is read from."""

    index_digest: BlobDigest
    blob_digests: tuple[BlobDigest, ...]


FORM: Form[Use] = Form(
    type=Use,
    what="a note of a use",
    kind="bootseer-use",
    versions=(1,),
    size_max=4 * 2**20,
    indent=1,
)


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
        use = Use(index_digest, tuple(sorted(set(blob_digests))))
        store.publish(key, FORM.encode(use), replace=True)
    except (BootseerError, OSError) as error:
        _log.info("cannot note the use of %s: %s", index_digest, error)


def read_use(store: Store, key: str) -> Use:
    """The note at `key`. Raises: NotFoundError, CorruptError, UnknownFormatError,
    UnavailableError."""
    use = FORM.read(store, key)
    if use_key(use.index_digest) != key:
        raise CorruptError(f"{store.url}/{key} is the note of another tree")
    return use
