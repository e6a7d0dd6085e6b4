"""Files of each stored format are read, and written again with the same bytes.

Stored files must stay readable: a format's file changes on purpose only, with its page in
docs/format.
"""

from collections.abc import Callable
from pathlib import Path

import zstandard

from bootseer.blob import index
from bootseer.blob.read import BlobReader, verify
from bootseer.prefetch.bundle import hot_store, similar
from bootseer.prefetch.index import chains, records
from bootseer.prefetch.record import trace
from bootseer.prefetch.warm import record as warm
from bootseer.snapshots.manifest import decode, encode
from bootseer.store.objects import lease, uses

_FOLDER = Path(__file__).parent
_A, _B, _D = ("sha256:" + digit * 64 for digit in "abd")
_LONG = "sha512:" + "e" * 128
_TEXT = b"The quick brown fox jumps over the lazy dog.\n" * 300


def _lease(data: bytes) -> bytes:
    record = lease.decode(data)
    assert record is not None
    return record.encode()


def _chain(data: bytes) -> bytes:
    diff_ids = (_A, _LONG, _B)
    chain = chains.decode_chain(data, chains.chain_ids(diff_ids)[-1], "x")
    assert chain.diff_ids == diff_ids
    return chains.encode_chain(chain)


_AGAIN: dict[str, Callable[[bytes], bytes]] = {
    "image.json": lambda d: records.IMAGE_FORM.encode(records.IMAGE_FORM.decode(d, "x")),
    "layer.json": lambda d: records.LAYER_FORM.encode(records.LAYER_FORM.decode(d, "x")),
    "chain.json": _chain,
    "pointer.json": lambda d: hot_store.POINTER_FORM.encode(hot_store.decode_pointer(d, _D, "x")),
    "relatives.json": lambda d: similar.FORM.encode(similar.FORM.decode(d, "x")),
    "use.json": lambda d: uses.FORM.encode(uses.FORM.decode(d, "x")),
    "lease.json": _lease,
    "manifest.json": lambda d: encode(decode(d)),
    "tree.index": lambda d: index.encode(index.decode(d)),
}


def test_each_document_is_read_and_written_as_it_was() -> None:
    stored = {name: (_FOLDER / name).read_bytes() for name in _AGAIN}
    assert {name: again(stored[name]) for name, again in _AGAIN.items()} == stored


def test_a_blob_is_read() -> None:
    blob = (_FOLDER / "blob.tar.zst").read_bytes()
    tree = index.decode((_FOLDER / "tree.index").read_bytes())

    def read(number: int, offset: int, length: int) -> bytes:
        assert number == 0
        return blob[offset : offset + length]

    verify(tree, read)
    number = tree.resolve(b"directory/file")
    assert number is not None
    assert BlobReader(tree, read).read(number, 0, 10**6) == _TEXT


def test_a_trace_is_read_and_written_as_it_was() -> None:
    data = (_FOLDER / "trace.zst").read_bytes()
    found = trace.decode(data)
    assert [file.path for file in found.files] == [b"usr/bin/[,\xff", b'b"\\']
    assert _lines(trace.encode(found)) == _lines(data)


def test_a_record_of_warmed_files_is_read_and_written_as_it_was() -> None:
    data = (_FOLDER / "warm.zst").read_bytes()
    found = warm.decode(data, "path:/data/\udcff", "train")
    assert [(file.path, file.mtime_ns) for file in found.files] == [
        (b"a,[\xff/b", -5),
        (b"c", 2**66),
    ]
    assert _lines(warm.encode(found)) == _lines(data)


def _lines(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)
