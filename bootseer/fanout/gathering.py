"""Timelines of up to 256 nodes as one object of the store, instead of one for each node.

The nodes of a start are split, in the order of their list, into groups of `GROUP_NODES`. The first
node of a group gathers: it takes the timelines of the others, writes all it has as one object, and
answers each of them only then. So a node that is told that its timeline is kept finds it in the
store. If the gathering node is killed, no timeline is lost: nodes without an answer publish their
own.

A publisher (`hand_over`) gives the timeline to its node's process of the fan-out through the
abstract socket, which gives it to the node that gathers (`TimelineRoute`), where it comes to
`Gathering`.

On the abstract socket the request is MAGIC, u32 bytes of the name, u32 bytes of the timeline,
little-endian, and both; the answer is one byte, KEPT or REFUSED. Between nodes both are those of
docs/format/fanout.md. Any thread.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from msgspec import Struct

from bootseer.base.content_digest import content_digest
from bootseer.errors import BootseerError, CorruptError
from bootseer.fanout import protocol
from bootseer.fanout.connection import connect
from bootseer.fanout.local import HEAD, connected, fanout_address
from bootseer.fanout.protocol import Hello, Request
from bootseer.settings.config import Settings
from bootseer.timeline.stored import OBJECT_BYTES_MAX, SUFFIX, encode_gathered, timeline_name

_log = logging.getLogger(__name__)

GROUP_NODES = 256
MAGIC = b"BSFTIMES"
WAITING, KEPT, REFUSED = b"\0", b"\1", b"\2"
_SILENCE_S = 3.0
_LIMIT_S = 30.0
"""Time after which a node publishes its own timeline in any case."""
_GATHER_S = 3.0
"""Wait of a timeline for those of other nodes, which become ready at about the same time."""
_NAME_BYTES_MAX = 512
TIMELINE_BYTES_MAX = 1 << 20
"""Longest timeline that is gathered; a longer one becomes an object of its own."""
_MEMBER_BYTES = 2048
"""Most bytes of headers in the object for each timeline."""


def gatherer_of(node: int) -> int:
    """Return the node that gathers the timeline of `node`."""
    return node - node % GROUP_NODES


def hand_over(settings: Settings, name: str, packed: bytes) -> bool:
    """Hand this node's timeline, packed for the store, to the node that gathers.

    Returns False where it is not in the store then: publish it. Waits for `_LIMIT_S` at most.
    """
    if not settings.fanout or len(packed) > TIMELINE_BYTES_MAX:
        return False
    try:
        with connected(fanout_address(settings), _LIMIT_S) as connection:
            told = name.encode()
            connection.sendall(HEAD.pack(MAGIC, len(told), len(packed)) + told + packed)
            return connection.recv(1) == KEPT
    except OSError as error:
        _log.debug("no fan-out gathers the timeline: %s", error)
        return False


def handed_bytes(first: int, second: int) -> int:
    """Return how many bytes follow a publisher's head. Raises: CorruptError."""
    if first > _NAME_BYTES_MAX or second > TIMELINE_BYTES_MAX:
        raise CorruptError("a timeline that is handed over is too long")
    return first + second


class TimelineRoute(Struct, frozen=True):
    """Way of this node's timelines to the node that gathers them."""

    addresses: Sequence[tuple[str, int]]
    own: int
    key: bytes
    gathering: "Gathering | None"
    """Timelines that this node gathers; None if another node gathers."""

    def deliver(self, name: str, packed: bytes) -> bool:
        """Give a timeline to the node that gathers; return whether it is in the store.

        Raises: TimeoutError, OSError, CorruptError.
        """
        data = name.encode() + b"\n" + packed
        if self.gathering is not None:
            return self.gathering.keep(data).result(_LIMIT_S)
        return asyncio.run(self._send(data))

    async def _send(self, data: bytes) -> bool:
        source = gatherer_of(self.own)
        hello = Hello(self.own, source, os.urandom(protocol.NONCE_BYTES))
        async with asyncio.timeout(_LIMIT_S):
            link = await connect(self.addresses[source], hello, self.key, _SILENCE_S)
            try:
                request = Request(protocol.KEEP, 0, len(data), content_digest(data))
                await link.send(request.encode() + data, _SILENCE_S)
                answer = memoryview(bytearray(1))
                while await link.receive(answer, _SILENCE_S) == WAITING:
                    pass
                return answer == KEPT
            finally:
                link.close()


class Gathering:
    """Timelines that a node gathers. Thread-safe; its thread ends by itself."""

    def __init__(self, node_count: int, publish: Callable[[bytes], object]) -> None:
        """Gather of `node_count` nodes.

        `publish` writes the object, of at most OBJECT_BYTES_MAX, in place of the last one; it
        raises BootseerError or OSError.
        """
        self._node_count, self._publish = node_count, publish
        self._timelines: dict[str, bytes] = {}
        self._waiting: list[Future[bool]] = []
        self._is_writing = False
        self._changed = threading.Condition()

    def has_room(self, byte_count: int) -> bool:
        """Return whether a timeline of so many bytes, with its name, is taken."""
        if byte_count > TIMELINE_BYTES_MAX + _NAME_BYTES_MAX:
            return False
        with self._changed:
            used = sum(map(len, self._timelines.values())) + len(self._timelines) * _MEMBER_BYTES
        return used + byte_count + _MEMBER_BYTES <= OBJECT_BYTES_MAX

    def keep(self, data: bytes) -> "Future[bool]":
        """Take a timeline behind its name and a newline; the result is whether it is in the store.

        Raises: CorruptError if the name is none.
        """
        name, _, packed = data.partition(b"\n")
        text = name.decode("ascii", "replace")
        if timeline_name(text + SUFFIX) is None:
            raise CorruptError("a timeline that is handed over has a name that is none")
        done: Future[bool] = Future()
        done.set_running_or_notify_cancel()
        with self._changed:
            if not self.has_room(len(data)):
                done.set_result(False)
                return done
            self._timelines[text] = packed
            self._waiting.append(done)
            self._changed.notify_all()
            if not self._is_writing:
                self._is_writing = True
                threading.Thread(target=self._write, name="timelines", daemon=True).start()
        return done

    def _write(self) -> None:
        """Write the object as long as timelines wait for it."""
        while True:
            with self._changed:
                self._changed.wait_for(self._are_all_here, _GATHER_S)
                waiting, self._waiting = self._waiting, []
                self._is_writing = bool(waiting)
                if not waiting:
                    return
                timelines = dict(self._timelines)
            is_stored = False
            try:
                self._publish(encode_gathered(timelines))
                is_stored = True
            except (BootseerError, OSError) as error:
                _log.info("the timelines of other nodes cannot be stored: %s", error)
            finally:
                for one in waiting:
                    one.set_result(is_stored)

    def _are_all_here(self) -> bool:
        return len(self._waiting) >= self._node_count
