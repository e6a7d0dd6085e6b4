"""Places of a request's bytes in the buffer."""

import os

import pytest

from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.session import RequestBuffer

MAX_WRITE_BYTES = 2**18


def _take(buffer: RequestBuffer, request: bytes) -> None:
    """Read the request into `buffer`, as from the device."""
    file = os.memfd_create("request")
    try:
        os.pwrite(file, request, 0)
        assert os.preadv(file, buffer.into, 0) == len(request)
    finally:
        os.close(file)


@pytest.mark.parametrize("max_write_bytes", [4096, MAX_WRITE_BYTES])
@pytest.mark.parametrize("length", [40, 41, 79, 80, 81, 300, 4176, 4177, 9000])
def test_a_body_is_what_follows_the_header(length: int, max_write_bytes: int) -> None:
    buffer = RequestBuffer(max_write_bytes)
    request = os.urandom(length)
    _take(buffer, request)
    assert bytes(buffer.body(length)) == request[wire.IN_HEADER_BYTES :]


def test_a_write_that_fills_the_buffer_is_given_away() -> None:
    buffer = RequestBuffer(MAX_WRITE_BYTES)
    written = [os.urandom(size) for size in (MAX_WRITE_BYTES, MAX_WRITE_BYTES - 48, 100)]
    taken = []
    for data in written:
        _take(buffer, bytes(wire.WRITE_DATA_OFFSET) + data)
        taken.append(buffer.data(len(data)))
    assert [bytes(data) for data in taken] == written
    assert [isinstance(data, bytearray) for data in taken] == [True, True, False]


def test_a_view_that_an_error_keeps_does_no_harm() -> None:
    """The traceback of a refused write has a view of the buffer, which therefore cannot be
    resized."""
    buffer = RequestBuffer(MAX_WRITE_BYTES)
    kept = buffer.data(100)
    data = os.urandom(MAX_WRITE_BYTES - 48)
    _take(buffer, bytes(wire.WRITE_DATA_OFFSET) + data)
    assert bytes(buffer.data(len(data))) == data
    assert len(kept) == 100


def test_what_was_given_away_is_used_again_when_nobody_has_it_any_more() -> None:
    size = 3 * 2**17  # of no other test
    buffer = RequestBuffer(size)
    given = buffer.data(size - 48)
    given[:] = b"x" * (size - 48)
    assert isinstance(given, bytearray)
    given += b"y" * 48
    view = memoryview(given)[5:]
    del given
    buffer.data(size)
    assert view == b"x" * (size - 53) + b"y" * 48, "somebody has a view of it"
    del view
    kept = buffer.data(size)
    assert bytes(buffer.data(size)) == b"x" * (size - 48) + b"y" * 48
    assert not any(kept)
