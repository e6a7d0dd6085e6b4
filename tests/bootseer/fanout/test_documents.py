"""Documents without a digest: nodes get them from both parents, or read the store."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.base.content_digest import content_digest
from bootseer.errors import UnavailableError
from bootseer.fanout import protocol
from bootseer.fanout.protocol import BUSY, CHUNK, DOCUMENT, Request, encode_frame
from bootseer.fanout.trees import Trees
from tests.bootseer.fanout.nodes import FanoutJob, introduce, member, offer_of, take

NODES = 9
TREES = Trees(NODES)
ROOTS = {TREES.root(tree) for tree in (0, 1)}
LIAR = TREES.children(0, TREES.root(0))[-1]
"""An inner node of tree 0 that is no root."""
KEY, TEXT = "images/trainer%3Av7.json", b"\1" + b'{"kind": "bootseer-image"}'


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FanoutJob]:
    with contextlib.ExitStack() as stack:
        job = FanoutJob(stack, tmp_path, NODES)
        job.stored[KEY] = TEXT
        yield job


def below(node: int) -> set[int]:
    """Return the nodes whose copies in tree 0 pass `node`."""
    return {n for n in range(NODES) if node in TREES.ancestors(0, n)}


def test_only_the_roots_read_the_store(job: FanoutJob) -> None:
    job.start(*range(NODES))
    for key in (KEY, "hot/1/main.json"):
        job.stored[key] = TEXT
        job.document_reads.clear()
        found = job.documents(key)
        assert {data for data, _ in found.values()} == {TEXT}
        assert {node for node, (_, is_own) in found.items() if is_own} == ROOTS
        assert sorted(job.document_reads) == sorted(ROOTS)


def test_a_node_answers_for_what_its_own_start_has_not_asked_for(job: FanoutJob) -> None:
    job.start(*range(NODES))
    last = max(range(NODES), key=lambda node: len(TREES.ancestors(0, node)))
    assert job.documents(KEY, last) == {last: (TEXT, False)}
    assert set(job.document_reads) == ROOTS
    # And what it has found stays as it is until the start ends.
    job.stored[KEY] = b"\1another"
    assert {data for data, _ in job.documents(KEY).values()} == {TEXT}


def test_an_object_that_is_not_there_is_missing_everywhere(job: FanoutJob) -> None:
    job.stored["images/no.json"] = b"\0"
    job.start(*range(NODES))
    assert {data for data, _ in job.documents("images/no.json").values()} == {b"\0"}
    assert set(job.document_reads) == ROOTS


def test_nodes_below_a_lost_one_read_the_store(job: FanoutJob) -> None:
    job.start(*(node for node in range(NODES) if node != LIAR))
    found = job.documents(KEY)
    assert {data for data, _ in found.values()} == {TEXT}
    # Its children in tree 0; in tree 1 it is a leaf.
    assert set(job.document_reads) == ROOTS | set(TREES.children(0, LIAR))


def test_nobody_waits_for_the_answers_of_a_store_that_is_down(job: FanoutJob) -> None:
    job.stored.clear()
    job.start(*range(NODES))
    for node in job.nodes.values():
        with pytest.raises(UnavailableError):
            node.document(KEY).result(30)


def _frames(kind: int, data: bytes) -> bytes:
    return encode_frame(kind, len(data), offer_of(LIAR)) + data


@pytest.mark.parametrize(
    "answer",
    [
        _frames(DOCUMENT, b"\1a wrong one"),
        _frames(DOCUMENT, b"\0"),
        _frames(DOCUMENT, b""),
        _frames(CHUNK, TEXT),
        _frames(BUSY, b""),
        encode_frame(DOCUMENT, 1 << 20, offer_of(LIAR)) + b"\1begun",
        b"noise" * 100,
        b"",
    ],
)
def test_a_hostile_member_changes_no_document(job: FanoutJob, answer: bytes) -> None:
    def act(sock: socket.socket, request: Request) -> None:
        if request.operation == protocol.READ:
            take(sock, request.count)
            sock.sendall(answer)

    with member(job.addresses[LIAR], LIAR, act):
        job.start(*(node for node in range(NODES) if node != LIAR))
        found = job.documents(KEY)
    assert {data for data, _ in found.values()} == {TEXT}
    assert ROOTS <= set(job.document_reads) <= ROOTS | below(LIAR)


@pytest.mark.parametrize(
    ("key", "count"),
    [
        ("leases/fanout/x", None),
        ("images/../leases/x", 5),
        ("imäges/x", None),
        ("images/" + "x" * 2000, None),
    ],
)
def test_members_read_no_other_objects(job: FanoutJob, key: str, count: int | None) -> None:
    root = TREES.root(0)
    job.start(root)
    text = key.encode()
    with introduce(job.addresses[root], root) as sock:
        request = Request(protocol.READ, 0, count or len(text), content_digest(text))
        sock.sendall(request.encode() + text)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
    assert job.document_reads == []
