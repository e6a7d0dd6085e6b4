"""Documents of earlier releases are read, and what is written today has the same bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from bootseer.prefetch.bundle import bundle_reuse, hot_store
from bootseer.prefetch.index import chains, records
from bootseer.prefetch.record import trace
from bootseer.prefetch.warm import record as warm
from bootseer.snapshots.catalogue import manifest_codec
from bootseer.store.objects import lease, uses

_FOLDER = Path(__file__).parent / "documents-1"
_A, _B, _C, _D = ("sha256:" + digit * 64 for digit in "abcd")
_LONG = "sha512:" + "e" * 128


def _lease(data: bytes) -> bytes:
    record = lease.decode(data)
    assert record is not None
    return record.encode()


def _chain(data: bytes, diff_ids: tuple[str, ...]) -> bytes:
    chain = chains.decode_chain(data, chains.chain_ids(diff_ids)[-1], "x")
    assert chain.diff_ids == diff_ids
    return chains.encode_chain(chain)


_AGAIN: dict[str, Callable[[bytes], bytes]] = {
    "image.json": lambda d: records.IMAGE_FORM.encode(records.IMAGE_FORM.decode(d, "x")),
    "layer.json": lambda d: records.LAYER_FORM.encode(records.LAYER_FORM.decode(d, "x")),
    "chain.json": lambda d: _chain(d, (_A, _LONG, _B)),
    "chain-without-index.json": lambda d: _chain(d, (_A,)),
    "pointer.json": lambda d: hot_store.POINTER_FORM.encode(hot_store.decode_pointer(d, _D, "x")),
    "pointer-with-scattered-files.json": lambda d: hot_store.POINTER_FORM.encode(
        hot_store.decode_pointer(d, _D, "x")
    ),
    "relatives.json": lambda d: bundle_reuse.FORM.encode(bundle_reuse.FORM.decode(d, "x")),
    "use.json": lambda d: uses.FORM.encode(uses.FORM.decode(d, "x")),
    "lease.json": _lease,
    "manifest-1.json": lambda d: manifest_codec.encode(manifest_codec.decode(d)),
    "manifest-2.json": lambda d: manifest_codec.encode(manifest_codec.decode(d)),
}


@pytest.mark.parametrize("name", _AGAIN)
def test_a_document_is_read_and_written_as_it_was(name: str) -> None:
    data = (_FOLDER / name).read_bytes()
    assert _AGAIN[name](data) == data


def _lines(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def test_a_trace_is_read_and_written_as_it_was() -> None:
    data = (_FOLDER / "trace.zst").read_bytes()
    found = trace.decode(data)
    assert [file.path for file in found.files] == [b"usr/bin/[,\xff", b'b"\\']
    assert _lines(trace.encode(found)) == _lines(data)


def test_a_warm_record_is_read_and_written_as_it_was() -> None:
    data = (_FOLDER / "warm.zst").read_bytes()
    found = warm.decode(data, "path:/data/\udcff", "train")
    assert [(file.path, file.mtime_ns) for file in found.files] == [
        (b"a,[\xff/b", -5),
        (b"c", 2**66),
    ]
    assert _lines(warm.encode(found)) == _lines(data)
