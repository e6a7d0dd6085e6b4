"""End of a tree that is behind, from a second node, over sockets."""

import contextlib
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootseer.fanout import protocol
from bootseer.fanout.exchange import Exchange
from bootseer.fanout.plan import Offer
from bootseer.fanout.protocol import Request
from bootseer.fanout.trees import STORE, Trees
from tests.bootseer.fanout.nodes import KEY, Content, arrived, free_addresses, member, offer_of

OWN, FAST, SLOW, HELPER = 0, 1, 2, 3
"""Four nodes: two are the sources of node 0, and a third one has room."""
BEFORE = 10
"""Chunks that the slow source sends before the helper has begun."""


def _frame(sock: socket.socket, kind: int, offer: Offer, data: bytes = b"") -> None:
    sock.sendall(protocol.encode_frame(kind, len(data), offer) + data)


def _chunks(
    sock: socket.socket, offer: Offer, content: Content, request: Request, numbers: Sequence[int]
) -> None:
    """Send these chunks of a tree, and the list where it is asked for."""
    if request.needs_list:
        _frame(sock, protocol.LIST, offer, content.chunk_list())
    for number in numbers:
        part = content.parts[2 * number + request.tree]
        _frame(sock, protocol.CHUNK, offer, part)


@pytest.mark.parametrize("helper_sends", [50, 5], ids=["stays", "leaves"])
def test_the_end_of_a_tree_that_is_behind_comes_from_a_helper(
    tmp_path: Path, helper_sends: int
) -> None:
    content, trees = Content(100), Trees(4)
    assert [trees.parent(tree, OWN) for tree in (0, 1)] == [FAST, SLOW]
    has_begun, has_left = threading.Event(), threading.Event()
    length = 50

    def answer(node: int, sock: socket.socket, request: Request) -> bool:
        """Answer a question; return whether chunks are asked for."""
        if request.operation == protocol.FEED:
            return True
        is_whole = node == HELPER or (node, request.tree) == (FAST, 0)
        offer = offer_of(node, length) if is_whole else Offer(node, BEFORE, 2, (STORE,))
        sock.sendall(protocol.encode_offer(offer))
        return False

    def fast(sock: socket.socket, request: Request) -> None:
        if answer(FAST, sock, request):
            _chunks(sock, offer_of(FAST, length), content, request, range(request.count, length))

    def slow(sock: socket.socket, request: Request) -> None:
        if not answer(SLOW, sock, request):
            return
        behind = Offer(SLOW, BEFORE, 2, (STORE,))
        _chunks(sock, behind, content, request, range(request.count, BEFORE))
        while not has_left.wait(0.2):
            _frame(sock, protocol.BEAT, behind)
        later = range(max(BEFORE, request.count), length)
        _chunks(sock, offer_of(SLOW, length), content, request, later)

    def helper(sock: socket.socket, request: Request) -> None:
        if not answer(HELPER, sock, request):
            return
        has_begun.set()
        behind = min(request.count + helper_sends, length)
        _chunks(sock, offer_of(HELPER, length), content, request, range(request.count, behind))
        has_left.set()
        raise ConnectionAbortedError

    addresses = free_addresses(4)
    with contextlib.ExitStack() as stack:
        stack.enter_context(member(addresses[FAST], FAST, fast))
        stack.enter_context(member(addresses[SLOW], SLOW, slow))
        asked = stack.enter_context(member(addresses[HELPER], HELPER, helper))
        node = stack.enter_context(Exchange(addresses, OWN, KEY))
        node.join(content.name, tmp_path / "object", content)
        assert arrived(node, content, tmp_path / "object") == content.parts
        records = node.source_records()
    assert (tmp_path / "object").read_bytes() == content.data
    # Not that the store sends nothing: on a busy machine, a source may be silent for a second.
    help_request, *_ = [one for one in asked if one.operation == protocol.FEED]
    assert help_request.tree == 1
    assert BEFORE < help_request.count < length
    sent = {(one.tree, one.source): one.byte_count for one in records}
    assert min(sent[1, HELPER], sent[1, SLOW]) > 0
    assert has_begun.is_set()
