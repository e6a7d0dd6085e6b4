"""Notes of use: objects in the store that name the trees restored or mounted lately.

The notes are the objects `used/HEX` (docs/format/store.md). The garbage collector keeps the tree
and the blobs that a note names. A process that serves a tree for days writes its note again every
day. Thread-safe: functions only.
"""

import logging
import time
from collections.abc import Iterable

from msgspec import Struct

from bootseer.base.documents import BlobDigest, DocumentFormat, Sha256
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.store.objects.store import Store

_log = logging.getLogger(__name__)

FOLDER = "used/"
RENEWED_AFTER_S = 20 * 3600
"""Age from which a note is written again, so that a thousand nodes that start at once write only a
few notes."""

IN_USE_S = 3 * 86_400
"""Age up to which a note counts: notes are written once a day, so two writes may fail."""

_SKEW_S = 3600.0
"""Largest difference of clocks for which a note from the future counts as a fresh one."""


class Use(Struct, frozen=True):
    """Tree in use, and the blobs from which it is read."""

    index_digest: Sha256
    blob_digests: tuple[BlobDigest, ...]


FORM: DocumentFormat[Use] = DocumentFormat(
    type=Use,
    what="a note of a use",
    kind="bootseer-use",
    version=1,
    size_max=4 * 2**20,
    indent=1,
)


def use_key(index_digest: str) -> str:
    """Return the key of the note of a tree."""
    return FOLDER + index_digest.partition(":")[2]


def note_use(store: Store, index_digest: str, blob_digests: Iterable[str]) -> None:
    """Note that the tree with this index, read from these blobs, is in use now. Never raises.

    Costs one request, and once in `RENEWED_AFTER_S` a write. Without the note the garbage collector
    may remove the tree if a rule says so.
    """
    if store.url.startswith("oci:"):
        return  # objects beside an image in a registry are deleted with the image
    key = use_key(index_digest)
    try:
        try:
            age_s = (time.time_ns() - store.info(key).modified_ns) / 1e9
            # A note from the future is written again: the clock of its writer may be wrong.
            if -_SKEW_S < age_s < RENEWED_AFTER_S:
                return
        except NotFoundError:
            pass
        use = Use(index_digest, tuple(sorted(set(blob_digests))))
        store.publish(key, FORM.encode(use), replace=True)
    except (BootseerError, OSError) as error:
        _log.info("cannot note the use of %s: %s", index_digest, error)


def read_use(store: Store, key: str) -> Use:
    """Return the note at `key`.

    Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError.
    """
    use = FORM.read(store, key)
    if use_key(use.index_digest) != key:
        raise CorruptError(f"{store.url}/{key} is the note of another tree")
    return use
