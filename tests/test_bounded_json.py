"""JSON that is small and would become large."""

import pytest

from bootseer.bounded_json import parse_json
from bootseer.errors import CorruptError
from bootseer.prefetch.index.records import decode_layer
from bootseer.snapshots.catalogue.manifest_codec import decode
from tests.support.bounded import run_bounded


@pytest.mark.parametrize("value", [b"[]", b"{}", b'[{"":[]}]', b"1"])
def test_values_are_counted_before_they_are_made(value: bytes) -> None:
    data = b"[" + (value + b",") * 5_000_000 + value + b"]"
    for read in (
        lambda: parse_json(data, "x", 2**30),
        lambda: decode(data),
        lambda: decode_layer(data, "x"),
    ):
        assert not run_bounded(read, (CorruptError,), memory_bytes=2**24)


@pytest.mark.parametrize("data", [b"NaN", b"[Infinity]", b"-Infinity", b"{", b"\xff", b"[" * 10**5])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="a file is not valid JSON"):
        parse_json(data, "a file", 2**20)


def test_the_size_is_checked_first() -> None:
    with pytest.raises(CorruptError, match="larger than 3 bytes"):
        parse_json(b"[1] ", "a file", 3)
    assert parse_json(b"[1]", "a file", 3) == [1]
