"""Calls to NameNodes: requests, accepted answers, and which NameNode is asked next."""

import math
import socket
import struct
import threading

import pytest

from bootseer.base.varints import delimited
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import UnavailableError
from bootseer.store.hdfs import namenode
from bootseer.store.hdfs.namenode import UNANSWERED, CallWait, NameNodes, RpcError, response_in
from testbed.bounded import run_bounded
from testbed.servers.answering import answering, talking
from tests.bootseer.store.hdfs import protobuf as pb
from tests.bootseer.store.hdfs.name_nodes import Call, ClosedError, RaisedError, scripted

_BLOCK = pb.text(1, "pool") + pb.number(2, 7) + pb.number(3, 1001) + pb.number(4, 2**27)


def _server(uuid: str, rack: str = "/rack") -> bytes:
    identity = pb.text(1, "10.0.0.1") + pb.text(2, "host") + pb.text(3, uuid) + pb.number(4, 9866)
    # The file system's capacity, and a field that no version of ours knows.
    return pb.blob(1, identity) + pb.number(2, 2**40) + pb.text(8, rack) + pb.text(900, "more")


def _located(*servers: bytes, start: int = 0, is_corrupt: bool = False) -> bytes:
    who = b"".join(pb.blob(3, server) for server in servers)
    token = pb.blob(5, pb.blob(1, b"\xff") + pb.text(3, "kind"))
    return pb.blob(1, _BLOCK) + pb.number(2, start) + who + pb.number(4, is_corrupt) + token


def _locations(*blocks: bytes, is_open: bool = False, more: bytes = b"") -> bytes:
    all_blocks = b"".join(pb.blob(2, block) for block in blocks)
    return pb.blob(1, pb.number(1, 2**28) + all_blocks + pb.number(3, is_open) + more)


class _Script:
    """Answers in order, and the calls that arrived."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.calls: list[Call] = []
        self._answers = iter(answers)

    def __call__(self, call: Call) -> bytes:
        self.calls.append(call)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _nodes(address: str) -> NameNodes:
    return NameNodes(f"hdfs://{address}", 20.0)


def test_a_call_says_who_asks_and_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    script = _Script(b"")
    with scripted(script) as address:
        _nodes(address).concat("/to", ["/a", "/b"])
    (call,) = script.calls
    assert (call.method, call.user, call.retry_count) == ("concat", "me", 0)
    assert call.request == pb.text(1, "/to") + pb.text(2, "/a") + pb.text(2, "/b")


def test_a_call_whose_answer_was_lost_is_repeated_under_the_same_identity() -> None:
    """The NameNode's retry cache then carries the call out once."""
    script = _Script(ClosedError(), ClosedError(), b"", b"")
    with scripted(script) as address:
        nodes = _nodes(address)
        nodes.concat("/to", ["/a"])
        nodes.concat("/to", ["/b"])
    calls = script.calls
    assert [call.retry_count for call in calls] == [0, 1, 2, 0]
    assert len({call.client for call in calls}) == 2
    assert calls[2].client == calls[0].client != calls[3].client


def test_what_a_namenode_raises_is_said_with_its_class() -> None:
    script = _Script(RaisedError("org.apache.hadoop.X", "no such\xe4 file"))
    told = r"^org\.apache\.hadoop\.X: no suchä file$"
    with scripted(script) as address, pytest.raises(RpcError, match=told):
        _nodes(address).concat("/to", ["/a"])
    assert len(script.calls) == 1


def test_blocks_are_told_with_their_datanodes_the_nearest_first() -> None:
    near, far = _server("u1"), _server("u2", "/other")
    script = _Script(
        _locations(_located(near, far), _located(far, start=2**27, is_corrupt=True)),
        _locations(_located(near), is_open=True),
        _locations(_located(near), more=pb.blob(6, b"")),
        _locations(_located(near), more=pb.blob(7, b"\x08\x01")),
    )
    with scripted(script) as address:
        nodes = _nodes(address)
        first, second = nodes.stored_blocks("/f")
        assert (first.start, first.length, second.start) == (0, 2**27, 2**27)
        assert [(each.address, each.is_far) for each in first.replicas] == [
            (("10.0.0.1", 9866), False),
            (("10.0.0.1", 9866), True),
        ]
        assert second.replicas == ()
        assert first.token == pb.blob(1, b"\xff") + pb.text(3, "kind")
        # Open, encrypted, erasure-coded.
        assert [nodes.stored_blocks("/f") for _ in range(3)] == [()] * 3


def test_a_datanode_that_is_passed_on_keeps_what_we_do_not_know() -> None:
    script = _Script(*(pb.blob(1, _located(_server(uuid))) for uuid in ("u1", "u2")))
    with scripted(script) as address:
        nodes = _nodes(address)
        added = nodes.add_block("/f", "holder", ())
        assert nodes.add_block("/f", "holder", list(added.servers.values())).servers.keys() == {
            "u2"
        }
    (excluded,) = pb.fields(script.calls[1].request)[4]
    assert isinstance(excluded, bytes)
    assert pb.fields(excluded) == pb.fields(_server("u1"))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 20,
        pb.number(1, 5),
        pb.blob(1, b"")[:-1] + b"\x05",
        pb.blob(1, pb.blob(1, _BLOCK) + pb.number(2, 0) + pb.number(4, 0)),
        pb.blob(1, _located(_server("u").replace(b"10.0.0.1", b"\xff" * 8))),
        pb.blob(1, _located()),
    ],
    ids=["nothing", "noise", "kind", "cut off", "no token", "not UTF-8", "nobody"],
)
def test_an_answer_that_lacks_something_is_refused(answer: bytes) -> None:
    with scripted(_Script(answer)) as address, pytest.raises(ValueError):
        _nodes(address).add_block("/f", "holder", ())


@pytest.mark.parametrize(
    "frame", [b"", b"\xff" * 30, b"\x05\x08", delimited(b""), delimited(b"\x10\x00") + b"\x05"]
)
def test_a_frame_that_cannot_be_understood_is_a_broken_connection(frame: bytes) -> None:
    with pytest.raises(ConnectionError):
        response_in(frame)


def test_an_answer_of_the_largest_size_takes_little_memory() -> None:
    """Each block in the answer has two bytes, and none of a block's fields."""
    answer = pb.blob(1, pb.blob(2, b"") * 500_000 + pb.number(3, 0))
    frame = delimited(pb.number(2, 0)) + delimited(answer)
    assert len(frame) < 2**20

    class Answered(NameNodes):
        def answer(self, method: str, request: bytes, wait: CallWait) -> bytes:
            return response_in(frame)

    def read() -> None:
        with pytest.raises(ValueError):
            Answered("hdfs://nobody", 1.0).stored_blocks("/f")

    assert run_bounded(read, memory_bytes=2**28, cpu_s=3)


def test_a_longer_answer_is_not_waited_for() -> None:
    length = struct.pack(">I", 2**30)
    with answering(lambda connection: connection.sendall(length)) as address:
        found = NameNodes(f"hdfs://{address[0]}:{address[1]}", 1.0)
        with pytest.raises(UnavailableError, match="does not speak Hadoop's RPC"):
            found.check()


def test_a_namenode_that_did_not_answer_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that was opened in an outage never again wrote directly, or joined files."""
    up = threading.Event()
    with scripted(_Script(), up) as address:
        found = NameNodes(f"hdfs://{address}", 0.2)
        assert not found.take_calls()
        up.set()
        assert not found.take_calls(), "not each call is to wait for it"
        monkeypatch.setattr(namenode, "SILENT_S", 0.0)
        late = NameNodes(f"hdfs://{address}", 0.2)
        up.clear()
        assert not late.take_calls()
        up.set()
        assert late.take_calls()


def test_calls_end_with_the_patience_of_a_start() -> None:
    """With a silent NameNode, each object of a store cost a start a deadline of its own."""
    came: list[socket.socket] = []

    def hang(connection: socket.socket, over: threading.Event) -> None:
        came.append(connection)
        over.wait(60)

    with talking(hang) as address:
        WAIT_BUDGET.limit(0.7)
        try:
            with pytest.raises(UNANSWERED):
                _nodes(address).call("getFsStats")
            assert WAIT_BUDGET.is_spent
            with pytest.raises(UNANSWERED):
                _nodes(address).call("getFsStats")
            assert len(came) == 1
        finally:
            WAIT_BUDGET.limit(math.inf)
