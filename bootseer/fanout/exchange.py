"""Exchange of objects between the nodes of a job: one node receives them and sends them on.

Each object that the node joins is a `_Share`: a file that fills up with verified chunks. For each
of its two trees a `_Follower` carries out the `SourcePlan`: it reads from another node or from the
store, and changes when the plan says so. A `_Stream` sends the chunks to a node that is fed, from
memory or straight from the file, in the callback in which they came.

Chunks are verified before they are written, and only written chunks are offered, used or sent. An
object whose file cannot be written any more fails: its users read the store, and its children
read from other nodes.

Thread safety: any thread may call the public methods of `Exchange`. All else runs in the thread of
its event loop. The lock of a share guards what both see. An exchange does not survive fork(2).
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from bootseer.base.closing import Closing
from bootseer.base.content_digest import content_digest
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    UnavailableError,
    UnknownFormatError,
    from_oserror,
)
from bootseer.fanout import protocol
from bootseer.fanout.addresses import NotedAddresses
from bootseer.fanout.connection import Clock, Link, Wanted, connect, settle, welcome
from bootseer.fanout.documents import Documents
from bootseer.fanout.gathering import KEPT, REFUSED, WAITING, Gathering
from bootseer.fanout.objects import ChunkList, decode_list
from bootseer.fanout.plan import (
    ASK_S,
    HEARTBEAT_S,
    SILENCE_S,
    STUCK_S,
    Help,
    Offer,
    Reason,
    SourcePlan,
    Step,
    Take,
    has_room,
)
from bootseer.fanout.protocol import Hello, Request
from bootseer.fanout.trees import STORE, TREE_COUNT, Trees, chunks_of
from bootseer.transfer.policy import dice

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_PROOF_S = 2.0
_IDLE_S = 10.0
"""Time after which a connection without a request is closed."""
_STALLED_S = 5.0
"""Time after which a child that takes no bytes loses its stream."""
_BEAT_TICKS = 2
"""Ticks of the clock without a chunk after which a beat is sent: at most `HEARTBEAT_S`."""
_TELL_EVERY_S = 1.0
"""Interval in which a user learns that bytes come although no chunk is whole."""
_STORE_IN_FLIGHT = 2
"""Chunks of a tree that are read from the store at once, unless the object says otherwise."""
_STORE_THREADS = 32
_STORE_PAUSE_S = 1.0
_CONNECTIONS_MAX = 512
"""A group of nodes that hand over their timelines, and as many others."""
_ADDRESS_CONNECTIONS_MAX = 64
"""Limit of connections from one address: a hostile member cannot take all places."""
_REQUESTS_MAX = 1000
_LATE_ANSWER_S = 0.1
"""Where most nodes have answered, the others are given so much more."""
_SPARE_LINKS_MAX, _SPARE_S = 32, 8.0
"""Connections kept after a question, and for how long: less than `_IDLE_S`."""


class Origin(Protocol):
    """Store of an object. Called from threads; may block; raises as stores do."""

    def chunk_list(self) -> bytes:
        """Return the encoded list of chunks."""

    def chunk(self, index: int, offset: int, length: int) -> bytes:
        """Return the bytes of one chunk."""


def _never() -> float:
    return 0.0


def _no_document(key: str) -> bytes:
    raise UnavailableError(f"nobody reads {key} here")


class SourceRecord(Struct):
    """Bytes that one source sent of one tree of an object, for the report."""

    name: bytes
    tree: int
    source: int
    """A node, or STORE."""
    byte_count: int = 0
    seconds: float = 0.0
    left_because: str = ""


class _Buffer:
    """Memory of one chunk, which may be being sent while the next one is received."""

    __slots__ = ("data", "frame", "index", "senders")

    def __init__(self, frame: memoryview, head_bytes: int = 0) -> None:
        self.frame, self.data = frame, frame[head_bytes:]
        """The chunk with the head of its frame, if it came with one; the chunk."""
        self.index, self.senders = -1, 0


class _Share:
    """State of one object on this node: list of chunks, file, sources and streams."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.lock = threading.Condition()
        self.file = -1
        self.origin: Origin | None = None
        self.in_flight = _STORE_IN_FLIGHT
        self.chunks: ChunkList | None = None
        self.encoded_list = memoryview(b"")
        """List of chunks as all streams send it: up to 9 MiB."""
        self.has = bytearray()
        self.counts = [0] * TREE_COUNT
        """Chunks of each tree that are here, from the first one on."""
        self.received = [0] * TREE_COUNT
        """Bytes that the sources of each tree have sent, without those of helpers."""
        self.error: BootseerError | None = None
        self.moved_s = time.monotonic()
        """Time at which bytes came last."""
        self.above_s = [self.moved_s] * TREE_COUNT
        """Times at which bytes of each tree came last to the nodes that feed this one."""
        self.store_moved_s: Callable[[], float] = _never
        """Returns the time at which bytes last came from the store, also of unfinished chunks."""
        self.plans: list[SourcePlan] = []
        self.streams: list[set[_Stream]] = [set() for _ in range(TREE_COUNT)]
        """Nodes that are fed in each tree."""
        self.watchers: set[_Watcher] = set()
        self.latest: list[_Buffer | None] = [None] * TREE_COUNT
        """The last chunk of each tree: sent from memory, which costs half as much as from the
        file."""
        self._spare: list[memoryview] = []

    def joined(self, origin: Origin, file: int) -> None:
        """Set the store and the file of the object."""
        self.origin, self.file = origin, file
        self.moved_s = time.monotonic()

    def bytes_moved_s(self, tree: int) -> float:
        """Return when bytes of a tree came last, to this node or to those that feed it."""
        if self.plans and self.plans[tree].source == STORE:
            return max(self.above_s[tree], self.store_moved_s())
        return self.above_s[tree]

    def is_whole(self, tree: int) -> bool:
        """Whether all chunks of a tree are here."""
        chunks = self.chunks
        return chunks is not None and self.counts[tree] == chunks_of(tree, len(chunks.lengths))

    @property
    def is_complete(self) -> bool:
        """Whether all chunks of both trees are here."""
        return all(map(self.is_whole, range(TREE_COUNT)))

    def accept_list(self, data: bytes | memoryview) -> None:
        """Set the list of chunks. Raises: CorruptError if it does not match the object's name."""
        if self.chunks is None:
            encoded = bytes(data)
            chunks = decode_list(encoded, self.name)
            self.encoded_list = memoryview(encoded)
            with self.lock:
                self.has = bytearray(len(chunks.lengths))
                self.chunks = chunks
            self.describe()
            self._tell()

    def describe(self) -> None:
        """Pass the size of the object to the plans, if it is known."""
        if self.chunks is not None:
            count = len(self.chunks.lengths)
            for tree, plan in enumerate(self.plans):
                plan.chunk_bytes = self.chunks.offsets[-1] / count
                plan.length = chunks_of(tree, count)

    def accept(self, index: int, buffer: "_Buffer") -> None:
        """Verify, write, keep and pass on a chunk. Raises: CorruptError; OSError of the disk."""
        chunks = self.chunks
        assert chunks is not None
        data = buffer.data
        if self.has[index]:
            self.release(buffer)
            return
        if len(data) != chunks.lengths[index] or content_digest(data) != chunks.digests[index]:
            raise CorruptError(f"chunk {index} of {self.name.hex()[:12]} does not match its digest")
        offset, left = chunks.offsets[index], data
        while left:
            written = os.pwrite(self.file, left, offset)
            left, offset = left[written:], offset + written
        with self.lock:
            self.has[index] = 1
            tree = index % TREE_COUNT
            at = self.counts[tree] * TREE_COUNT + tree
            while at < len(self.has) and self.has[at]:
                self.counts[tree] += 1
                at += TREE_COUNT
            self.moved_s = time.monotonic()
            self.lock.notify_all()
        buffer.index = index
        last, self.latest[tree] = self.latest[tree], buffer
        if last is not None:
            # Before the streams go on: one that sends the rest of it releases it itself.
            self.release(last)
        for stream in self.streams[tree]:
            stream.pump()
        for watcher in tuple(self.watchers):
            watcher.tell()
        if self.is_complete:
            self._forget_memory()

    def take_buffer(self, index: int) -> _Buffer:
        """Return memory for a frame with this chunk, for `accept` or `release`.

        If there is no such chunk, or nobody knows the chunks, there is only room for the head.
        """
        lengths = () if self.chunks is None else self.chunks.lengths
        length = protocol.FRAME_BYTES + (lengths[index] if index < len(lengths) else 0)
        while self._spare:
            memory = self._spare.pop()
            if len(memory) >= length:
                return _Buffer(memory[:length], protocol.FRAME_BYTES)
        return _Buffer(memoryview(bytearray(length)), protocol.FRAME_BYTES)

    def release(self, buffer: _Buffer) -> None:
        """Use the memory for another chunk if no stream sends it."""
        is_used = buffer.senders or buffer in self.latest or buffer.frame.readonly
        if not is_used and self.error is None and not self.is_complete:
            self._spare.append(memoryview(buffer.frame.obj))

    def _forget_memory(self) -> None:
        """Free the memory of chunks when no chunk comes any more: nodes are fed from the file."""
        self.latest = [None] * TREE_COUNT
        self._spare.clear()

    def fail(self, error: BootseerError) -> None:
        """Fail the object: nothing more is written or sent."""
        with self.lock:
            self.error = self.error or error
        self._forget_memory()
        self._tell()

    def _tell(self) -> None:
        """Tell the threads, streams and users that wait for chunks."""
        with self.lock:
            self.lock.notify_all()
        for stream in (*self.streams[0], *self.streams[1]):
            stream.pump()
        for watcher in tuple(self.watchers):
            watcher.tell()

    @property
    def any_moved_s(self) -> float:
        """Time at which bytes came last, to this node or to those that feed it."""
        return max(map(self.bytes_moved_s, range(TREE_COUNT)))

    def offer(self, own: int, tree: int) -> Offer:
        """Return this node's offer."""
        now_s = time.monotonic()
        streams = sum(
            one.sending_s is None or now_s - one.sending_s < STUCK_S
            for fed in self.streams
            for one in fed
        )
        if not self.plans:
            return Offer(own, self.counts[tree], streams, ())
        self.plans[tree].count = self.counts[tree]
        return self.plans[tree].offer(now_s, streams)


class _Watcher:
    """User of an object on this node, who is told how far it has come."""

    def __init__(
        self, share: _Share, told: Callable[[tuple[int, ...], bool], bool], clock: Clock
    ) -> None:
        self._share, self._told, self._clock = share, told, clock
        self._last: tuple[tuple[int, ...], bool] | None = None
        self._told_s = 0.0
        share.watchers.add(self)
        clock.add(self._look)
        self.tell()

    def tell(self) -> None:
        """Report what is new; what the user does not take is reported at a later tick."""
        state = self._state
        if state == self._last:
            return
        try:
            is_taken, is_last = self._told(*state), state[1]
        except OSError:
            is_taken = is_last = True
        if is_taken:
            self._last, self._told_s = state, time.monotonic()
        if is_taken and is_last:
            self._share.watchers.discard(self)
            self._clock.remove(self._look)

    def _look(self) -> None:
        share, now_s = self._share, time.monotonic()
        if now_s - self._told_s > _TELL_EVERY_S and share.any_moved_s > self._told_s:
            self._last = None
        self.tell()
        if self._last == self._state and share.is_complete:
            self._clock.remove(self._look)

    @property
    def _state(self) -> tuple[tuple[int, ...], bool]:
        return tuple(self._share.counts), self._share.error is not None


class _Stream:
    """Chunks of a tree on their way to a node that is fed, and beats meanwhile."""

    def __init__(self, link: Link, share: _Share, own: int, request: Request) -> None:
        self._link, self._share, self._own, self._tree = link, share, own, request.tree
        self._count, self._needs_list = request.count, request.needs_list
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._begun_s, self._idle_ticks = time.monotonic(), 0
        self.sending_s: float | None = None
        """Time at which the current chunk was begun."""
        # What is being sent: the rest in memory, which may be this buffer's; then of the file.
        self._left: list[memoryview] = []
        self._buffer: _Buffer | None = None
        self._offset = self._length = 0

    async def run(self, clock: Clock) -> None:
        """Send until the child has the whole tree. Raises: TimeoutError, OSError."""
        streams = self._share.streams[self._tree]
        streams.add(self)
        clock.add(self._look)
        try:
            self.pump()
            await self._ended
        finally:
            clock.remove(self._look)
            streams.discard(self)
            self._sent()

    def pump(self) -> None:
        """Send what there is, as far as the line takes it. Does not raise."""
        if self._ended.done():
            return
        try:
            while self._left or self._length or self._begin():
                if not self._send_some():
                    self._link.await_room(self.pump)
                    return
                self._sent()
            self._link.await_room(None)
            share = self._share
            if share.error is not None or share.is_whole(self._tree):
                self._ended.set_result(True)
        except OSError as error:
            self._ended.set_exception(error)

    def _begin(self) -> bool:
        """Begin the list or the next chunk; return whether there is one."""
        share, chunks = self._share, self._share.chunks
        if share.error is not None or chunks is None:
            return False
        if self._needs_list:
            self._needs_list, data = False, share.encoded_list
            self._send_frame(protocol.LIST, len(data), data)
        elif self._count < share.counts[self._tree]:
            index = self._count * TREE_COUNT + self._tree
            self._count += 1
            latest, length = share.latest[self._tree], chunks.lengths[index]
            if latest is not None and latest.index == index:
                latest.senders += 1
                self._buffer = latest
                self._send_frame(protocol.CHUNK, length, latest.data)
            else:
                self._offset, self._length = chunks.offsets[index], length
                self._send_frame(protocol.CHUNK, length)
        else:
            return False
        return True

    def _send_frame(self, kind: int, length: int, *payload: memoryview) -> None:
        self._begun_s = time.monotonic()
        if kind != protocol.BEAT:
            self.sending_s = self._begun_s
        self._idle_ticks = 0
        offer = self._share.offer(self._own, self._tree)
        self._left = [memoryview(protocol.encode_frame(kind, length, offer)), *payload]

    def _send_some(self) -> bool:
        """Return whether all that was begun is sent. Raises: OSError."""
        if not self._link.send_some(self._left, more=self._length > 0):
            return False
        while self._length:
            count = self._link.send_file_some(self._share.file, self._offset, self._length)
            if not count:
                return False
            self._offset, self._length = self._offset + count, self._length - count
        return True

    def _sent(self) -> None:
        self.sending_s = None
        self._release()

    def _release(self) -> None:
        if self._buffer is not None:
            self._buffer.senders -= 1
            self._share.release(self._buffer)
            self._buffer = None

    def _leave_memory(self) -> None:
        """Send the rest of a chunk from the file, if another chunk has come since.

        Otherwise, each of many slow children holds the memory of another chunk.
        """
        buffer, chunks = self._buffer, self._share.chunks
        if buffer is None or buffer in self._share.latest:
            return
        assert chunks is not None
        self._length = len(self._left.pop())
        self._offset = chunks.offsets[buffer.index + 1] - self._length
        self._release()

    def _look(self) -> None:
        """Send a beat where nothing was sent; end the stream of a child that takes nothing."""
        now_s = time.monotonic()
        if self._left or self._length:
            if now_s - self._begun_s > STUCK_S:
                self._leave_memory()
            moved_s = max(self._begun_s, self._link.sent_s)
            if now_s - moved_s > _STALLED_S and not self._ended.done():
                self._ended.set_exception(TimeoutError("a child takes nothing"))
            return
        self._idle_ticks += 1
        if self._idle_ticks >= _BEAT_TICKS:
            silent_s = max(0.0, now_s - self._share.bytes_moved_s(self._tree))
            self._send_frame(protocol.BEAT, int(silent_s * 1000))
            self.pump()


class _Questions:
    """Connection to a node for questions, which the node answers in their order."""

    def __init__(self, link: Link, node: int, node_count: int, clock: Clock) -> None:
        self._link, self._node, self._node_count = link, node, node_count
        self._loop = asyncio.get_running_loop()
        self._count, self._unsent = 0, b""
        self._waiting: deque[tuple[float, asyncio.Future[Offer | None]]] = deque()
        """Questions without an answer: when they were asked, and what becomes the answer."""
        self._ended = link.begin(self._answers(), _SPARE_S, clock)
        self._ended.add_done_callback(self._lost)

    @property
    def is_usable(self) -> bool:
        """Whether the node is likely to answer one more."""
        is_late = bool(self._waiting) and self._loop.time() - self._waiting[0][0] > SILENCE_S
        return not self._ended.done() and not is_late and self._count < _REQUESTS_MAX // 2

    def ask(self, request: bytes) -> "asyncio.Future[Offer | None]":
        """Ask one question; the result is None if the node is gone."""
        answer: asyncio.Future[Offer | None] = self._loop.create_future()
        self._waiting.append((self._loop.time(), answer))
        self._count += 1
        if not self._unsent:
            # Those of other trees and objects are asked at the same tick.
            self._loop.call_soon(self._send)
        self._unsent += request
        return answer

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, b""
        try:
            if self._ended.done() or self._link.send_some([memoryview(unsent)]):
                return
        except OSError:
            pass
        self.close()

    def _answers(self) -> Generator[Wanted, int, None]:
        answer = memoryview(bytearray(protocol.OFFER_BYTES))
        while True:
            yield answer, 0, protocol.OFFER_BYTES, None
            if not self._waiting:
                raise CorruptError("an answer that nobody asked for")
            offer = protocol.decode_offer(answer, self._node, self._node_count)
            _, waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(offer)

    def take(self) -> Link | None:
        """Return the connection for another use if no answer is waited for, else None."""
        if self._waiting or self._ended.done():
            return None
        self._ended.cancel()
        self._link.stop()
        return self._link

    def _lost(self, ended: "asyncio.Future[None]") -> None:
        if not ended.cancelled():
            ended.exception()  # Retrieved, or the event loop would log it.
            self.close()

    def close(self) -> None:
        """Close the connection: nothing is answered any more. Idempotent."""
        self._ended.cancel()
        self._link.close()
        while self._waiting:
            _, answer = self._waiting.popleft()
            if not answer.done():
                answer.set_result(None)


class _Follower:
    """Carries out the plan of one tree of an object until all of the tree is here."""

    def __init__(self, exchange: "Exchange", share: _Share, tree: int) -> None:
        self._exchange, self._share, self._tree = exchange, share, tree
        self._reading: asyncio.Task[Reason] | None = None
        self._helping: asyncio.Task[Reason] | None = None
        self._asking: asyncio.Task[list[Offer]] | None = None
        self._fed = self._helped = SourceRecord(share.name, tree, STORE)

    def look(self) -> None:
        """Do what the plan says. For the clock, and whenever a task has ended."""
        share, tree, exchange = self._share, self._tree, self._exchange
        if share.error is not None or share.is_whole(tree) or exchange.is_closed:
            exchange.clock.remove(self.look)
            for task in (self._reading, self._helping, self._asking):
                _cancel(task)
            self._reading = self._helping = self._asking = None
            return
        plan, now_s = share.plans[tree], time.monotonic()
        plan.count = share.counts[tree]
        step: Step | None = None
        if self._helping is not None and self._helping.done():
            if self._helping.result() is not Reason.WHOLE:
                plan.help_ended(now_s, self._helping.result())
                self._helped.left_because = self._helping.result().value
            self._helping = None
        if self._asking is not None and self._asking.done():
            step, self._asking = plan.answered(now_s, self._asking.result()), None
        elif self._reading is not None and self._reading.done():
            self._fed.left_because = self._reading.result().value
            if self._reading.result() is Reason.OVERTAKEN and self._helping is not None:
                plan.overtook()
                self._fed, self._reading, self._helping = self._helped, self._helping, None
            else:
                plan.lost(now_s, self._reading.result())
                self._reading = None
        step = step or plan.step(now_s)
        if plan.source is None and self._reading is not None:
            self._leave(Reason.SILENT)
        if isinstance(step, Take):
            self._leave(step.reason)
            self._fed = exchange.new_record(share, tree, step.source)
            self._reading = self._begun(exchange.read(share, tree, step, self._fed))
        elif isinstance(step, Help):
            self._helped = exchange.new_record(share, tree, step.source)
            self._helping = self._begun(exchange.read(share, tree, step, self._helped))
        elif step is not None:
            self._asking = self._begun(exchange.ask(share, tree, step.nodes))
        if any(task is not None and task.done() for task in (self._reading, self._asking)):
            self.look()

    def _leave(self, reason: Reason | None) -> None:
        """End the reading, if there is one."""
        _cancel(self._reading)
        self._reading = None
        if reason is not None:
            self._fed.left_because = self._fed.left_because or reason.value

    def _begun(self, what: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Begin a task whose end is looked at."""
        task = self._exchange.spawn(what)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            self.look()


class Exchange(Closing):
    """Node of the fan-out: receives objects from the other nodes and sends them on."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        own: int,
        key: bytes,
        trees: Trees | None = None,
        *,
        listener: socket.socket | None = None,
        gathering: Gathering | None = None,
        has_objects: bool = True,
        read_document: Callable[[str], bytes] = _no_document,
        noted: NotedAddresses | None = None,
    ) -> None:
        """Listen, and serve from now on.

        Args:
            addresses: Host and port of each node, in the order of the trees.
            own: Index of this node.
            key: The job's key, 32 bytes.
            trees: Who feeds whom; by default without knowledge of racks.
            listener: Socket that listens already, and becomes this object's; by default one at
                the own port of all addresses.
            gathering: Where the timelines of other nodes go; None refuses them.
            has_objects: Whether objects are sent; if not, who asks is hung up on, as if nobody
                were there.
            read_document: Function that reads a document in the store, see `documents`. Called
                from threads; raises as stores do.
            noted: Where the addresses of the other nodes are looked up; by default they are those
                in `addresses`.

        Raises: InvalidInputError; OSError when the port is taken.
        """
        if len(key) != protocol.KEY_BYTES:
            raise InvalidInputError(f"a job's key has {protocol.KEY_BYTES} bytes, not {len(key)}")
        if not 0 <= own < len(addresses):
            raise InvalidInputError("the list of nodes lacks the own one")
        self._addresses, self._own, self._key = tuple(addresses), own, key
        self._trees = Trees(len(addresses)) if trees is None else trees
        self._gathering, self._has_objects, self._noted = gathering, has_objects, noted
        self._shares: dict[bytes, _Share] = {}
        self._awaiting: set[asyncio.Future[bool]] = set()
        """Streams that wait until this node joins an object."""
        self._spare: dict[int, tuple[float, Link]] = {}
        self._asked: dict[int, _Questions] = {}
        self._opening: dict[int, asyncio.Task[_Questions | None]] = {}
        self._guests: Counter[str] = Counter()
        self._guest_sockets: set[socket.socket] = set()
        self._fed: list[SourceRecord] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_closed = False
        self._closing = threading.Lock()
        self._pool = ThreadPoolExecutor(_STORE_THREADS, "fanout-store")
        self._listener = _listen(addresses[own][1]) if listener is None else listener
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self.clock = Clock(self._loop)
        self._documents = Documents(
            own,
            self._trees,
            loop=self._loop,
            spawn=self.spawn,
            open_link=self._link,
            keep_link=self._keep_link,
            read_store=lambda key: self._loop.run_in_executor(self._pool, read_document, key),
        )
        self._thread = threading.Thread(target=self._run, name="fanout", daemon=True)
        self._thread.start()

    # For users, in any thread

    def join(
        self,
        name: bytes,
        file: Path,
        origin: Origin,
        in_flight: int = _STORE_IN_FLIGHT,
        store_moved_s: Callable[[], float] = _never,
    ) -> None:
        """Begin to get the object `name` into `file`, and to feed it to others. Does not wait.

        `in_flight`: chunks of each tree that may be read from the store at once.
        `store_moved_s`: returns the monotonic time at which bytes came from the store last, also
        those of chunks that are not whole yet. Any thread.

        Raises: OSError when the file cannot be made; UnavailableError when closed.
        """
        number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._call(self._join(name, origin, number, in_flight, store_moved_s))
        except BaseException:
            os.close(number)
            raise

    def fetch(self, name: bytes, index: int, silence_s: float = 10.0) -> bytes:
        """Return a chunk of a joined object, verified.

        Raises: DeadlineError when nothing of the object has come for `silence_s`, and other
        BootseerErrors: read the store then.
        """
        share = self._shares.get(name)
        if share is None:
            raise UnavailableError(f"the object {name.hex()[:12]} does not travel by fan-out")
        since_s = time.monotonic()
        with share.lock:
            while share.chunks is None or not share.has[index]:
                if share.error is not None:
                    raise UnavailableError(f"fan-out has failed: {share.error}") from share.error
                left_s = silence_s - (time.monotonic() - max(since_s, share.moved_s))
                if left_s <= 0:
                    raise DeadlineError(f"no node has sent anything for {silence_s:g} s")
                share.lock.wait(left_s)
            chunks = share.chunks
        return os.pread(share.file, chunks.lengths[index], chunks.offsets[index])

    def decline(self, name: bytes) -> None:
        """Refuse an object that this node already has: nodes that ask for it do not wait.

        Raises: UnavailableError when closed.
        """
        self._call(self._decline(name))

    def watch(self, name: bytes, told: Callable[[tuple[int, ...], bool], bool]) -> None:
        """Tell a user how far a joined object has come.

        `told` is called at once and after each change with the count of chunks of each tree and
        whether the object has ended, which is the last call; about every second also while bytes
        come, to this node or to those that feed it. It must not wait, and returns whether it could
        take the news, if not it is called again; an OSError ends the calls. Mostly in the thread of
        the loop, at last in that which calls `close`.

        Raises: UnavailableError when closed.
        """
        self._call(self._watch(name, told))

    @property
    def has_everything(self) -> bool:
        """Whether objects were joined and each is here as a whole, or has failed."""
        joined = self._joined()
        return bool(joined) and all(
            share.error is not None or share.is_complete for share in joined
        )

    @property
    def moved_s(self) -> float:
        """The monotonic time at which an object was joined or its bytes came last; 0.0 if none."""
        return max((share.moved_s for share in self._joined()), default=0.0)

    def _joined(self) -> list[_Share]:
        return [share for share in list(self._shares.values()) if share.file >= 0]

    def document(self, key: str) -> Future[tuple[bytes, bool]]:
        """Begin to look for a document; see `Documents.get`. `close` cancels the future.

        Raises: UnavailableError if closed.
        """
        return self._begin(self._documents.get(key))

    def put(self, name: bytes, index: int, data: bytes) -> None:
        """Add a chunk that a user has read from the store. Raises: CorruptError."""
        self._call(self._put(name, index, data))

    def source_records(self) -> list[SourceRecord]:
        """Return the sources of this node so far, in the order in which they began."""
        return list(self._fed)

    def close(self) -> None:
        """Stop serving. Files stay. Idempotent."""
        with self._closing:
            if self.is_closed:
                return
            self.is_closed = True
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()
        for share in self._shares.values():
            share.fail(UnavailableError("fan-out is closed"))
            if share.file >= 0:
                os.close(share.file)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # The loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._listener, self._accept)
        try:
            self._loop.run_forever()
            self._loop.remove_reader(self._listener)
            # Also what a task has begun: a task that is cancelled while it ends others leaves it.
            # The callbacks of the last tasks run, too: threads wait for them.
            while self._loop.run_until_complete(self._cancel_tasks()):
                pass
        finally:
            self._listener.close()
            for one in self._asked.values():
                one.close()
            for _, link in self._spare.values():
                link.close()
            # Connections whose task was cancelled before it began.
            for sock in self._guest_sockets:
                sock.close()
            self._loop.close()

    async def _cancel_tasks(self) -> bool:
        """Cancel all tasks that there are, and wait for them; return whether there were any."""
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks) if tasks else await asyncio.sleep(0)
        return bool(tasks)

    def _stop(self) -> None:
        self._loop.stop()

    def _call(self, what: Coroutine[Any, Any, None]) -> None:
        try:
            self._begin(what).result()
        except CancelledError:
            raise UnavailableError("fan-out is closed") from None

    def _begin(self, what: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin a task in the loop, which `close` cancels. Raises: UnavailableError if closed."""
        # Under the lock, so that the loop does not stop before it has taken the task.
        with self._closing:
            if self.is_closed:
                what.close()
                raise UnavailableError("fan-out is closed")
            return asyncio.run_coroutine_threadsafe(what, self._loop)

    def spawn(self, what: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Begin a task that is cancelled when this object is closed. In the loop's thread."""
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _share(self, name: bytes) -> _Share:
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = _Share(name)
            for waiting in self._awaiting:
                settle(waiting, True)
        return share

    async def _join(
        self,
        name: bytes,
        origin: Origin,
        file: int,
        in_flight: int,
        store_moved_s: Callable[[], float],
    ) -> None:
        share = self._share(name)
        if share.file >= 0:
            raise InvalidInputError(f"the object {name.hex()[:12]} is joined already")
        share.joined(origin, file)
        share.in_flight, share.store_moved_s = in_flight, store_moved_s
        now_s = time.monotonic()
        share.plans = [
            SourcePlan(self._trees, self._own, tree, chunk_bytes=1 << 20, random=dice, now_s=now_s)
            for tree in range(TREE_COUNT)
        ]
        share.describe()
        for tree, plan in enumerate(share.plans):
            plan.other = share.plans[1 - tree]
        for tree in range(TREE_COUNT):
            follower = _Follower(self, share, tree)
            self.clock.add(follower.look)
            follower.look()

    async def _watch(self, name: bytes, told: Callable[[tuple[int, ...], bool], bool]) -> None:
        _Watcher(self._shares[name], told, self.clock)

    async def _decline(self, name: bytes) -> None:
        share = self._share(name)
        if share.file < 0:
            share.fail(UnavailableError("this node has no need of it"))

    async def _put(self, name: bytes, index: int, data: bytes) -> None:
        share = self._shares.get(name)
        if share is not None and share.chunks is not None and share.error is None:
            self._accept_chunk(share, index, _Buffer(memoryview(data)))

    def _accept_chunk(self, share: _Share, index: int, buffer: _Buffer) -> None:
        """Add a chunk; a full disk fails the object. Raises: CorruptError."""
        try:
            share.accept(index, buffer)
        except OSError as error:
            ours = from_oserror(error, "keep a chunk of an object that travels by fan-out")
            logger.warning("%s; it is read from the store", ours)
            share.fail(ours)

    # Getting

    def new_record(self, share: _Share, tree: int, source: int) -> SourceRecord:
        """Return a new line of the report."""
        fed = SourceRecord(share.name, tree, source)
        self._fed.append(fed)
        return fed

    async def read(self, share: _Share, tree: int, step: Take | Help, fed: SourceRecord) -> Reason:
        """Read chunks from a source until it ends or fails; return the reason."""
        began_s = self._loop.time()
        try:
            if step.source == STORE:
                await self._read_store(share, tree, fed)
            else:
                return await self._read_node(share, tree, step, fed)
        except CorruptError as error:
            logger.warning("fan-out: node %d is not asked any more: %s", step.source, error)
            return Reason.WRONG
        except TimeoutError:
            return Reason.SILENT
        except OSError:
            return Reason.REFUSED
        finally:
            fed.seconds = self._loop.time() - began_s
        return Reason.CLOSED

    def _alive(self, share: _Share, tree: int, fed: SourceRecord) -> Callable[[int], None]:
        """Return a function that counts bytes of a source."""
        plan = share.plans[tree]

        def moved(count: int) -> None:
            fed.byte_count += count
            share.moved_s = share.above_s[tree] = now_s = time.monotonic()
            if plan.source == fed.source:
                share.received[tree] += count
                plan.received(now_s, share.received[tree])

        return moved

    async def _read_node(
        self, share: _Share, tree: int, step: Take | Help, fed: SourceRecord
    ) -> Reason:
        """Read the frames of another node. Raises: CorruptError, TimeoutError, OSError."""
        count = step.first if isinstance(step, Help) else share.counts[tree]
        leaves_store, needs_list = isinstance(step, Take) and step.leaves_store, not share.chunks
        request = Request(protocol.FEED, tree, count, share.name, leaves_store, needs_list)
        link = await self._link(step.source, SILENCE_S)
        try:
            await link.send(request.encode(), SILENCE_S)
            frames = self._frames(share, tree, count, fed, needs_list=needs_list)
            return await link.run(frames, SILENCE_S, self.clock)
        finally:
            link.close()

    def _frames(
        self, share: _Share, tree: int, count: int, fed: SourceRecord, *, needs_list: bool
    ) -> Generator[Wanted, int, Reason]:
        """Take the frames of another node, from its chunk `count` on. Raises: CorruptError."""
        node, plan, nodes = fed.source, share.plans[tree], len(self._addresses)
        moved, head_bytes = self._alive(share, tree, fed), protocol.FRAME_BYTES
        buffer: _Buffer | None = None
        have, is_flowing = 0, False
        try:
            while not share.is_whole(tree) and share.error is None:
                buffer = buffer or share.take_buffer(count * TREE_COUNT + tree)
                # Where chunks flow, one wake-up for a chunk with its head.
                room = buffer.frame if is_flowing else buffer.frame[:head_bytes]
                have = yield room, have, head_bytes, None
                frame = protocol.decode_frame(buffer.frame[:head_bytes], node, nodes)
                if plan.source == node:
                    plan.offered(time.monotonic(), frame.offer)
                if frame.kind == protocol.BEAT:
                    came_s = time.monotonic() - frame.length / 1000
                    share.above_s[tree] = max(share.above_s[tree], came_s)
                    plan.above(came_s)
                if frame.kind == protocol.BUSY:
                    return Reason.BUSY
                if node not in (plan.source, plan.helper):
                    return Reason.CIRCLE
                if frame.kind == protocol.LIST:
                    # Bytes of lists would pass for progress, if there were lists without end.
                    if not needs_list or is_flowing:
                        raise CorruptError("a list of chunks that was not asked for")
                    needs_list = False
                    listed = memoryview(bytearray(frame.length))
                    yield listed, 0, frame.length, moved
                    share.accept_list(listed)
                    buffer, have = None, 0
                elif frame.kind == protocol.CHUNK:
                    index, chunks = count * TREE_COUNT + tree, share.chunks
                    if chunks is None or index >= len(chunks.lengths):
                        raise CorruptError("a chunk that the object does not have")
                    if frame.length != chunks.lengths[index]:
                        raise CorruptError(f"chunk {index} has another length than it should")
                    if share.has[index] and plan.source == node and plan.helper is not None:
                        return Reason.OVERTAKEN
                    moved(have - head_bytes)
                    yield buffer.frame, have, len(buffer.frame), moved
                    whole, buffer = buffer, None
                    self._accept_chunk(share, index, whole)
                    have, is_flowing, count = 0, True, count + 1
                    plan.count = share.counts[tree]
                    if count == plan.length:
                        return Reason.WHOLE
                elif frame.kind != protocol.BEAT:
                    raise CorruptError("a frame that does not belong to an object")
                else:
                    # Bytes behind a beat are the beginning of the next frame.
                    have -= head_bytes
                    buffer.frame[:have] = bytes(buffer.frame[head_bytes:][:have])
                    is_flowing = have > 0
            return Reason.CLOSED
        finally:
            if buffer is not None:
                share.release(buffer)

    async def _read_store(self, share: _Share, tree: int, fed: SourceRecord) -> None:
        """Read the chunks of a tree from the store. Raises: CorruptError, OSError."""
        moved, origin, run = self._alive(share, tree, fed), share.origin, self._loop.run_in_executor
        assert origin is not None
        try:
            if share.chunks is None:
                share.accept_list(await run(self._pool, origin.chunk_list))
            chunks = share.chunks
            assert chunks is not None
            todo = iter(
                range(share.counts[tree] * TREE_COUNT + tree, len(chunks.lengths), TREE_COUNT)
            )

            async def lane() -> None:
                for index in todo:
                    if share.has[index]:
                        continue
                    place = chunks.offsets[index], chunks.lengths[index]
                    data = await run(self._pool, origin.chunk, index, *place)
                    moved(len(data))
                    self._accept_chunk(share, index, _Buffer(memoryview(data)))
                    del data  # Not kept while the next chunk is awaited.
                    share.plans[tree].count = share.counts[tree]

            async with asyncio.TaskGroup() as group:
                for _ in range(share.in_flight):
                    group.create_task(lane())
        except* Exception as group_error:
            error = group_error.exceptions[0]
            logger.warning("fan-out: the store cannot be read: %s", error)
            await asyncio.sleep(_STORE_PAUSE_S)
            raise ConnectionError(str(error)) from error

    # Asking

    async def ask(self, share: _Share, tree: int, nodes: Sequence[int]) -> list[Offer]:
        """Return the offers of the nodes that answer within `ASK_S`."""
        request = Request(protocol.ASK, tree, share.counts[tree], share.name).encode()
        answers = {self._ask_one(node, request) for node in nodes}
        until_s, left, most = self._loop.time() + ASK_S, answers, len(answers) / 2
        try:
            while left and (wait_s := until_s - self._loop.time()) > 0:
                done, left = await asyncio.wait(left, timeout=min(wait_s, _LATE_ANSWER_S))
                if not done and len(left) < most:
                    break
        finally:
            for answer in left:
                answer.cancel()
        return [offer for one in answers - left if (offer := one.result()) is not None]

    def _ask_one(self, node: int, request: bytes) -> "asyncio.Future[Offer | None]":
        """Ask a node; the result is None if it cannot be reached."""
        asked = self._asked.get(node)
        if asked is not None and asked.is_usable:
            return asked.ask(request)
        return self.spawn(self._ask_anew(node, request))

    async def _ask_anew(self, node: int, request: bytes) -> Offer | None:
        if node not in self._opening:
            self._opening[node] = self.spawn(self._open_questions(node))
        asked = await asyncio.shield(self._opening[node])
        return None if asked is None else await asked.ask(request)

    async def _open_questions(self, node: int) -> _Questions | None:
        """Open a connection for questions, one for all that ask; None if that fails."""
        try:
            if (old := self._asked.pop(node, None)) is not None:
                old.close()
            link = await self._link(node, ASK_S)
        except (OSError, TimeoutError, CorruptError):
            return None
        finally:
            del self._opening[node]
        asked = self._asked[node] = _Questions(link, node, len(self._addresses), self.clock)
        return asked

    async def _link(self, node: int, limit_s: float) -> Link:
        """Return a connection to a node, which may be left from a question."""
        if node in self._asked and (asked := self._asked[node].take()) is not None:
            del self._asked[node]
            return asked
        used_s, link = self._spare.pop(node, (0.0, None))
        if link is not None and self._loop.time() - used_s < _SPARE_S:
            return link
        if link is not None:
            link.close()
        hello = Hello(self._own, node, os.urandom(protocol.NONCE_BYTES))
        if self._noted is None:
            return await connect(self._addresses[node], hello, self._key, limit_s)
        async with asyncio.timeout(limit_s):
            address = await self._loop.run_in_executor(None, self._noted.find, node)
        try:
            return await connect(address, hello, self._key, limit_s)
        except (OSError, TimeoutError, CorruptError):
            self._noted.forget(node)
            raise

    def _keep_link(self, node: int, link: Link) -> None:
        """Keep a connection after a question for the next one, or close it."""
        if len(self._spare) < _SPARE_LINKS_MAX and node not in self._spare:
            self._spare[node] = self._loop.time(), link
        else:
            link.close()

    # Feeding

    def _accept(self) -> None:
        """Take a connection; the loop calls this when there is one.

        Not by `loop.sock_accept`, which loses a connection if it is cancelled just then.
        """
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("fan-out: no connection can be taken: %s", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(1.0, self._loop.add_reader, self._listener, self._accept)
            return
        host = address[0]
        if (
            len(self._guest_sockets) >= _CONNECTIONS_MAX
            or self._guests[host] >= _ADDRESS_CONNECTIONS_MAX
        ):
            sock.close()
            return
        sock.setblocking(False)
        self._guests[host] += 1
        self._guest_sockets.add(sock)
        self.spawn(self._serve(sock, host))

    async def _serve(self, sock: socket.socket, host: str) -> None:
        """Answer the requests of one connection."""
        link: Link | None = None
        try:
            link = Link(sock)
            child = await welcome(link, self._own, self._key, _PROOF_S)
            todo = iter(range(_REQUESTS_MAX))
            while request := await link.run(self._requests(link, todo), _IDLE_S, self.clock):
                if request.operation == protocol.KEEP:
                    await self._keep(link, request)
                    break
                if not self._has_objects:
                    break
                if request.operation == protocol.FEED:
                    await self._feed(link, child, request)
                    break
                await self._documents.serve(link, request)
        except (CorruptError, UnknownFormatError) as error:
            logger.info("fan-out: refused %s: %s", host, error)
        except (OSError, TimeoutError):
            pass
        finally:
            (link or sock).close()
            self._guest_sockets.discard(sock)
            self._guests[host] -= 1
            self._guests += Counter()  # forget those with none

    def _requests(self, link: Link, todo: Iterator[int]) -> Generator[Wanted, int, Request | None]:
        """Answer questions; return a request of another kind, or None after too many."""
        asked = memoryview(bytearray(protocol.REQUEST_BYTES))
        for _ in todo:
            yield asked, 0, protocol.REQUEST_BYTES, None
            request = protocol.decode_request(asked)
            if request.operation != protocol.ASK or not self._has_objects:
                return request
            share = self._shares.get(request.name)
            offer = (
                Offer(self._own, 0, 0, ())
                if share is None
                else share.offer(self._own, request.tree)
            )
            if not link.send_some([memoryview(protocol.encode_offer(offer))]):
                raise ConnectionAbortedError("a child asks and takes no answers")
        return None

    async def _keep(self, link: Link, request: Request) -> None:
        """Take a node's timeline, and tell the node when it is in the store."""
        gathering, length = self._gathering, request.count
        if gathering is None or not gathering.has_room(length):
            await link.send(REFUSED, ASK_S)
            return
        data = bytes(await link.receive(memoryview(bytearray(length)), SILENCE_S))
        if content_digest(data) != request.name:
            raise CorruptError("a timeline that is handed over does not match its digest")
        kept = asyncio.wrap_future(gathering.keep(data))
        while not (await asyncio.wait([kept], timeout=HEARTBEAT_S))[0]:
            await link.send(WAITING, ASK_S)
        await link.send(KEPT if kept.result() else REFUSED, ASK_S)

    async def _feed(self, link: Link, child: int, request: Request) -> None:
        """Send the chunks of a tree as they come, and beats meanwhile."""
        tree = request.tree
        share = self._shares.get(request.name)
        if share is None:
            share = await self._awaited(link, request.name)
        is_member = child < self._trees.node_count
        is_child = is_member and self._trees.parent(tree, child) == self._own
        offer = share.offer(self._own, tree)
        if share.error is not None or not has_room(
            offer.streams, is_child=is_child, leaves_store=request.leaves_store
        ):
            await link.send(protocol.encode_frame(protocol.BUSY, 0, offer), ASK_S)
            return
        if request.count == 0 and is_member and share.plans:
            share.plans[tree].began(time.monotonic(), child)
        await _Stream(link, share, self._own, request).run(self.clock)

    async def _awaited(self, link: Link, name: bytes) -> _Share:
        """Wait until this node joins an object. Raises: TimeoutError, ConnectionError."""
        until_s = self._loop.time() + _IDLE_S
        while self._loop.time() < until_s:
            offer = Offer(self._own, 0, 0, ())
            await link.send(protocol.encode_frame(protocol.BEAT, 0, offer), _STALLED_S)
            waiting: asyncio.Future[bool] = self._loop.create_future()
            self._awaiting.add(waiting)
            try:
                await asyncio.wait([waiting], timeout=HEARTBEAT_S)
            finally:
                self._awaiting.discard(waiting)
            if (share := self._shares.get(name)) is not None:
                return share
        raise TimeoutError("nobody here wants that object")


def _cancel(task: "asyncio.Task[Any] | None") -> None:
    """Cancel a task, which does nothing more then but close what it has opened."""
    if task is not None:
        task.cancel()


def _listen(port: int) -> socket.socket:
    """Return a socket that listens at all addresses, IPv4 and IPv6 where there is one."""
    with contextlib.suppress(ValueError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
