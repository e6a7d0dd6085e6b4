"""Objects of a fan-out as the processes of one node share them.

One process of a start and node takes part in the fan-out (`host`). It receives each object into a
file without a name, in the order of the object's chunks. Image servers, environments and checkpoint
servers of the start ask it for an object through an abstract socket, get the file's descriptor, and
are told how far the object has come; they read the bytes from the file themselves.

`SharedRanges` is their side. `SharedReads` makes of it a `Reader` for the fetch engine, which
brings from the file what the fan-out brings in time, and everything else from the store. The fetch
engine checks the bytes as all others: a host that lies gets no wrong byte into anybody.

The exchange, integers little-endian:

    client -> host   MAGIC, u32 bytes of the header, u32 chunks; the header: JSON {is_wanted, url,
                     keys}; for each chunk u16 number of its key, u64 offset, u32 length, 32 bytes
                     digest
    host -> client   one byte, with the descriptor; then again and again u8 state, u32 u32 chunks of
                     each tree that are in the file, from the first one on; also when only parts
                     of chunks came. Nothing where the object is not wanted

Any thread.
"""

import array
import contextlib
import itertools
import json
import logging
import os
import socket
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from bootseer.base.closing import Closing
from bootseer.base.documents import DocumentFormat
from bootseer.base.short_digest import short_digest
from bootseer.errors import BootseerError, CorruptError
from bootseer.fanout.trees import TREE_COUNT
from bootseer.served.control import is_trusted_peer
from bootseer.settings.config import Settings
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.ranges import Chunk

if TYPE_CHECKING:
    # A restore that fetches nothing does not load the fetch engine.
    from bootseer.transfer.chunks import Reader

_log = logging.getLogger(__name__)

MAGIC = b"BSFSHARE"
HEAD = struct.Struct("<8sII")
UPDATE = struct.Struct("<BII")
IS_COMING, IS_OVER = 0, 1
"""States of an object: more may come; no more will."""
_ROW = struct.Struct("<HQI32s")
_HEADER_BYTES_MAX = 1 << 22
_CHUNKS_MAX = 1 << 20
CHUNK_BYTES_MAX = 16 << 20
_OBJECT_BYTES_MAX = 1 << 42
_JOIN_S = 5.0
_STUCK_S = 5.0
"""Time without bytes after which an object is read from the store: longer than a node needs to find
another source, or to begin to read the store itself."""
_CHUNK_S = 60.0
"""Time without a whole chunk after which an object is read from the store although bytes come: on a
slow line a chunk of some megabytes takes long, and would take longer if every node read it."""
_NEAR_BYTES = 32 << 20
_NEAR_S = 2.0
"""Limits of a wait for a chunk, by the bytes and by the expected time before it; beyond both, the
store is read."""
_LOOK_S = 0.5
"""Interval in which a waiting thread looks whether its chunk is still worth the wait."""


class _Header(Struct, frozen=True):
    is_wanted: bool
    url: Annotated[str, Meta(max_length=4096)]
    keys: Annotated[tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(max_length=1 << 16)]


_HEADER: DocumentFormat[_Header] = DocumentFormat(
    type=_Header, what="a request for an object", size_max=_HEADER_BYTES_MAX
)


class SharedObject(Struct, frozen=True):
    """Stored bytes that all nodes of a start want, in the order in which they want them."""

    url: str
    """URL of the store, which may hold credentials."""
    chunks: tuple[Chunk, ...]
    """Chunks, each with a digest, in the order of their bytes in the object's file."""
    is_wanted: bool = True
    """Whether the node lacks the object. If not, it refuses requests of other nodes for it."""

    def encode(self) -> bytes:
        """Return the request for the object."""
        keys = list(dict.fromkeys(chunk.key for chunk in self.chunks))
        numbers = {key: number for number, key in enumerate(keys)}
        told = {"is_wanted": self.is_wanted, "url": self.url, "keys": keys}
        header = json.dumps(told).encode()
        rows = (
            _ROW.pack(numbers[chunk.key], chunk.offset, chunk.length, chunk.digest or b"")
            for chunk in self.chunks
        )
        return b"".join((HEAD.pack(MAGIC, len(header), len(self.chunks)), header, *rows))

    @property
    def starts(self) -> list[int]:
        """Return where each chunk begins in the file, and where the last one ends."""
        return [0, *itertools.accumulate(chunk.length for chunk in self.chunks)]


def body_bytes(head: bytes) -> int:
    """Return how many bytes follow the head of a request. Raises: CorruptError."""
    magic, header_bytes, chunk_count = HEAD.unpack(head)
    if magic != MAGIC or header_bytes > _HEADER_BYTES_MAX or not 0 < chunk_count <= _CHUNKS_MAX:
        raise CorruptError("a request for an object of the fan-out cannot be read")
    return int(header_bytes + chunk_count * _ROW.size)


def decode_request(head: bytes, body: bytes) -> SharedObject:
    """Return the object that a request names. Raises: CorruptError."""
    _, header_bytes, _ = HEAD.unpack(head)
    header = _HEADER.decode(body[:header_bytes], "a request for an object of the fan-out")
    keys, chunks = header.keys, []
    for number, offset, length, digest in _ROW.iter_unpack(body[header_bytes:]):
        if number >= len(keys) or not 0 < length <= CHUNK_BYTES_MAX or offset > _OBJECT_BYTES_MAX:
            raise CorruptError("a request for an object of the fan-out has a chunk out of bounds")
        chunks.append(Chunk(keys[number], offset, length, digest))
    return SharedObject(header.url, tuple(chunks), header.is_wanted)


def can_be_shared(chunks: Sequence[Chunk]) -> bool:
    """Whether chunks can be an object of a fan-out."""
    return 0 < len(chunks) <= _CHUNKS_MAX and all(
        chunk.digest is not None and 0 < chunk.length <= CHUNK_BYTES_MAX for chunk in chunks
    )


class _Arriving:
    """An object on its way into its file, as one of its readers sees it."""

    def __init__(self, connection: socket.socket, file: int, wanted: SharedObject) -> None:
        self._connection, self._file, self._wanted = connection, file, wanted
        self._starts = wanted.starts
        self._places: dict[str, list[tuple[int, int, int]]] = {}
        """(offset, end, number) of the chunks of each key, by offset."""
        for number, chunk in enumerate(wanted.chunks):
            self._places.setdefault(chunk.key, []).append((chunk.offset, chunk.end, number))
        for places in self._places.values():
            places.sort()
        self._counts = [0] * TREE_COUNT
        self._is_over = False
        self._lock = threading.Lock()
        self._waiting: dict[threading.Event, tuple[int, int]] = {}
        """Tree and place in it of the chunk that each waiting thread wants: only those are woken
        whose chunk has come."""
        self._began_s = self._moved_s = self._came_s = time.monotonic()
        threading.Thread(target=self._listen, name="fan-out", daemon=True).start()

    def read(self, key: str, offset: int, buffer: memoryview, attempt: Attempt) -> bool:
        """Fill `buffer` as the chunks arrive.

        Returns False if the chunks are late or belong to no chunk of this object.
        """
        pieces = self._pieces(key, offset, len(buffer))
        done = 0
        for number, inner, length in pieces:
            if not self._wait(number, attempt):
                return False
            data = os.pread(self._file, length, self._starts[number] + inner)
            if len(data) != length or not attempt.put(done, buffer, data):
                return False
            done += length
        return bool(pieces)

    def _pieces(self, key: str, offset: int, length: int) -> list[tuple[int, int, int]]:
        """Return (chunk, offset in the chunk, length) for a range of an object.

        The result is empty if a part of the range is in no chunk.
        """
        places = self._places.get(key, [])
        at = bisect_right(places, offset, key=itemgetter(0)) - 1
        pieces = []
        while length > 0:
            if not 0 <= at < len(places) or not places[at][0] <= offset < places[at][1]:
                return []
            start, end, number = places[at]
            count = min(length, end - offset)
            pieces.append((number, offset - start, count))
            offset, length, at = offset + count, length - count, at + 1
        return pieces

    def _wait(self, number: int, attempt: Attempt) -> bool:
        tree, place = number % TREE_COUNT, number // TREE_COUNT
        if self._counts[tree] > place:
            return True
        arrived = threading.Event()
        with self._lock:
            self._waiting[arrived] = tree, place
        try:
            while self._counts[tree] <= place:
                if self._is_over or attempt.is_given_up or self._is_hopeless(number):
                    return False
                attempt.waits = True
                arrived.wait(_LOOK_S)
        finally:
            attempt.waits = False
            with self._lock:
                del self._waiting[arrived]
        return True

    def _is_hopeless(self, number: int) -> bool:
        now_s = time.monotonic()
        if now_s - self._moved_s > _STUCK_S or now_s - self._came_s > _CHUNK_S:
            return True
        came = self._came_bytes
        ahead = self._starts[number] - came
        rate = came / max(now_s - self._began_s, 1e-3)
        return ahead > _NEAR_BYTES and ahead > rate * _NEAR_S

    @property
    def is_over(self) -> bool:
        """Whether no more chunks will arrive."""
        return self._is_over

    @property
    def _came_bytes(self) -> int:
        """Bytes from the first chunk on, about."""
        return self._starts[min(sum(self._counts), len(self._starts) - 1)]

    def _listen(self) -> None:
        try:
            with self._connection, self._connection.makefile("rb") as updates:
                while len(data := updates.read(UPDATE.size)) == UPDATE.size:
                    state, *counts = UPDATE.unpack(data)
                    self._moved_s = time.monotonic()
                    if counts != self._counts:
                        self._counts, self._came_s = counts, self._moved_s
                    self._is_over |= state == IS_OVER
                    self._wake()
        except OSError as error:
            _log.debug("the fan-out is not heard any more: %s", error)
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        """Wake the threads whose chunk has come; all of them if no more will come."""
        with self._lock:
            for arrived, (tree, place) in self._waiting.items():
                if self._is_over or self._counts[tree] > place:
                    arrived.set()

    def close(self) -> None:
        """Stop waiting for the object: reads go to the store.

        The file stays open as long as this object exists.
        """
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        # Not earlier: a thread may be reading.
        os.close(self._file)


def socket_name(settings: Settings) -> bytes:
    """Return the name of the abstract socket of this user's start on this node."""
    words = (str(settings.run_dir), settings.job, settings.submission, str(settings.attempt))
    digest = short_digest("\0".join(words).encode("utf-8", "surrogateescape"))
    return f"\0bootseer-fanout-{os.geteuid()}-{digest[:24]}".encode()


def fanout_address(settings: Settings) -> bytes:
    """Return the address at which the processes of a start ask for objects; b"" if it has none."""
    return socket_name(settings) if settings.fanout else b""


def connected(address: bytes, limit_s: float) -> socket.socket:
    """Return a connection to the process of a start at `fanout_address`, each step of `limit_s`.

    Raises: OSError if there is no process, or it is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(limit_s)
        connection.connect(address)
        if not is_trusted_peer(connection):
            raise ConnectionRefusedError("another user's process has the name of the fan-out")
    except BaseException:
        connection.close()
        raise
    return connection


class SharedRanges(Closing):
    """Ranges of stored objects that the fan-out of a start brings."""

    def __init__(self, address: bytes) -> None:
        """`address`: see `fanout_address`."""
        self._address = address
        self._arriving: dict[str, _Arriving] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self.shared_bytes = 0
        """Bytes that came by the fan-out."""

    def share(self, url: str, chunks: Sequence[Chunk]) -> bool:
        """Request `chunks` of the store `url` from the fan-out, in this order.

        `read` then waits for their bytes. Returns False if the start has no fan-out or cannot share
        the chunks.
        """
        arriving = _ask_quietly(self._address, SharedObject(url, tuple(chunks)))
        if arriving is None:
            return False
        with self._lock:
            if self._is_closed:
                arriving.close()
                return False
            for key in {chunk.key for chunk in chunks}:
                self._arriving[key] = arriving
        return True

    def decline(self, url: str, chunks: Sequence[Chunk]) -> None:
        """Tell the other nodes that this one has `chunks` of an earlier start: they do not wait."""
        _ask_quietly(self._address, SharedObject(url, tuple(chunks), is_wanted=False))

    def covers(self, key: str) -> bool:
        """Return whether ranges of the object `key` are shared."""
        return key in self._arriving

    def bring(self, key: str, offset: int, buffer: memoryview, attempt: Attempt) -> bool:
        """Fill `buffer` from `offset` of the object `key` as the chunks arrive.

        Returns False if the store is to be read: no chunk has these bytes, they are late, or an
        earlier attempt at them failed.
        """
        # What failed or came damaged is asked of the store, which has checksums and replicas.
        is_trusted = not (attempt.asks_elsewhere or attempt.follows_damage)
        arriving = self._arriving.get(key) if is_trusted else None
        if arriving is None or not arriving.read(key, offset, buffer, attempt):
            return False
        with self._lock:
            self.shared_bytes += len(buffer)
        return True

    @property
    def is_over(self) -> bool:
        """Whether no more chunks will arrive."""
        with self._lock:
            return all(one.is_over for one in self._arriving.values())

    def close(self) -> None:
        """Stop all requests to the fan-out, and free the files of the objects. Idempotent."""
        with self._lock:
            self._is_closed = True
            arriving, self._arriving = set(self._arriving.values()), {}
        for one in arriving:
            one.close()


class SharedReads(SharedRanges):
    """Reads of stored bytes, by the fan-out where it brings them in time, else by the store.

    `read` is a `Reader` for a `ChunkFetcher`.
    """

    def __init__(self, settings: Settings, read: "Reader") -> None:
        """Create the reader; `read` reads the store."""
        super().__init__(fanout_address(settings))
        self._read = read

    def read(self, key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` from `offset` of the object `key`; as `Store.read_verified`."""
        if self.bring(key, offset, buffer, attempt):
            return len(buffer)
        if attempt.is_given_up:
            return 0
        return self._read(key, offset, buffer, attempt)


def decline(settings: Settings, url: str, chunks: Sequence[Chunk]) -> None:
    """Tell the other nodes that this one has `chunks`; see `SharedRanges.decline`."""
    SharedRanges(fanout_address(settings)).decline(url, chunks)


def _ask_quietly(address: bytes, wanted: SharedObject) -> _Arriving | None:
    """Request an object from the process of this start; return None if there is no process."""
    if not address or not can_be_shared(wanted.chunks):
        return None
    try:
        return _ask(address, wanted)
    except (BootseerError, OSError) as error:
        _log.debug("no fan-out brings %d chunks: %s", len(wanted.chunks), error)
        return None


def _ask(name: bytes, wanted: SharedObject) -> _Arriving | None:
    """Request an object; return None for one that is not wanted.

    Raises: OSError if no process takes part.
    """
    connection = connected(name, _JOIN_S)
    try:
        connection.sendall(wanted.encode())
        if not wanted.is_wanted:
            connection.close()
            return None
        descriptors = array.array("i")
        data, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content[: descriptors.itemsize])
        if not data or len(descriptors) != 1:
            raise ConnectionError("the fan-out does not take the object")
        connection.settimeout(None)
        return _Arriving(connection, descriptors[0], wanted)
    except BaseException:
        connection.close()
        raise
