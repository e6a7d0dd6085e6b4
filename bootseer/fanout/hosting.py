"""Service that receives the objects which the processes of a node ask for.

`take_part` is the main function of the process (`host`). The main thread waits for the end of the
start and for clients. A request is answered in a thread of its own; the exchange then reports the
progress of the object. Once the start is ready, its objects are given up, and for some minutes the
process passes on timelines. The node's sources become a stage of the start's timeline: when the
start is ready; or, where nobody says that it is, once everything that was asked for has come, and
again for what came later.
"""

import array
import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from datetime import UTC, datetime
from enum import Enum
from functools import partial

from msgspec import Struct

from bootseer.base.requests import request_counts
from bootseer.errors import (
    BootseerError,
    CorruptError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
)
from bootseer.fanout.addresses import NotedAddresses
from bootseer.fanout.exchange import Exchange, SourceRecord
from bootseer.fanout.gathering import (
    GROUP_NODES,
    KEPT,
    MAGIC,
    REFUSED,
    Gathering,
    TimelineRoute,
    gatherer_of,
    handed_bytes,
)
from bootseer.fanout.host import HostPlan
from bootseer.fanout.keys import key_of, shared_secret
from bootseer.fanout.local import (
    HEAD,
    IS_COMING,
    IS_OVER,
    UPDATE,
    SharedObject,
    body_bytes,
    decode_request,
)
from bootseer.fanout.membership import Membership
from bootseer.fanout.objects import ChunkList, chunk_list
from bootseer.fanout.plan import GATHER_S
from bootseer.fanout.trees import STORE, TREE_COUNT, Trees
from bootseer.fanout.whole_reads import (
    ABSENT,
    ANSWER,
    DOCUMENT_BYTES_MAX,
    KEY_BYTES_MAX,
    PRESENT,
    QUESTION,
)
from bootseer.linux.private_files import private_directory
from bootseer.served.control import is_trusted_peer
from bootseer.served.ready_socket import ReadySocket
from bootseer.store import Store, open_own_store, open_store
from bootseer.timeline.otlp import Value
from bootseer.timeline.recorder import current
from bootseer.timeline.stored import gathered_key_of
from bootseer.transfer.chunks import ChunkFetcher
from bootseer.transfer.ranges import Chunk

_log = logging.getLogger(__name__)

_TIMELINES_S = 660.0
"""Timelines are published until ten minutes after the start is ready."""
_CLIENTS_MAX = 64
_REQUEST_S = 5.0
_TELL_S = 2.0
"""Time after which a client that takes no answer is disconnected."""
_LOOK_S = 0.2
_DOCUMENT_S = 6.0
"""Longest wait for a document: longer than ten thousand nodes wait for each other."""
_PROBES_MAX, _PROBE_S = 6, 0.7
_STORE_THREADS = 8
_IN_FLIGHT_MIN, _IN_FLIGHT_MAX, _NEXT_CHUNKS = 2, 8, 16
"""Chunks of a tree that are read from the store at once: half as many as there are stored files
among so many chunks, since each file may be on another server or disk."""
_SOURCES_MAX = 8
_SPARE_SHARE = 0.5
"""Share of the free space on the cache's disk that one object may take."""
_SETTLED_S = 3.0
"""Figures are written once nothing has come for so long. The volumes of a pod are mounted at the
same time, so that a later object is rare."""

WriteStage = Callable[[int, Mapping[str, Value]], None]
"""Function that writes the stage "fan-out": its time in ns since 1970, and its attributes."""


def write_stage(at_ns: int, attributes: Mapping[str, Value]) -> None:
    """Write the stage to the timeline that the environment names, if it names one."""
    timeline = current()
    if timeline is not None:
        timeline.note("fan-out", at_ns, 0, attributes)


def take_part(plan: HostPlan, ours: socket.socket, peers: socket.socket, write: WriteStage) -> None:
    """Receive objects and send objects on until the start is ready; then pass on timelines.

    `write` is called in this thread. Raises: BootseerError, OSError.
    """
    with ours, peers, open_own_store(plan.settings) as store:
        secret = bytes.fromhex(plan.secret) or shared_secret(store, plan.start)
        membership = plan.membership
        addresses = [(one.host, one.port) for one in membership.members]
        key = key_of(secret, membership.digest, *plan.start)
        gathering = _gathering(plan, store)
        trees = Trees(len(addresses), [one.place for one in membership.members])
        noted = None
        if plan.address:
            noted = NotedAddresses(store, plan.start, addresses[membership.own][1])
            noted.note(membership.own, plan.address, plan.settings.node)
        with contextlib.ExitStack() as stack:
            exchange = stack.enter_context(
                Exchange(
                    addresses, membership.own, key, trees,
                    listener=peers.dup(), gathering=gathering,
                    read_document=partial(_read_document, store), noted=noted,
                )
            )  # fmt: skip
            route = TimelineRoute(addresses, membership.own, key, gathering)
            objects = _Objects(plan, exchange, route, stack)
            probe = threading.Thread(
                target=_give_up_alone, args=(membership, trees, noted, objects), daemon=True
            )
            probe.start()
            figures = _Figures(plan, exchange, noted, write)
            end = _wait_for_end(plan, ours, objects, plan.window_s, figures)
            is_alone = objects.has_given_up
            objects.stop()
        figures.write_last(is_alone=is_alone)
        if end is not _End.READY or not plan.settings.publish_timelines:
            return
        with contextlib.ExitStack() as stack:
            if gathering is None:
                peers.close()
            else:
                stack.enter_context(
                    Exchange(
                        addresses, membership.own, key, trees,
                        listener=peers.dup(), gathering=gathering, has_objects=False,
                    )
                )  # fmt: skip
            _wait_for_end(plan, ours, objects, _TIMELINES_S)


def _gathering(plan: HostPlan, store: Store) -> Gathering | None:
    """Return where this node gathers timelines; None if it gathers none."""
    settings, membership = plan.settings, plan.membership
    if gatherer_of(membership.own) != membership.own or not settings.publish_timelines:
        return None
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}-{settings.node}"
    object_key = gathered_key_of(settings.job, settings.submission, settings.attempt, name)
    node_count = min(GROUP_NODES, len(membership.members) - membership.own)
    return Gathering(node_count, lambda data: store.publish(object_key, data, replace=True))


def _give_up_alone(
    membership: Membership, trees: Trees, noted: NotedAddresses | None, objects: "_Objects"
) -> None:
    """Stop the fan-out of this node if the port of the other nodes is blocked.

    An unanswered packet costs each object seconds; a refused connection costs nothing.
    """
    members, own = membership.members, membership.own
    if noted is not None:
        if are_silent(_parents_addresses(own, trees, noted), _PROBE_S):
            objects.give_up()
        return
    found = [node for tree in range(TREE_COUNT) for node in trees.ancestors(tree, own)[:2]]
    found += [node for tree in range(TREE_COUNT) for node in trees.children(tree, own)]
    addresses = [(members[node].host, members[node].port) for node in dict.fromkeys(found)]
    if are_silent(addresses[:_PROBES_MAX], _PROBE_S):
        objects.give_up()


def _parents_addresses(own: int, trees: Trees, noted: NotedAddresses) -> list[tuple[str, int]]:
    """Return the addresses of the parents that begin within `GATHER_S`.

    Only the addresses of the parents are looked up: each costs a read of the store.
    """
    parents = {trees.parent(tree, own) for tree in range(TREE_COUNT)} - {STORE}
    until_s = time.monotonic() + GATHER_S
    while True:
        addresses = []
        for node in parents:
            with contextlib.suppress(ConnectionRefusedError):
                addresses.append(noted.find(node))
        if len(addresses) == len(parents) or time.monotonic() > until_s:
            return addresses
        time.sleep(_LOOK_S)


def are_silent(addresses: Sequence[tuple[str, int]], limit_s: float) -> bool:
    """Return whether none of these addresses accepts or refuses a connection within the time."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for address in addresses:
            try:
                family, kind, number, _, place = socket.getaddrinfo(
                    *address, type=socket.SOCK_STREAM
                )[0]
                sock = stack.enter_context(socket.socket(family, kind, number))
                sock.setblocking(False)
                if sock.connect_ex(place) != errno.EINPROGRESS:
                    return False
            except OSError:
                return False
            selector.register(sock, selectors.EVENT_WRITE)
        return bool(addresses) and not selector.select(limit_s)


class _End(Enum):
    """Reason why the process waits no more for clients."""

    READY = "the start is ready"
    OVER = "the job or the time is over, or no other node can be reached"


def _wait_for_end(
    plan: HostPlan,
    ours: socket.socket,
    objects: "_Objects",
    window_s: float,
    figures: "_Figures | None" = None,
) -> _End:
    """Accept clients until the start is ready, or all is over.

    `figures` are written meanwhile if nobody says that the start is ready.
    """
    figures = None if plan.says_ready else figures
    until_s = time.monotonic() + window_s
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        ready = ReadySocket(plan.ready_name)
        stack.callback(ready.close)
        try:
            user = plan.user.open()
        except ProcessLookupError:
            return _End.OVER
        stack.callback(os.close, user)
        ours.setblocking(False)
        for source in (ours, ready, user, objects.given_up):
            selector.register(source, selectors.EVENT_READ)
        while (left_s := until_s - time.monotonic()) > 0:
            pause_s = left_s if figures is None else min(left_s, _SETTLED_S)
            found = {key.fileobj for key, _ in selector.select(pause_s)}
            if figures is not None:
                figures.write_settled()
            if {user, objects.given_up} & found:
                return _End.OVER
            if ready in found and ready.take() and not objects.is_stopped:
                return _End.READY
            if ours in found:
                with contextlib.suppress(OSError):
                    objects.take(ours.accept()[0])
    return _End.OVER


def _read_document(store: Store, key: str) -> bytes:
    """Return a document of the store as it is sent. Raises: BootseerError."""
    try:
        data = PRESENT + store.read(key, 0, DOCUMENT_BYTES_MAX)
    except NotFoundError:
        return ABSENT
    if len(data) > DOCUMENT_BYTES_MAX:
        raise UnavailableError(f"{key} is too large")
    return data


class _StoredChunks:
    """Chunks of an object as the store has them: the fetch engine's deadlines and checks hold."""

    def __init__(self, wanted: SharedObject, chunks: ChunkList, fetcher: ChunkFetcher) -> None:
        self._wanted, self._chunks, self._fetcher = wanted, chunks, fetcher

    def chunk_list(self) -> bytes:
        """Return the encoded list of chunks, which every node of the start knows by itself."""
        return self._chunks.encode()

    def chunk(self, index: int, offset: int, length: int) -> bytes:
        """Return the bytes of a chunk. Raises: BootseerError."""
        found: list[bytes] = []
        chunk = self._wanted.chunks[index]

        def deliver(_: Chunk, data: memoryview) -> None:
            found.append(bytes(data))

        self._fetcher.demand(chunk, deliver)
        return found[0]


def in_flight(chunks: Sequence[Chunk]) -> int:
    """Return how many chunks of each tree of an object are read from the store at once. Pure."""
    files = {chunk.key for chunk in chunks[:_NEXT_CHUNKS]}
    return min(max(len(files) // TREE_COUNT, _IN_FLIGHT_MIN), _IN_FLIGHT_MAX)


class _Object(Struct, frozen=True):
    """An object that this node receives."""

    name: bytes
    file: int


def _tell(connection: socket.socket, counts: Sequence[int], is_over: bool) -> bool:
    """Send a client the counts of an object; return whether it takes them now. Raises: OSError."""
    try:
        connection.send(UPDATE.pack(IS_OVER if is_over else IS_COMING, *counts))
    except BlockingIOError:
        if not is_over:
            return False
        # To a client that reads late, the end of the connection is the end of the object.
    except OSError:
        connection.close()
        raise
    if is_over:
        connection.close()
    return True


class _Objects:
    """Objects that the processes of this node have asked for."""

    def __init__(
        self,
        plan: HostPlan,
        exchange: Exchange,
        route: TimelineRoute,
        stack: contextlib.ExitStack,
    ) -> None:
        """Create the folder of the objects; `stack` closes opened files and stores."""
        self._settings, self._exchange, self._stack = plan.settings, exchange, stack
        self._route = route
        self._folder = private_directory(plan.settings.cache_dir / "fanout")
        self._found: dict[bytes, _Object] = {}
        self._fetchers: dict[str, ChunkFetcher] = {}
        self._lock = threading.Lock()
        self._clients = threading.BoundedSemaphore(_CLIENTS_MAX)
        self.is_stopped = False
        self._has_given_up = threading.Event()
        self.given_up = os.eventfd(0, os.EFD_CLOEXEC)
        """Readable once nothing more is brought. Open as long as the process lives: a thread may
        still write to it at the end."""

    def take(self, connection: socket.socket) -> None:
        """Answer a client, in a thread of its own."""
        if not self._clients.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    @property
    def has_given_up(self) -> bool:
        """Whether clients are sent to the store."""
        return self._has_given_up.is_set()

    def give_up(self) -> None:
        """Bring nothing more: clients read the store."""
        self._has_given_up.set()
        os.eventfd_write(self.given_up, 1)

    def stop(self) -> None:
        """Answer no more requests for objects. The files may be closed then."""
        with self._lock:
            self.is_stopped = True
        self._has_given_up.set()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_REQUEST_S)
                if not is_trusted_peer(connection):
                    return
                with connection.makefile("rb") as request:
                    head = request.read(HEAD.size)
                    if len(head) < HEAD.size:
                        return
                    magic, first, second = HEAD.unpack(head)
                    if magic == QUESTION:
                        count = min(first, KEY_BYTES_MAX)
                    else:
                        count = handed_bytes(first, second) if magic == MAGIC else body_bytes(head)
                    body = request.read(count)
                if len(body) < count:
                    return
                if magic == MAGIC:
                    is_kept = self._route.deliver(body[:first].decode(), body[first:])
                    connection.sendall(KEPT if is_kept else REFUSED)
                    return
                if magic == QUESTION:
                    data, is_own = self._document(body.decode("ascii", "replace"))
                    connection.settimeout(_TELL_S)
                    connection.sendall(ANSWER.pack(is_own, len(data)) + data)
                    return
                found = self._receive(decode_request(head, body))
                if found is None:
                    return
                connection.settimeout(_TELL_S)
                with self._lock:
                    if self.is_stopped:
                        return
                    rights = array.array("i", [found.file])
                    connection.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                told = connection.dup()
                told.setblocking(False)
                try:
                    self._exchange.watch(found.name, partial(_tell, told))
                except BootseerError:
                    told.close()
                    raise
        except (CorruptError, NoSpaceError) as error:
            _log.warning("an object does not travel by the fan-out: %s", error)
        except (BootseerError, OSError, ValueError) as error:
            _log.info("a client is left: %s", error)
        finally:
            self._clients.release()

    def _document(self, key: str) -> tuple[bytes, bool]:
        """Return a document as it is sent, and whether this node read it in the store.

        Raises: UnavailableError.
        """
        answer = self._exchange.document(key)
        until_s = time.monotonic() + _DOCUMENT_S
        while not self._has_given_up.is_set() and time.monotonic() < until_s:
            try:
                return answer.result(_LOOK_S)
            except TimeoutError:
                continue
            except CancelledError:
                break
        raise UnavailableError(f"no node brings {key}")

    def _receive(self, wanted: SharedObject) -> _Object | None:
        """Join an object unless it is joined already; return None if the node does not want it.

        Raises: BootseerError, OSError.
        """
        chunks = chunk_list(
            [one.length for one in wanted.chunks], [one.digest or b"" for one in wanted.chunks]
        )
        name = chunks.name
        if self._has_given_up.is_set():
            return None
        if not wanted.is_wanted:
            self._exchange.decline(name)
            return None
        with self._lock:
            if self.is_stopped:
                return None
            if name not in self._found:
                self._found[name] = self._join(name, wanted, chunks)
            return self._found[name]

    def _join(self, name: bytes, wanted: SharedObject, chunks: ChunkList) -> _Object:
        room = os.statvfs(self._folder)
        if chunks.offsets[-1] > room.f_bavail * room.f_frsize * _SPARE_SHARE:
            raise NoSpaceError(f"{self._folder} has no room for {chunks.offsets[-1]} bytes")
        # Processes in containers may share the folder, and have the same process id.
        path = self._folder / f"{os.urandom(8).hex()}-{name.hex()}"
        fetcher = self._fetcher(wanted.url)
        origin = _StoredChunks(wanted, chunks, fetcher)
        self._exchange.join(
            name,
            path,
            origin,
            in_flight(wanted.chunks),
            lambda: fetcher.engine.bytes_moved_s,
        )
        try:
            # Read-only: a client gets it.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        finally:
            path.unlink(missing_ok=True)
        self._stack.callback(os.close, file)
        return _Object(name, file)

    def _fetcher(self, url: str) -> ChunkFetcher:
        if url not in self._fetchers:
            settings = self._settings
            is_own = url == settings.store_url
            opened: Store = (
                open_own_store(settings)
                if is_own
                else open_store(url, deadline_s=settings.deadline_s)
            )
            self._stack.enter_context(opened)
            fetcher = ChunkFetcher(
                opened.read_verified,
                threads=_STORE_THREADS,
                demand_threads=_STORE_THREADS,
                deadline_s=settings.deadline_s,
            )
            self._fetchers[url] = self._stack.enter_context(fetcher)
        return self._fetchers[url]


# ---- the timeline -----------------------------------------------------------------------------


class _Figures:
    """Figures of this node's sources, written to the timeline in one or several stages."""

    def __init__(
        self, plan: HostPlan, exchange: Exchange, noted: NotedAddresses | None, write: WriteStage
    ) -> None:
        self._plan, self._exchange, self._noted = plan, exchange, noted
        self._write_stage = write
        self._written = 0
        """Number of source records that are in an earlier stage."""
        self._requests: Counter[str] = Counter()
        """Requests that are in an earlier stage."""

    def write_settled(self) -> None:
        """Write the figures of what has come since the last stage, if nothing more is coming."""
        if time.monotonic() - self._exchange.moved_s < _SETTLED_S:
            return
        if self._exchange.has_everything and len(self._exchange.source_records()) > self._written:
            self._write(self._exchange.moved_s)

    def write_last(self, *, is_alone: bool) -> None:
        """Write the figures that no stage has. `is_alone`: no other node could be used."""
        if not self._plan.says_ready and self._exchange.moved_s:
            if len(self._exchange.source_records()) > self._written:
                self._write(self._exchange.moved_s, is_alone=is_alone)
        else:
            self._write(time.monotonic(), is_alone=is_alone)

    def _write(self, at_s: float, *, is_alone: bool = False) -> None:
        records = self._exchange.source_records()
        fed, self._written = records[self._written :], len(records)
        counts = Counter(request_counts())
        requests, self._requests = counts - self._requests, counts
        attributes = self._attributes(fed, is_alone=is_alone)
        at_ns = time.time_ns() - round((time.monotonic() - at_s) * 1e9)
        self._write_stage(at_ns, {**attributes, **requests})

    def _attributes(self, fed: list[SourceRecord], *, is_alone: bool) -> dict[str, Value]:
        membership = self._plan.membership
        came_bytes = sum(one.byte_count for one in fed)
        stored_bytes = sum(one.byte_count for one in fed if one.source == STORE)
        found: dict[str, Value] = {
            "bootseer.bytes": came_bytes,
            "bootseer.fanout.store_bytes": stored_bytes,
            "bootseer.fanout.nodes": len(membership.members),
            "bootseer.fanout.list_from": membership.origin,
        }
        if fed:
            longest = sorted(fed, key=lambda one: -one.byte_count)[:_SOURCES_MAX]
            found["bootseer.fanout.sources"] = "; ".join(map(self._told, longest))
        left = [one for one in fed if one.left_because and one.source != STORE]
        if stored_bytes == came_bytes and (came_bytes or is_alone):
            port = membership.members[membership.own].port
            fallback = f"no other node could be used: port {port} may be blocked"
            _log.warning("warning: %s", fallback)
            found["bootseer.fallback"] = fallback
        elif left:
            lost = max(left, key=lambda one: one.seconds)
            found["bootseer.fallback"] = f"{self._name(membership.own)} {self._told(lost)}"
        return found

    def _told(self, one: SourceRecord) -> str:
        """Return the sentence for a source: "was fed by n9 at 40.0 MB/s; left it after 0.8 s"."""
        source = "the store" if one.source == STORE else self._name(one.source)
        rate = one.byte_count / one.seconds / 1e6 if one.seconds > 0 else 0.0
        sentence = f"was fed by {source} at {rate:.1f} MB/s"
        if one.left_because and one.source != STORE:
            sentence += f"; left it after {one.seconds:.1f} s: {one.left_because}"
        return sentence

    def _name(self, node: int) -> str:
        if self._noted is not None:
            return self._noted.name(node)
        return self._plan.membership.members[node].name
