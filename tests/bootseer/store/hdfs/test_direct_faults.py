"""DataNodes that fail while a block is written: an error, after which another way is tried."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from bootseer.store.hdfs.direct_write import LARGE, DirectFile, PlacedBlock
from bootseer.store.hdfs.messages import MESSAGES
from bootseer.store.hdfs.namenode import UNANSWERED, AddedBlock, CallWait, NameNodes
from testbed.servers.answering import answering
from testbed.waiting import pause

# BlockOpResponseProto: success; PipelineAckProto: packet, reply.
_LOCATED = MESSAGES["LocatedBlock"](
    b={"poolId": "pool", "blockId": 7, "generationStamp": 1},
    offset=0,
    corrupt=False,
    blockToken=b"",
)
# The reply to the call that completes the file.
_NOBODY = NameNodes("hdfs://127.0.0.1:1", 0.1)
_TAKEN = b"\x02\x08\x00"
_CONFIRMED = b"\x04\x08\x00\x10\x00"


@contextlib.contextmanager
def _datanode(answer: bytes, *, hangs: bool) -> Iterator[tuple[str, int]]:
    """Yield the address of a server that sends `answer`, and then ends or hangs."""
    gone = threading.Event()

    def reply(connection: socket.socket) -> None:
        connection.sendall(answer)
        if hangs:
            gone.wait(20)

    with answering(reply) as address:
        yield address
        gone.set()


def _write(placed: PlacedBlock) -> None:
    file = DirectFile(_NOBODY, placed, 4096, 0.1, LARGE)
    with contextlib.ExitStack() as stack:
        stack.callback(file.drop)
        file.write(b"x" * 1000)
        file.close()


@pytest.mark.parametrize("hangs", [False, True], ids=["ends", "hangs"])
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 64,
        b"\x02\x08\x05",  # ERROR_ACCESS_TOKEN
        _TAKEN,
        _TAKEN + b"\x7f" * 200,
        _TAKEN + _CONFIRMED.replace(b"\x08\x00", b"\x08\x0a"),
        _TAKEN + _CONFIRMED.replace(b"\x10\x00", b"\x10\x01"),
        _TAKEN + _CONFIRMED,
    ],
    ids=["nothing", "nonsense", "token", "taken", "junk", "other", "failed", "half"],
)
def test_a_block_that_is_not_confirmed_is_no_file(answer: bytes, hangs: bool) -> None:
    with _datanode(answer, hangs=hangs) as address:
        added = AddedBlock(_LOCATED, address, {})
        with pytest.raises(UNANSWERED) as caught:
            _write(PlacedBlock("/f", "holder", added))
    assert "NameNode" not in str(caught.value)


@pytest.mark.parametrize(
    ("begin", "forever"),
    [(b"", b"\x02\x08\x01"), (b"\xff\xff\x03", b"\0")],
    ids=["heartbeats", "a message that does not end"],
)
def test_a_datanode_that_talks_without_end_is_left(begin: bytes, forever: bytes) -> None:
    """Messages that confirm nothing count as silence."""
    sent = 0

    def reply(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(_TAKEN + begin)
        while sent < 1000:
            connection.sendall(forever)
            sent += 1
            pause(0.01)

    with answering(reply) as address:
        added = AddedBlock(_LOCATED, address, {})
        with pytest.raises(UNANSWERED):
            _write(PlacedBlock("/f", "holder", added))
    assert sent < 1000


def test_an_answer_of_the_name_node_has_one_deadline() -> None:
    """The deadline also ends an answer that trickles."""
    sent = 0

    def trickle(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(b"\0\x0f\0\0")
        while sent < 1000:
            connection.sendall(b"a")
            sent += 1
            pause(0.005)

    with answering(trickle) as address:
        found = NameNodes(f"hdfs://{address[0]}:{address[1]}", 0.3)
        with pytest.raises(UNANSWERED):
            found.answer("getServerDefaults", b"", CallWait.USUAL)
    assert sent < 1000
