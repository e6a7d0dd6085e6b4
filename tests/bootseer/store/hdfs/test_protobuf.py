"""Messages behind their length, which come in pieces of any size, or never."""

import pytest

from bootseer.store.hdfs.rpc import protobuf as pb


@pytest.mark.parametrize("length", [0, 1, 127, 128, 300])
def test_a_message_is_taken_when_all_of_it_is_there(length: int) -> None:
    message = bytes(length)
    data = pb.varint(length) + message
    for count in range(len(data)):
        found, least = pb.delimited(data[:count], 300)
        assert found is None
        assert count < least <= len(data)
    assert pb.delimited(bytearray(data) + b"next", 300) == (message, len(data))


def test_a_message_that_is_too_long_is_refused_before_it_comes() -> None:
    with pytest.raises(ValueError, match="too long a message"):
        pb.delimited(pb.varint(301), 300)
    with pytest.raises(ValueError, match="too long a number"):
        pb.delimited(b"\xff" * 20, 300)
