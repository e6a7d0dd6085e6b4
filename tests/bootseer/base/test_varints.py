"""Length-prefixed messages are taken when complete, and limited in size before that."""

import pytest

from bootseer.base.varints import delimited, take_delimited


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
