"""Pointers and traces in a store, whole and damaged."""

import json
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, CorruptError, UnknownFormatError
from bootseer.prefetch.bundle.hot_store import (
    POINTER_FORM,
    HotPointer,
    decode_pointer,
    pointer_key,
    publish_trace,
    read_pointer,
    read_trace,
    trace_keys,
    workloads,
)
from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.trace import Access, Trace
from bootseer.store import Store

INDEX = "sha256:" + "1" * 64
POINTER = HotPointer(INDEX, "sha256:" + "2" * 64, 1000, 200, "sha256:" + "3" * 64, 4, 5)


def trace_of(workload: str, offset: int) -> Trace:
    file = TracedFile(b"f", b"d" * 32)
    accesses = (Access(0, offset, 1, 0),)
    return Trace(INDEX, workload, "n", 0, "ready", 32768, (file,), accesses)


def test_a_pointer_is_of_one_image(store: Store) -> None:
    assert read_pointer(store, INDEX, "w") is None
    store.publish(pointer_key(INDEX, "w"), POINTER_FORM.encode(POINTER))
    assert read_pointer(store, INDEX, "w") == POINTER
    with pytest.raises(CorruptError, match="another image"):
        decode_pointer(POINTER_FORM.encode(POINTER), "sha256:" + "9" * 64, "x")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "other"}, CorruptError),
        ({"version": 2}, UnknownFormatError),
        ({"bundle_digest": "sha256:../../x"}, CorruptError),
        ({"header_bytes": 2**40}, CorruptError),
        ({"header_bytes": 1}, CorruptError),
        ({"size_bytes": -1}, CorruptError),
        ({"trace_count": "4"}, CorruptError),
        ({"created_ns": True}, CorruptError),
    ],
)
def test_hostile_pointers(change: dict[str, object], error: type[BootseerError]) -> None:
    document = {**json.loads(POINTER_FORM.encode(POINTER)), **change}
    with pytest.raises(error):
        decode_pointer(json.dumps(document).encode(), INDEX, "x")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 50_000])
def test_noise_is_no_pointer(data: bytes) -> None:
    with pytest.raises((CorruptError, UnknownFormatError)):
        decode_pointer(data, INDEX, "x")


def test_traces(store: Store, tmp_path: Path) -> None:
    keys = {publish_trace(store, trace_of("a", offset)) for offset in range(20)}
    assert publish_trace(store, trace_of("a", 0)) in keys
    publish_trace(store, trace_of("b", 0))
    assert workloads(store, INDEX) == ["a", "b"]
    newest = trace_keys(store, INDEX, "a")
    assert len(newest) == 16
    assert set(newest) <= keys
    assert read_trace(store, newest[0]).workload == "a"
    path = tmp_path / "store" / newest[0]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CorruptError, match="digest in its name"):
        read_trace(store, newest[0])
