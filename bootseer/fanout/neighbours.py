"""Connections of a node to the other nodes of its job, and questions to them.

All questions to a node, of all objects and trees, travel on one connection (`_Questions`), so that
a question costs no proof. A connection without an unanswered question may be taken for a stream of
chunks, and one that has brought a document is kept for the next request.

For the event loop's thread.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from bootseer.errors import CorruptError
from bootseer.fanout import protocol
from bootseer.fanout.addresses import NotedAddresses
from bootseer.fanout.connection import Clock, Link, Wanted, connect
from bootseer.fanout.plan import ASK_S, SILENCE_S, Offer
from bootseer.fanout.protocol import Hello

_LATE_ANSWER_S = 0.1
"""Where most nodes have answered, the others are given so much more."""
_SPARE_LINKS_MAX, _SPARE_S = 32, 8.0
"""Connections kept after a question, and for how long: less than a node waits for a request."""


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
        return not self._ended.done() and not is_late and self._count < protocol.REQUESTS_MAX // 2

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


class Neighbours:
    """The other nodes of the job, as one node reaches them."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        own: int,
        key: bytes,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        noted: NotedAddresses | None,
    ) -> None:
        """Prepare the node `own`; see `Exchange` for `addresses`, `key` and `noted`.

        `spawn` runs a coroutine until the exchange ends.
        """
        self._addresses, self._own, self._key = tuple(addresses), own, key
        self._loop, self._clock, self._spawn, self._noted = loop, clock, spawn, noted
        self._spare: dict[int, tuple[float, Link]] = {}
        self._asked: dict[int, _Questions] = {}
        self._opening: dict[int, asyncio.Task[_Questions | None]] = {}

    async def connect(self, node: int, limit_s: float) -> Link:
        """Return a connection to a node, which may be left from a question.

        Raises: TimeoutError; OSError; CorruptError where the other end has another key.
        """
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
            # Not in the threads that read chunks, all of which may wait for a slow store.
            address = await self._loop.run_in_executor(None, self._noted.find, node)
        try:
            return await connect(address, hello, self._key, limit_s)
        except (OSError, TimeoutError, CorruptError):
            self._noted.forget(node)
            raise

    def keep(self, node: int, link: Link) -> None:
        """Keep a connection after a question for the next one, or close it."""
        if len(self._spare) < _SPARE_LINKS_MAX and node not in self._spare:
            self._spare[node] = self._loop.time(), link
        else:
            link.close()

    def close(self) -> None:
        """Close all connections that nobody uses now."""
        for one in self._asked.values():
            one.close()
        for _, link in self._spare.values():
            link.close()

    # Questions

    async def ask(self, nodes: Sequence[int], request: bytes) -> list[Offer]:
        """Return the answers to a question, an encoded request, of the nodes that answer in time.

        That is within `ASK_S`, or soon after most others have answered.
        """
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
        return self._spawn(self._ask_anew(node, request))

    async def _ask_anew(self, node: int, request: bytes) -> Offer | None:
        if node in self._asked and self._asked[node].is_usable:
            # Another question has opened it in the meantime.
            return await self._asked[node].ask(request)
        if node not in self._opening:
            self._opening[node] = self._spawn(self._open_questions(node))
        asked = await asyncio.shield(self._opening[node])
        return None if asked is None else await asked.ask(request)

    async def _open_questions(self, node: int) -> _Questions | None:
        """Open a connection for questions, one for all that ask; None if that fails."""
        try:
            if (old := self._asked.pop(node, None)) is not None:
                old.close()
            link = await self.connect(node, ASK_S)
        except (OSError, TimeoutError, CorruptError):
            return None
        finally:
            del self._opening[node]
        asked = self._asked[node] = _Questions(link, node, len(self._addresses), self._clock)
        return asked
