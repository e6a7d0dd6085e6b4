"""Hot sets that earlier releases wrote, as Parquet: read where pyarrow is installed."""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import BootseerError, UnknownFormatError, UnsupportedError
from bootseer.prefetch.record.hotset import HotRange, HotSet, decode
from tests.support.bounded import run_bounded

STORED = Path(__file__).with_name("hotset-1.parquet").read_bytes()


def test_a_hot_set_of_version_1() -> None:
    assert decode(STORED) == HotSet(
        "sha256:" + "1" * 64,
        "train",
        3,
        (
            HotRange(b"usr/bin/python3.11", b"\x01" * 32, 0, 8192, 3),
            HotRange(b"usr/lib/\xff\xfe.so", b"", 4096, 4096, 2),
            HotRange(b"usr/bin/python3.11", b"\x01" * 32, 2**33, 4096, 3),
        ),
    )


def test_without_pyarrow_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'bootseer\[parquet\]'"):
        decode(STORED)


@settings(max_examples=40)
@given(st.integers(0, len(STORED) - 1), st.integers(1, 255))
def test_damage_is_refused_or_harmless(position: int, change: int) -> None:
    damaged = bytearray(STORED)
    damaged[position] ^= change
    try:
        hot = decode(bytes(damaged))
    except BootseerError:
        return
    assert all(r.offset >= 0 and r.length > 0 for r in hot.ranges)


def test_other_parquet_files_are_refused() -> None:

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": [1]}), sink)
    with pytest.raises(UnknownFormatError, match="no hot set"):
        decode(sink.getvalue().to_pybytes())


def test_a_path_that_a_million_ranges_share_is_stored_once() -> None:

    count = 2**17
    one = pq.read_table(pa.BufferReader(STORED))
    columns = [
        pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [b"p" * 2**16]),
        pa.array([b""] * count),
        pa.array([0] * count, pa.int64()),
        pa.array([4096] * count, pa.int64()),
        pa.array([1] * count, pa.int32()),
    ]
    table = pa.table(columns, names=one.schema.names, metadata=one.schema.metadata)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data = sink.getvalue().to_pybytes()
    assert len(data) < 100_000

    def read() -> None:
        assert len(decode(data).ranges) == count

    assert run_bounded(read, memory_bytes=2**28)
