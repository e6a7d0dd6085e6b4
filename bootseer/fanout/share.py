"""Object of a fan-out on one node: a file that fills up with verified chunks, and who gets them.

A chunk is verified before it is written, and only a written chunk is offered, told to users or
sent. An object whose file cannot be written any more fails: its users read the store, and its
children read from other nodes.

Whoever receives a chunk takes a `Buffer` for it, and gives it back by `Share.accept` or
`Share.release`. The last chunk of each tree stays in memory, from which it is sent to all children
that are ready, in the callback in which it came: that costs half as much as from the file. A buffer
is used for another chunk when it is not the last one of its tree and no stream sends it. A stream
that is slow in the middle of a chunk sends the rest from the file, and nobody holds memory when no
chunk comes any more, so that the memory of an object is some chunks, whatever its children do.

For the event loop's thread; other threads may read single figures.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bootseer.base.content_digest import content_digest
from bootseer.errors import BootseerError, CorruptError, from_oserror
from bootseer.fanout import protocol
from bootseer.fanout.connection import Clock, Link
from bootseer.fanout.objects import ChunkList, decode_list
from bootseer.fanout.plan import CHILD_STREAMS_MAX, STUCK_S, Offer, SourcePlan
from bootseer.fanout.protocol import Request
from bootseer.fanout.trees import STORE, TREE_COUNT, chunks_of

logger = logging.getLogger(__name__)

STORE_IN_FLIGHT = 2
"""Chunks of a tree that are read from the store at once, unless the object says otherwise."""
_STALLED_S = 5.0
"""Time after which a child that takes no bytes loses its stream."""
_AHEAD_S = 2.0
"""Time for which a child that has more chunks than this node keeps its place. A child that returns
to its parent, or moves to a stand-in, is at most as far ahead."""
_BEAT_TICKS = 2
"""Ticks of the clock without a chunk after which a beat is sent: at most `HEARTBEAT_S`."""
_TELL_EVERY_S = 1.0
"""Interval in which a user learns that bytes come although no chunk is whole."""

Told = Callable[[tuple[int, ...], bool], bool]
"""Function of a user: takes the counts of the trees and whether the object has ended; see
`Exchange.watch`."""


class Origin(Protocol):
    """Store of an object. Called from threads; may block; raises as stores do."""

    def chunk_list(self) -> bytes:
        """Return the encoded list of chunks."""

    def chunk(self, index: int, offset: int, length: int) -> bytes:
        """Return the bytes of one chunk."""


def never() -> float:
    """Return a time before all others, of bytes that nobody tells of."""
    return 0.0


class Buffer:
    """Memory of one chunk, which may be being sent while the next one is received."""

    __slots__ = ("data", "frame", "index", "senders")

    def __init__(self, frame: memoryview, head_bytes: int = 0) -> None:
        self.frame, self.data = frame, frame[head_bytes:]
        """The chunk with the head of its frame, if it came with one; the chunk."""
        self.index, self.senders = -1, 0


class Share:
    """State of one object on this node: chunks, file, plans, streams and users."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.file = -1
        self.origin: Origin | None = None
        """Store of the object."""
        self.in_flight = STORE_IN_FLIGHT
        self.chunks: ChunkList | None = None
        self.encoded_list = memoryview(b"")
        """List of chunks as all streams send it: up to 9 MiB."""
        self.has = bytearray()
        self._lengths = [0] * TREE_COUNT
        self.counts = [0] * TREE_COUNT
        """Chunks of each tree that are here, from the first one on."""
        self.received = [0] * TREE_COUNT
        """Bytes that the sources of each tree have sent, without those of helpers."""
        self.error: BootseerError | None = None
        self.moved_s = time.monotonic()
        """Time at which bytes came last."""
        self.above_s = [self.moved_s] * TREE_COUNT
        """Times at which bytes of each tree came last to the nodes that feed this one."""
        self.store_moved_s: Callable[[], float] = never
        """Returns the time at which bytes last came from the store, also of unfinished chunks."""
        self.is_joined = False
        self.plans: list[SourcePlan] = []
        # For the classes below: nodes that are fed in each tree, users, and the last chunk of each
        # tree.
        self.streams: list[set[_Stream]] = [set() for _ in range(TREE_COUNT)]
        self.watchers: set[_Watcher] = set()
        self.latest: list[Buffer | None] = [None] * TREE_COUNT
        self._spare: list[memoryview] = []

    def join(
        self,
        file: int,
        plans: Sequence[SourcePlan],
        origin: Origin,
        in_flight: int,
        store_moved_s: Callable[[], float],
    ) -> None:
        """Begin to receive the object into `file`, which `close` closes."""
        self.file, self.origin, self.in_flight = file, origin, in_flight
        self.store_moved_s = store_moved_s
        self.moved_s, self.is_joined = time.monotonic(), True
        self.plans = list(plans)
        for tree, plan in enumerate(plans):
            plan.other = plans[1 - tree]
        self._describe()

    def close(self, error: BootseerError) -> None:
        """Fail the object, and close its file."""
        self.fail(error)
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def watch(self, told: Told, clock: Clock) -> None:
        """Tell a user how far the object has come, see `Exchange.watch`."""
        _Watcher(self, told, clock)

    async def feed(self, link: Link, own: int, request: Request, clock: Clock) -> None:
        """Send a child the chunks of a tree as they come, and beats meanwhile.

        Ends when the child has the whole tree, or the object has failed. Raises: TimeoutError if
        the child takes nothing, OSError.
        """
        if sum(map(len, self.streams)) >= CHILD_STREAMS_MAX:
            for fed in self.streams:
                for stream in fed:
                    stream.end_if_idle()
        await _Stream(self, link, own, request).run(clock)

    def bytes_moved_s(self, tree: int) -> float:
        """Return when bytes of a tree came last, to this node or to those that feed it."""
        if self.plans and self.plans[tree].source == STORE:
            return max(self.above_s[tree], self.store_moved_s())
        return self.above_s[tree]

    def is_whole(self, tree: int) -> bool:
        """Whether all chunks of a tree are here."""
        return self.chunks is not None and self.counts[tree] == self._lengths[tree]

    @property
    def is_complete(self) -> bool:
        """Whether all chunks of both trees are here."""
        return self.chunks is not None and self.counts == self._lengths

    def accept_list(self, data: bytes | memoryview) -> None:
        """Set the list of chunks. Raises: CorruptError if it does not match the object's name."""
        if self.chunks is None:
            encoded = bytes(data)
            chunks = decode_list(encoded, self.name)
            self.encoded_list = memoryview(encoded)
            self.has = bytearray(len(chunks.lengths))
            self._lengths = [chunks_of(tree, len(chunks.lengths)) for tree in range(TREE_COUNT)]
            self.chunks = chunks
            self._describe()
            self._tell()

    def _describe(self) -> None:
        """Pass the size of the object to the plans, if it is known."""
        if self.chunks is not None:
            count = len(self.chunks.lengths)
            for tree, plan in enumerate(self.plans):
                plan.chunk_bytes = self.chunks.offsets[-1] / count
                plan.length = self._lengths[tree]

    def accept(self, index: int, buffer: Buffer) -> None:
        """Verify, write, keep and pass on a chunk; a full disk fails the object.

        The buffer belongs to this object from then on. Raises: CorruptError.
        """
        chunks = self.chunks
        assert chunks is not None
        data = buffer.data
        if self.has[index] or self.error is not None:
            self.release(buffer)
            return
        if len(data) != chunks.lengths[index] or content_digest(data) != chunks.digests[index]:
            raise CorruptError(f"chunk {index} of {self.name.hex()[:12]} does not match its digest")
        try:
            self._write(data, chunks.offsets[index])
        except OSError as error:
            ours = from_oserror(error, "keep a chunk of an object that travels by fan-out")
            logger.warning("%s; it is read from the store", ours)
            self.fail(ours)
            return
        self.has[index] = 1
        tree = index % TREE_COUNT
        at = self.counts[tree] * TREE_COUNT + tree
        while at < len(self.has) and self.has[at]:
            self.counts[tree] += 1
            at += TREE_COUNT
        self.moved_s = time.monotonic()
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

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self.file, data, offset)
            data, offset = data[written:], offset + written

    def take_buffer(self, index: int) -> Buffer:
        """Return memory for a frame with this chunk, for `accept` or `release`.

        If there is no such chunk, or nobody knows the chunks, there is only room for the head.
        """
        lengths = () if self.chunks is None else self.chunks.lengths
        length = protocol.FRAME_BYTES + (lengths[index] if index < len(lengths) else 0)
        while self._spare:
            memory = self._spare.pop()
            if len(memory) >= length:
                return Buffer(memory[:length], protocol.FRAME_BYTES)
        return Buffer(memoryview(bytearray(length)), protocol.FRAME_BYTES)

    def release(self, buffer: Buffer) -> None:
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
        self.error = self.error or error
        self._forget_memory()
        self._tell()

    def _tell(self) -> None:
        """Tell the streams and users that wait for chunks."""
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
        streams = sum(one.has_place(now_s) for fed in self.streams for one in fed)
        if not self.plans:
            return Offer(own, self.counts[tree], streams, ())
        self.plans[tree].count = self.counts[tree]
        return self.plans[tree].offer(now_s, streams)


class _Watcher:
    """User of an object on this node, who is told how far it has come."""

    def __init__(self, share: Share, told: Told, clock: Clock) -> None:
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

    def __init__(self, share: Share, link: Link, own: int, request: Request) -> None:
        self._link, self._share, self._own, self._tree = link, share, own, request.tree
        self._count, self._needs_list = request.count, request.needs_list
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._opened_s = self._begun_s = time.monotonic()
        self._idle_ticks = 0
        self._sending_s: float | None = None
        """Time at which the current chunk was begun."""
        self._is_blocked = False
        """Whether the line takes nothing now."""
        # What is being sent: the rest in memory, which may be this buffer's; then of the file.
        self._left: list[memoryview] = []
        self._buffer: Buffer | None = None
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

    def has_place(self, now_s: float) -> bool:
        """Return whether the stream counts as one that this node feeds."""
        if self._sending_s is not None:
            return now_s - self._sending_s < STUCK_S
        return not self._is_idle(now_s)

    def end_if_idle(self) -> None:
        """End the stream if another one may have its place."""
        if self._is_idle(time.monotonic()) and not self._ended.done():
            self._ended.set_result(True)

    def _is_idle(self, now_s: float) -> bool:
        """Return whether the child has wanted nothing of this node since it came, for long."""
        is_ahead = self._count > self._share.counts[self._tree]
        return is_ahead and now_s - self._opened_s > _AHEAD_S

    def pump(self) -> None:
        """Send what there is, as far as the line takes it. Does not raise."""
        if not self._is_blocked:
            self._go_on()

    def _go_on(self) -> None:
        if self._ended.done():
            return
        try:
            while self._left or self._length or self._begin():
                self._is_blocked = not self._send_some()
                if self._is_blocked:
                    self._link.await_room(self._go_on)
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
            self._sending_s = self._begun_s
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
        self._sending_s = None
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
