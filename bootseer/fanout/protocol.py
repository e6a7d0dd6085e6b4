"""Messages between two nodes of a fan-out, and the proof that both belong to the same job.

    child                                     source
    HELLO   version, both numbers, nonce  ->
                                          <-  nonce, proof
    proof                                 ->
    ASK     object, tree                  ->
                                          <-  offer                  (as often as the child likes)
    READ    document, tree                ->
                                          <-  frames: beats, then the document
    FEED    object, tree, count           ->
                                          <-  frames: a beat, a chunk, or the list of chunks
    KEEP    digest, length; a timeline    ->
                                          <-  bytes: waiting, kept, refused (`gathering`)

A proof is an HMAC-SHA256 of the job's key over the version, the role, both nodes' numbers and both
nonces: who has no key proves nothing, a proof of another connection, direction or node is none, and
the source proves itself before it learns what is wanted. All messages but the payload of a frame
have a fixed length. What comes after the proof is neither encrypted nor signed: chunks prove
themselves by their digests. docs/format/fanout.md has the bytes. Pure, but for the nonces.
"""

import hmac
import struct

from msgspec import Struct

from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.fanout.objects import CHUNK_BYTES_MAX, LIST_BYTES_MAX
from bootseer.fanout.plan import PATH_MAX, Offer
from bootseer.fanout.trees import STORE, TREE_COUNT
from bootseer.fanout.whole_reads import DOCUMENT_BYTES_MAX, KEY_BYTES_MAX

VERSION = 1
KEY_BYTES = NONCE_BYTES = PROOF_BYTES = 32
_MAGIC = b"BSFO"
_HELLO = struct.Struct(f"!4sBII{NONCE_BYTES}s")
_REQUEST = struct.Struct("!BBBI32s")
_OFFER = struct.Struct(f"!IHBIiIB{PATH_MAX}i")
REQUESTS_MAX = 1000
"""Questions on one connection that a node answers."""
_AGE_MS_MAX = (1 << 32) - 1
_FRAME = struct.Struct("!BI")

HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
REQUEST_BYTES = _REQUEST.size
OFFER_BYTES = _OFFER.size
FRAME_BYTES = _FRAME.size + _OFFER.size

ASK, FEED, KEEP, READ = 1, 2, 3, 4
BEAT, CHUNK, LIST, BUSY, DOCUMENT = 0, 1, 2, 3, 4
"""Kinds of frames; BUSY is the last one of its stream or question. Instead of a length, BEAT has
the milliseconds since bytes of the object came to the sender, or to a node that feeds it."""
_LENGTH_MAX = {
    BEAT: (1 << 32) - 1,
    CHUNK: CHUNK_BYTES_MAX,
    LIST: LIST_BYTES_MAX,
    BUSY: 0,
    DOCUMENT: DOCUMENT_BYTES_MAX,
}


class Hello(Struct, frozen=True):
    """First message of a connection."""

    child: int
    source: int
    nonce: bytes

    def encode(self) -> bytes:
        """Return the message."""
        return _HELLO.pack(_MAGIC, VERSION, self.child, self.source, self.nonce)


class Request(Struct, frozen=True):
    """Request of a child."""

    operation: int
    tree: int
    count: int
    """Chunks of the tree that the child has; to KEEP or READ, bytes that follow."""
    name: bytes
    """Name of the object; to KEEP or READ, digest of these bytes."""
    leaves_store: bool = False
    """Whether the child leaves the store for this source."""
    needs_list: bool = False
    """Whether the child lacks the list of chunks."""

    def encode(self) -> bytes:
        """Return the message."""
        flags = self.leaves_store | self.needs_list << 1
        return _REQUEST.pack(self.operation, self.tree, flags, self.count, self.name)


class Frame(Struct, frozen=True):
    """Head of a frame of a source; `length` bytes of payload follow."""

    kind: int
    length: int
    offer: Offer


def decode_hello(data: bytes | memoryview) -> Hello:
    """Decode the first message. Raises: UnknownFormatError."""
    magic, version, child, source, nonce = _HELLO.unpack(data)
    if (magic, version) != (_MAGIC, VERSION):
        raise UnknownFormatError("a connection speaks another protocol, or another version")
    return Hello(child, source, nonce)


def decode_request(data: bytes | memoryview) -> Request:
    """Decode a request. Raises: CorruptError."""
    operation, tree, flags, count, name = _REQUEST.unpack(data)
    if operation not in (ASK, FEED, KEEP, READ) or tree >= TREE_COUNT or flags > 3:
        raise CorruptError("a request that nobody makes")
    if operation == READ and not 0 < count <= KEY_BYTES_MAX:
        raise CorruptError("a request that nobody makes")
    return Request(operation, tree, count, name, bool(flags & 1), bool(flags & 2))


def encode_offer(offer: Offer) -> bytes:
    """Return the message in which a node describes itself."""
    path = offer.path + (0,) * (PATH_MAX - len(offer.path))
    flags = offer.is_low | offer.is_line_slow << 1
    ages = _milliseconds(offer.age_s), offer.newest, _milliseconds(offer.newest_age_s)
    return _OFFER.pack(offer.count, offer.streams, flags, *ages, len(offer.path), *path)


def _milliseconds(seconds: float) -> int:
    return min(max(int(seconds * 1000), 0), _AGE_MS_MAX)


def decode_offer(data: bytes | memoryview, node: int, node_count: int) -> Offer:
    """Return the offer of `node` of `node_count`. Raises: CorruptError."""
    count, streams, flags, age_ms, newest, newest_age_ms, length, *path = _OFFER.unpack(data)
    nodes = (newest, *path)
    if length > PATH_MAX or flags > 3 or min(nodes) < STORE or max(nodes) >= node_count:
        raise CorruptError(f"node {node} names nodes that do not exist")
    return Offer(
        node,
        count,
        streams,
        tuple(path[:length]),
        bool(flags & 1),
        bool(flags & 2),
        age_ms / 1000,
        newest,
        newest_age_ms / 1000,
    )


def encode_frame(kind: int, length: int, offer: Offer) -> bytes:
    """Return the head of a frame."""
    return _FRAME.pack(kind, length) + encode_offer(offer)


def decode_frame(data: memoryview, node: int, node_count: int) -> Frame:
    """Decode the head of a frame. Raises: CorruptError."""
    kind, length = _FRAME.unpack_from(data)
    if length > _LENGTH_MAX.get(kind, -1):
        raise CorruptError(f"node {node} sends a frame of an unknown kind or too large")
    return Frame(kind, length, decode_offer(data[_FRAME.size :], node, node_count))


def proof(key: bytes, role: bytes, hello: Hello, nonce: bytes) -> bytes:
    """Return the proof of `role`, b"source" or b"child"; `nonce` is the source's."""
    return hmac.digest(key, b"bootseer fan-out\0" + role + b"\0" + hello.encode() + nonce, "sha256")


def is_proof(
    given: bytes | memoryview, key: bytes, role: bytes, hello: Hello, nonce: bytes
) -> bool:
    """Return whether `given` is the proof, in constant time."""
    return hmac.compare_digest(given, proof(key, role, hello, nonce))
