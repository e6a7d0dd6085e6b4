"""Messages of HDFS: declared once, read within bounds, and behind a length that comes in pieces."""

from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.store.hdfs.rpc import messages
from bootseer.store.hdfs.rpc.protobuf import (
    WHOLE,
    Message,
    arguments,
    delimited,
    take_delimited,
    zigzag,
)
from tests.bootseer.store.hdfs import protobuf as pb


class Inner(Message, frozen=True):
    number: Annotated[int, 2]
    whole: Annotated[bytes, WHOLE] = b""


class Outer(Message, frozen=True):
    """One field of each kind."""

    name: Annotated[str, 1]
    flag: Annotated[bool, 2] = False
    data: Annotated[bytes | None, 3] = None
    inner: Annotated[Inner | None, 4] = None
    inners: Annotated[tuple[Inner, ...], 5] = ()
    numbers: Annotated[tuple[int, ...], 300] = ()


WRITTEN = (
    pb.text(1, "n\xe4me") + pb.number(2, 1) + pb.blob(3, b"\xff")
    + pb.blob(4, pb.number(2, 7) + pb.text(9, "more")) + pb.blob(5, pb.number(2, 8)) * 2
    + pb.number(300, 2**40) + pb.number(300, 0)
)  # fmt: skip


def test_a_message_has_the_fields_that_it_declares() -> None:
    found = Outer.decode(pb.text(77, "unknown") + WRITTEN + b"\x31" + bytes(8))
    assert (found.name, found.flag, found.data) == ("n\xe4me", True, b"\xff")
    assert found.inner is not None
    assert (found.inner.number, [inner.number for inner in found.inners]) == (7, [8, 8])
    assert found.numbers == (2**40, 0)
    # Of `inner` also what is not declared.
    assert found.encode() == WRITTEN


@pytest.mark.parametrize(
    "data",
    [b"", pb.number(1, 5), pb.text(1, "a")[:-1], b"\x0a\x01\xff", b"\xff" * 20,
     pb.text(1, "a") + pb.blob(4, b""), b"\x0f"],
    ids=["missing", "kind", "cut off", "not UTF-8", "endless", "inside", "group"],
)  # fmt: skip
def test_what_is_no_such_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Outer.decode(data)


@given(st.binary(max_size=200))
def test_noise_is_refused_or_a_message(data: bytes) -> None:
    try:
        Outer.decode(data)
    except ValueError:
        pass


def test_arguments_are_numbered_in_their_order() -> None:
    expected = pb.text(1, "/f") + pb.number(2, 0) + pb.text(4, "a") + pb.text(4, "b")
    assert arguments("/f", False, None, ("a", "b")) == expected
    assert [zigzag(value) for value in (0, -1, 1, -3)] == [0, 1, 2, 5]


@pytest.mark.parametrize("length", [0, 1, 127, 128, 300])
def test_a_message_is_taken_when_all_of_it_is_there(length: int) -> None:
    message = bytes(length)
    data = delimited(message)
    for count in range(len(data)):
        found, least = take_delimited(data[:count], 300)
        assert found is None
        assert count < least <= len(data)
    assert take_delimited(bytearray(data) + b"next", 300) == (message, len(data))


def test_a_message_that_is_too_long_is_refused_before_it_comes() -> None:
    with pytest.raises(ValueError, match="too long a message"):
        take_delimited(delimited(bytes(301))[:3], 300)
    with pytest.raises(ValueError, match="does not end"):
        take_delimited(b"\xff" * 20, 300)


def test_what_is_asked_of_a_datanode() -> None:
    block = messages.ExtendedBlock("pool", 7, 1, 1000)
    sent = pb.text(1, "pool") + pb.number(2, 7) + pb.number(3, 1) + pb.number(4, 1000)
    base = pb.blob(1, sent) + pb.blob(2, b"token")
    read = pb.blob(1, pb.blob(1, base) + pb.text(2, "c")) + pb.number(2, 512) + pb.number(3, 64)
    asked = messages.op_read_block(block, b"token", "c", 512, 64)
    assert asked == b"\x00\x1c\x51" + delimited(read + pb.number(4, 0))
    servers = tuple(
        messages.DatanodeInfo.decode(
            pb.blob(1, pb.text(1, "a") + pb.text(2, "h") + pb.text(3, uuid) + pb.number(4, 9866))
            + pb.number(2, 12345)
        )
        for uuid in ("u1", "u2")
    )
    located = messages.LocatedBlock(block, 0, False, b"token", servers, (1, 2), ("s1", "s2"))
    write = (
        pb.blob(1, pb.blob(1, base) + pb.text(2, "c")) + pb.blob(2, servers[1].whole)
        + pb.number(4, 6) + pb.number(5, 2) + pb.number(6, 0) + pb.number(7, 0) + pb.number(8, 1)
        + pb.blob(9, pb.number(1, 2) + pb.number(2, 512)) + pb.number(11, 1) + pb.number(12, 2)
        + pb.text(16, "s1") + pb.text(17, "s2")
    )  # fmt: skip
    asked = messages.op_write_block(located, "c", messages.Checksum(2, 512))
    assert asked == b"\x00\x1c\x50" + delimited(write)
