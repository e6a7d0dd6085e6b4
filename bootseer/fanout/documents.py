"""Small documents of the store without a digest, such as an image's record, between nodes.

Nobody can verify such a document. A node therefore asks both of its parents, one in each tree, and
believes a copy that both have. The nodes between a node and the store are inner nodes in one tree
only (`trees`), so one liar changes one of the two copies: the node then reads the store itself. A
node also reads the store if a parent is silent or was lost. Roots read the store.

A copy is passed on in its own tree at once, before it is compared: a wrong one costs the nodes
below the liar a read of the store each. A node answers for a document that its own start has not
asked for yet, by asking its parents. An answer of a node stays the same until its start ends.

A document is sent as one byte, 1 if the store has it, else 0, and its bytes. All runs in the thread
of an event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from bootseer.base.content_digest import content_digest
from bootseer.errors import BootseerError, CorruptError, UnavailableError
from bootseer.fanout import protocol
from bootseer.fanout.connection import Link
from bootseer.fanout.plan import GATHER_S, HEARTBEAT_S, SILENCE_S, Offer
from bootseer.fanout.protocol import Request
from bootseer.fanout.trees import STORE, TREE_COUNT, Trees

logger = logging.getLogger(__name__)


_PREFIXES = (b"images/", b"hot/", b"snapshots/")
"""Keys of documents that a node reads for others."""
_ANSWER_S = 1.0
_LEVEL_S = 0.25
_RETRY_S = 0.1
_STALLED_S = 2.0
_DOCUMENTS_MAX = 256


class _Document:
    """Document that this node has, or looks for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.copies: list[asyncio.Future[bytes]] = [loop.create_future() for _ in range(TREE_COUNT)]
        """Copy that is passed on in each tree; b"": the children read the store."""
        self.found: asyncio.Future[tuple[bytes, bool]] = loop.create_future()

    def settle(self, data: bytes) -> None:
        """Pass `data` on in both trees, where no copy was passed on before."""
        for copy in self.copies:
            if not copy.done():
                copy.set_result(data)


class Documents:
    """Documents of one node of the fan-out."""

    def __init__(
        self,
        own: int,
        trees: Trees,
        *,
        loop: asyncio.AbstractEventLoop,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        open_link: Callable[[int, float], Awaitable[Link]],
        keep_link: Callable[[int, Link], None],
        read_store: Callable[[str], Awaitable[bytes]],
    ) -> None:
        """Prepare the node `own`.

        Args:
            own: Number of the node.
            trees: Who asks whom.
            loop: The event loop.
            spawn: Runs a coroutine until the exchange ends.
            open_link: Returns a connection to a node; raises BootseerErrors and OSErrors.
            keep_link: Keeps a connection for the next request.
            read_store: Returns the document at a key; raises BootseerErrors.
        """
        self._own, self._trees, self._loop = own, trees, loop
        self._spawn, self._open_link, self._keep_link = spawn, open_link, keep_link
        self._read_store = read_store
        self._documents: dict[str, _Document] = {}
        self._lost: set[int] = set()
        """Parents that did not answer: not asked again."""
        self._began_s = self._loop.time()

    async def get(self, key: str) -> tuple[bytes, bool]:
        """Return a document as it is sent, and whether this node has read it in the store.

        Raises: UnavailableError if the caller has to read the store.
        """
        data, is_own = await asyncio.shield(self._document(key).found)
        if not data:
            raise UnavailableError(f"no node brings {key}")
        return data, is_own

    def _document(self, key: str) -> _Document:
        document = self._documents.get(key)
        if document is None:
            document = self._documents[key] = _Document(self._loop)
            self._spawn(self._find(key, document))
        return document

    async def _find(self, key: str, document: _Document) -> None:
        data, is_own = b"", False
        try:
            data = await self._from_parents(key, document)
            if not data:
                data, is_own = await self._read_store(key), True
        except BootseerError as error:
            logger.info("fan-out: %s is not read for others: %s", key, error)
        finally:
            document.settle(data)
            document.found.set_result((data, is_own))

    # Getting

    async def _from_parents(self, key: str, document: _Document) -> bytes:
        """Return the copy that both parents have; b"" if this node has to read the store."""
        parents = [self._trees.parent(tree, self._own) for tree in range(TREE_COUNT)]
        if STORE in parents or len(set(parents)) < TREE_COUNT or self._lost & set(parents):
            return b""
        asking = {
            self._loop.create_task(self._ask(key, tree, parents[tree], document))
            for tree in range(TREE_COUNT)
        }
        copies: list[bytes] = []
        try:
            for answer in asyncio.as_completed(asking):
                copies.append(await answer)
                if not copies[-1]:
                    return b""
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        if copies[0] != copies[1]:
            logger.warning(
                "fan-out: nodes %d and %d sent different copies of %s, which is read from the "
                "store",
                *parents,
                key,
            )
            return b""
        return copies[0]

    async def _ask(self, key: str, tree: int, parent: int, document: _Document) -> bytes:
        """Return the copy of a parent; b"" if it sends none in time."""
        # Each further level waits longer, because it waits for the reads of the levels above.
        later_s = _LEVEL_S * len(self._trees.ancestors(tree, self._own))
        gathered_s = self._began_s + GATHER_S
        until_s = max(gathered_s, self._loop.time() + _ANSWER_S) + later_s
        try:
            link = await self._reached(parent, gathered_s + later_s)
            try:
                async with asyncio.timeout_at(until_s):
                    data = await self._copy(link, parent, key, tree)
            except BaseException:
                link.close()
                raise
            self._keep_link(parent, link)
        except (BootseerError, OSError, TimeoutError) as error:
            logger.info("fan-out: node %d sends no document: %s", parent, error)
            self._lost.add(parent)
            return b""
        copy = document.copies[tree]
        if data and not copy.done():
            copy.set_result(data)
        return data

    async def _reached(self, node: int, until_s: float) -> Link:
        """Return a connection to a node, which may begin later. Raises: as `open_link`."""
        while True:
            try:
                return await self._open_link(node, SILENCE_S)
            except OSError:
                if self._loop.time() > until_s:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _copy(self, link: Link, node: int, key: str, tree: int) -> bytes:
        text = key.encode()
        request = Request(protocol.READ, tree, len(text), content_digest(text))
        await link.send(request.encode() + text, SILENCE_S)
        head = memoryview(bytearray(protocol.FRAME_BYTES))
        while True:
            await link.receive(head, SILENCE_S)
            frame = protocol.decode_frame(head, node, self._trees.node_count)
            if frame.kind == protocol.BUSY:
                return b""
            if frame.kind == protocol.DOCUMENT and frame.length:
                data = await link.receive(memoryview(bytearray(frame.length)), SILENCE_S)
                return bytes(data)
            if frame.kind != protocol.BEAT:
                raise CorruptError(f"node {node} answers a question that nobody asked")

    # Serving

    async def serve(self, link: Link, request: Request) -> None:
        """Answer a request for a document. Raises: CorruptError, TimeoutError, OSError."""
        text = memoryview(bytearray(request.count))
        key = bytes(await link.receive(text, _STALLED_S))
        if (
            content_digest(key) != request.name
            or not key.isascii()
            or not key.startswith(_PREFIXES)
            or (key.decode() not in self._documents and len(self._documents) >= _DOCUMENTS_MAX)
        ):
            raise CorruptError("a request for a document that nobody needs, or for too many")
        copy = self._document(key.decode()).copies[request.tree]
        offer = Offer(self._own, 0, 0, ())
        while not copy.done():
            await link.send(protocol.encode_frame(protocol.BEAT, 0, offer), _STALLED_S)
            await asyncio.wait([copy], timeout=HEARTBEAT_S)
        data = copy.result()
        kind = protocol.DOCUMENT if data else protocol.BUSY
        await link.send(protocol.encode_frame(kind, len(data), offer) + data, _STALLED_S)
