"""A DataNode that does not take a block as it should: an error that another way is tried after."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from bootseer.store import hdfs_protobuf as pb
from bootseer.store.hdfs_added_block import AddedBlock
from bootseer.store.hdfs_rpc import UNANSWERED, NameNode
from bootseer.store.hdfs_straight import Placed, StraightFile
from tests.support.answering import answering

# BlockOpResponseProto: success; PipelineAckProto: packet, reply.
_TAKEN = b"\x02\x08\x00"
_CONFIRMED = b"\x04\x08\x00\x10\x00"


@contextlib.contextmanager
def _datanode(answer: bytes, *, hangs: bool) -> Iterator[tuple[str, int]]:
    """The address of one that says `answer`, then takes what comes, or says no more."""
    gone = threading.Event()

    def reply(connection: socket.socket) -> None:
        connection.sendall(answer)
        if hangs:
            gone.wait(20)

    with answering(reply) as address:
        yield address
        gone.set()


def _write(placed: Placed) -> None:
    file = StraightFile(placed, 4096, 0.1)
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
    block = pb.text(1, "pool") + pb.number(2, 7) + pb.number(3, 1)
    with _datanode(answer, hangs=hangs) as address:
        added = AddedBlock(block, {}, b"", (), (), address)
        # Nobody is there to be told that the file is complete.
        placed = Placed(NameNode((), "user", 0.1), "/f", "holder", added)
        with pytest.raises(UNANSWERED) as caught:
            _write(placed)
    assert "NameNode" not in str(caught.value)
