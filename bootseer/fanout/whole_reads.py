"""Small objects that every node of a start reads as a whole, by fan-out where there is one.

`read_whole` is for objects whose chunks have known digests, such as an image's index. For documents
without a digest, such as an image's record, there is `StartDocuments`. Both ask the process of
this start (`host`), and leave to their callers, or do themselves, what the store has to bring.

A question for a document, integers little-endian:

    client -> host   QUESTION, u32 bytes of the key, u32 0; the key, in ASCII
    host -> client   u8 whether this node has read it in the store, u32 length; the document as
                     `documents` sends it. Nothing where the client has to read the store

Any thread. Modules of the fan-out are imported by starts that have one.
"""

import logging
import struct
from collections.abc import Sequence

from bootseer.base.content_digest import content_digest
from bootseer.base.documents import ReadableStore
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import NotFoundError
from bootseer.settings.config import Settings
from bootseer.transfer.ranges import Chunk

_log = logging.getLogger(__name__)

QUESTION = b"BSFREADS"
ANSWER = struct.Struct("<?I")
ABSENT, PRESENT = b"\0", b"\1"
"""First byte of a document as it is sent."""
KEY_BYTES_MAX = 1024
DOCUMENT_BYTES_MAX = 1 << 20
"""Size of the largest document, with its first byte, that nodes pass on."""
_JOIN_S = 5.0
_ANSWER_S = 7.0
"""Longest wait for a document: a little longer than the host's."""


def read_whole(settings: Settings, chunks: Sequence[Chunk]) -> bytes | None:
    """Return the verified bytes of consecutive `chunks` of the own store, if the fan-out has them.

    Waits as long as chunks arrive. Returns None if the caller has to read the store itself.
    """
    if not settings.fanout or not chunks:
        return None
    from bootseer.fanout.local import SharedReads
    from bootseer.transfer.attempt import Attempt

    with SharedReads(settings, lambda key, offset, buffer, attempt: 0) as reads:
        if not reads.share(settings.store_url, chunks):
            return None
        data = memoryview(bytearray(sum(chunk.length for chunk in chunks)))
        left = data
        for chunk in chunks:
            piece, left = left[: chunk.length], left[chunk.length :]
            if reads.read(chunk.key, chunk.offset, piece, Attempt()) != chunk.length:
                _log.info("the fan-out does not bring %s in time", chunk.key)
                return None
            if content_digest(piece) != chunk.digest:
                _log.warning("warning: the fan-out brought wrong bytes of %s", chunk.key)
                return None
    return bytes(data)


def decline_whole(settings: Settings, chunks: Sequence[Chunk]) -> None:
    """Tell the other nodes of the start that this one has `chunks`: they do not wait for it."""
    if settings.fanout and chunks:
        from bootseer.fanout.local import decline

        decline(settings, settings.store_url, chunks)


class StartDocuments:
    """Small documents without a digest that all nodes of a start read, such as an image's record.

    They come from other nodes (`documents`) if the start has a fan-out, else from the store. Within
    a start they stay as they were when a node first read them. Where the store is away, other nodes
    are asked until one document does not come: the next would be waited for as long.
    """

    def __init__(self, settings: Settings, store: ReadableStore) -> None:
        """Create the reader; `store` is the own store."""
        self._settings, self._store = settings, store
        self.reads_store = not settings.fanout
        """Whether this node has read a document in the store itself. Only such nodes do what one
        node does for all of a start: look whether the store has all blobs, note their use."""

    @property
    def url(self) -> str:
        """URL of the store, for messages."""
        return self._store.url

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a document; as `Store.read`."""
        is_hopeless = WAIT_BUDGET.is_spent and WAIT_BUDGET.is_left_by_neighbours
        answer = None
        if self._settings.fanout and key.isascii() and not is_hopeless:
            answer = _ask(self._settings, key)
            WAIT_BUDGET.is_left_by_neighbours = answer is None
        if answer is None:
            self.reads_store = True
            return self._store.read(key, offset, length)
        data, is_own = answer
        self.reads_store |= is_own
        if data[:1] != PRESENT:
            raise NotFoundError(f"there is no {key} in {self.url}")
        return data[1 + offset :][:length]


def _ask(settings: Settings, key: str) -> tuple[bytes, bool] | None:
    """Return a document as it is sent, and whether this node has read it in the store.

    Returns None if the caller has to read the store.
    """
    from bootseer.fanout.local import HEAD, connected, fanout_address

    text = key.encode()
    try:
        with connected(fanout_address(settings), _JOIN_S) as connection:
            connection.settimeout(_ANSWER_S)
            connection.sendall(HEAD.pack(QUESTION, len(text), 0) + text)
            with connection.makefile("rb") as answer:
                head = answer.read(ANSWER.size)
                if len(head) < ANSWER.size:
                    return None
                is_own, length = ANSWER.unpack(head)
                data = answer.read(min(length, DOCUMENT_BYTES_MAX))
            return (data, is_own) if 0 < len(data) == length else None
    except OSError as error:
        _log.debug("no fan-out brings %s: %s", key, error)
        return None
