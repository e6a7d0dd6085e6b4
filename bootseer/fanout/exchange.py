"""Exchange of objects between the nodes of a job: one node receives them and sends them on.

Each object that the node joins is a `Share`: a file that fills up with verified chunks, which go on
to the nodes that this one feeds. For each of its two trees a `_Follower` carries out the
`SourcePlan`: it reads from another node or from the store, and changes when the plan says so. The
other nodes are reached through `Neighbours`.

Thread safety: any thread may call the public methods of `Exchange`. All else runs in the thread of
its event loop. An exchange does not survive fork(2).
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from bootseer.base.closing import Closing
from bootseer.base.content_digest import content_digest
from bootseer.errors import (
    CorruptError,
    InvalidInputError,
    UnavailableError,
    UnknownFormatError,
)
from bootseer.fanout import protocol
from bootseer.fanout.addresses import NotedAddresses
from bootseer.fanout.connection import Clock, Link, Wanted, settle, welcome
from bootseer.fanout.documents import Documents
from bootseer.fanout.gathering import KEPT, REFUSED, WAITING, Gathering
from bootseer.fanout.neighbours import Neighbours
from bootseer.fanout.plan import (
    ASK_S,
    HEARTBEAT_S,
    SILENCE_S,
    Help,
    Line,
    Offer,
    Reason,
    SourcePlan,
    Step,
    Take,
    has_room,
)
from bootseer.fanout.protocol import Request
from bootseer.fanout.share import STORE_IN_FLIGHT, Buffer, Origin, Share, Told, never
from bootseer.fanout.trees import STORE, TREE_COUNT, Trees
from bootseer.transfer.policy import random_fraction

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_PROOF_S = 2.0
_IDLE_S = 10.0
"""Time after which a connection without a request is closed."""
_STALLED_S = 5.0
"""Time after which a child that takes no beats while it waits is left."""
_LATE_CHUNK_S = 1.0
"""A chunk that takes longer from the store while other objects travel, too, shows that its line is
full: more chunks at once then come no sooner, and the first one of each object comes later."""
_STORE_THREADS = 32
_STORE_PAUSE_S = 1.0
_CONNECTIONS_MAX = 512
"""A group of nodes that hand over their timelines, and as many others."""
_ADDRESS_CONNECTIONS_MAX = 64
"""Limit of connections from one address: a hostile member cannot take all places."""


_MAPPED = bytes(10) + b"\xff\xff"
"""Beginning of the IPv6 form of an IPv4 address."""


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


class _Follower:
    """Carries out the plan of one tree of an object until all of the tree is here."""

    def __init__(self, exchange: "Exchange", share: Share, tree: int) -> None:
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
            exchange.line.leave(share.plans[tree])
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
        self._own, self._key = own, key
        self._trees = Trees(len(addresses)) if trees is None else trees
        self._gathering, self._has_objects = gathering, has_objects
        self._shares: dict[bytes, Share] = {}
        self.line = Line(time.monotonic())
        self._awaiting: set[asyncio.Future[bool]] = set()
        """Streams that wait until this node joins an object."""
        self._guests: Counter[str] = Counter()
        self._guest_sockets: set[socket.socket] = set()
        self._strangers: dict[socket.socket, _Stranger] = {}
        """Connections without a proof, the oldest one first."""
        self._fed: list[SourceRecord] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_closed = False
        self._closing = threading.Lock()
        self._pool = ThreadPoolExecutor(_STORE_THREADS, "fanout-store")
        self._listener = _listen(addresses[own][1]) if listener is None else listener
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self.clock = Clock(self._loop)
        self._neighbours = Neighbours(
            addresses, own, key, loop=self._loop, clock=self.clock, spawn=self.spawn, noted=noted
        )
        self._documents = Documents(
            own,
            self._trees,
            loop=self._loop,
            spawn=self.spawn,
            open_link=self._neighbours.connect,
            keep_link=self._neighbours.keep,
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
        in_flight: int = STORE_IN_FLIGHT,
        store_moved_s: Callable[[], float] = never,
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

    def decline(self, name: bytes) -> None:
        """Refuse an object that this node already has: nodes that ask for it do not wait.

        Raises: UnavailableError when closed.
        """
        self._call(self._decline(name))

    def watch(self, name: bytes, told: Told) -> None:
        """Tell a user how far a joined object has come.

        `told` is called at once and after each change with the count of chunks of each tree and
        whether the object has ended, which is the last call; about every second also while bytes
        come, to this node or to those that feed it. It must not wait, and returns whether it could
        take the news, if not it is called again; an OSError ends the calls. Mostly in the thread of
        the loop, at last in that which calls `close`.

        Raises: UnavailableError when closed, or if the object was not joined.
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

    def _joined(self) -> list[Share]:
        return [share for share in list(self._shares.values()) if share.is_joined]

    def document(self, key: str) -> Future[tuple[bytes, bool]]:
        """Begin to look for a document; see `Documents.get`. `close` cancels the future.

        Raises: UnavailableError if closed.
        """
        return self._begin(self._documents.get(key))

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
            share.close(UnavailableError("fan-out is closed"))
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
            self._neighbours.close()
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

    def _share(self, name: bytes) -> Share:
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name)
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
        if share.is_joined:
            raise InvalidInputError(f"the object {name.hex()[:12]} is joined already")
        if share.error is not None:
            # Declined before: one process of the node has the object, and another one lacks it.
            del self._shares[name]
            share = self._share(name)
        now_s = time.monotonic()
        plans = [
            SourcePlan(
                self._trees,
                self._own,
                tree,
                chunk_bytes=1 << 20,
                random=random_fraction,
                now_s=now_s,
            )
            for tree in range(TREE_COUNT)
        ]
        for plan in plans:
            plan.line = self.line
            self.line.join(plan)
        share.join(file, plans, origin, in_flight, store_moved_s)
        for tree in range(TREE_COUNT):
            follower = _Follower(self, share, tree)
            self.clock.add(follower.look)
            follower.look()

    async def _watch(self, name: bytes, told: Told) -> None:
        share = self._shares.get(name)
        if share is None:
            raise UnavailableError(f"the object {name.hex()[:12]} does not travel by fan-out")
        share.watch(told, self.clock)

    async def _decline(self, name: bytes) -> None:
        share = self._share(name)
        if not share.is_joined:
            share.fail(UnavailableError("this node has no need of it"))

    # Getting

    def new_record(self, share: Share, tree: int, source: int) -> SourceRecord:
        """Return a new line of the report."""
        fed = SourceRecord(share.name, tree, source)
        self._fed.append(fed)
        return fed

    async def read(self, share: Share, tree: int, step: Take | Help, fed: SourceRecord) -> Reason:
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

    def _alive(self, share: Share, tree: int, fed: SourceRecord) -> Callable[[int], None]:
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
        self, share: Share, tree: int, step: Take | Help, fed: SourceRecord
    ) -> Reason:
        """Read the frames of another node. Raises: CorruptError, TimeoutError, OSError."""
        count = step.first if isinstance(step, Help) else share.counts[tree]
        leaves_store, needs_list = isinstance(step, Take) and step.leaves_store, not share.chunks
        request = Request(protocol.FEED, tree, count, share.name, leaves_store, needs_list)
        link = await self._neighbours.connect(step.source, SILENCE_S)
        try:
            await link.send(request.encode(), SILENCE_S)
            frames = self._frames(share, tree, count, fed, needs_list=needs_list)
            return await link.run(frames, SILENCE_S, self.clock)
        finally:
            link.close()

    def _frames(
        self, share: Share, tree: int, count: int, fed: SourceRecord, *, needs_list: bool
    ) -> Generator[Wanted, int, Reason]:
        """Take the frames of another node, from its chunk `count` on. Raises: CorruptError."""
        node, plan, nodes = fed.source, share.plans[tree], self._trees.node_count
        moved, head_bytes = self._alive(share, tree, fed), protocol.FRAME_BYTES
        buffer: Buffer | None = None
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
                    share.accept(index, whole)
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

    async def _read_store(self, share: Share, tree: int, fed: SourceRecord) -> None:
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

            plan = share.plans[tree]
            lane_count = share.in_flight if self.line.is_free_for(plan) else 1

            async def lane() -> None:
                nonlocal lane_count
                for index in todo:
                    if share.has[index]:
                        continue
                    began_s = self._loop.time()
                    place = chunks.offsets[index], chunks.lengths[index]
                    data = await run(self._pool, origin.chunk, index, *place)
                    moved(len(data))
                    share.accept(index, Buffer(memoryview(data)))
                    del data  # Not kept while the next chunk is awaited.
                    plan.count = share.counts[tree]
                    is_late = self._loop.time() - began_s > _LATE_CHUNK_S
                    if not is_late and lane_count < share.in_flight:
                        lane_count += 1
                        group.create_task(lane())
                    elif is_late and lane_count > 1 and not self.line.is_free_for(plan):
                        lane_count -= 1
                        return

            async with asyncio.TaskGroup() as group:
                for _ in range(lane_count):
                    group.create_task(lane())
        except* Exception as group_error:
            error = group_error.exceptions[0]
            logger.warning("fan-out: the store cannot be read: %s", error)
            await asyncio.sleep(_STORE_PAUSE_S)
            raise ConnectionError(str(error)) from error

    async def ask(self, share: Share, tree: int, nodes: Sequence[int]) -> list[Offer]:
        """Return the offers of the nodes that answer in time."""
        request = Request(protocol.ASK, tree, share.counts[tree], share.name)
        return await self._neighbours.ask(nodes, request.encode())

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
        if not self._has_place(host):
            sock.close()
            return
        sock.setblocking(False)
        self._guests[host] += 1
        self._guest_sockets.add(sock)
        serving = self.spawn(self._serve(sock, host))
        self._strangers[sock] = _Stranger(host, _network_of(host), serving)

    def _has_place(self, host: str) -> bool:
        """Return whether there is a place for a connection of `host`.

        A connection that has not proved to have the key gives way to the new one: who has no key
        takes no places of members, who prove it within a round trip. A whole network has the
        strangers of one address only: members may be many neighbours, and are no strangers.
        """
        network, strangers = _network_of(host), self._strangers
        is_host_full = self._guests[host] >= _ADDRESS_CONNECTIONS_MAX
        neighbours = [sock for sock, one in strangers.items() if one.network == network]
        is_network_full = len(neighbours) >= _ADDRESS_CONNECTIONS_MAX
        if is_host_full:
            leaving = next((sock for sock in neighbours if strangers[sock].host == host), None)
        elif is_network_full:
            leaving = neighbours[0]
        elif len(self._guest_sockets) < _CONNECTIONS_MAX:
            return True
        else:
            leaving = next(iter(strangers), None)
        if leaving is None:
            return False
        strangers.pop(leaving).serving.cancel()
        return True

    async def _serve(self, sock: socket.socket, host: str) -> None:
        """Answer the requests of one connection."""
        link: Link | None = None
        try:
            link = Link(sock)
            child = await welcome(link, self._own, self._key, _PROOF_S)
            self._strangers.pop(sock, None)
            todo = iter(range(protocol.REQUESTS_MAX))
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
            self._strangers.pop(sock, None)
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
        await share.feed(link, self._own, request, self.clock)

    async def _awaited(self, link: Link, name: bytes) -> Share:
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


class _Stranger(Struct, frozen=True):
    """Connection that has not proved to have the key."""

    host: str
    network: str
    serving: asyncio.Task[None]


def _network_of(host: str) -> str:
    """Return the network of an IPv6 address, all of which one machine may have; else the address.

    IPv4 addresses come as IPv6 addresses, too, and are networks of their own.
    """
    try:
        address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    except OSError:
        return host
    return host if address.startswith(_MAPPED) else address[:8].hex()


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
