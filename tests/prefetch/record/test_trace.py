"""Traces: the log and its codec."""

import json
import os

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Inode
from bootseer.errors import BootseerError, CorruptError, UnknownFormatError
from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.trace import (
    Access,
    AccessLog,
    Trace,
    accesses_of,
    decode,
    encode,
)
from testbed.bounded import run_bounded

INDEX = "sha256:" + "1" * 64


def trace_of(files: list[TracedFile], accesses: list[Access]) -> Trace:
    return Trace(INDEX, "train", "node-1", 5, "ready", 65536, tuple(files), tuple(accesses))


digests = st.one_of(st.just(b""), st.binary(min_size=32, max_size=32))
traced = st.builds(TracedFile, st.binary(max_size=40), digests)
number = st.integers(0, 2**61)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    files = draw(st.lists(traced, min_size=1, max_size=5, unique=True))
    access = st.builds(
        Access, st.integers(0, len(files) - 1), number, st.integers(1, 2**40), number
    )
    return trace_of(files, draw(st.lists(access, max_size=20)))


@settings(max_examples=60)
@given(traces())
def test_a_trace_survives_encoding(trace: Trace) -> None:
    assert decode(encode(trace)) == trace
    assert encode(trace) == encode(trace)


@settings(max_examples=60)
@given(traces(), st.data())
def test_damage_is_refused(trace: Trace, data: st.DataObject) -> None:
    good = bytearray(encode(trace))
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] ^= data.draw(st.integers(1, 255))
    try:
        assert decode(bytes(good)) == trace  # A bit that zstd itself ignores.
    except (CorruptError, UnknownFormatError):
        pass


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(BootseerError):
        decode(noise)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["[]"], CorruptError),
        (['{"format": "bootseer-trace", "version": 2}'], UnknownFormatError),
        (['{"format": "bootseer-trace", "version": 1}'], CorruptError),
        (["[" * 100_000], CorruptError),
    ],
)
def test_wrong_headers(lines: list[str], error: type[Exception]) -> None:
    data = zstandard.ZstdCompressor().compress("\n".join([*lines, ""]).encode())
    with pytest.raises(error):
        decode(data)


def test_a_trace_of_empty_lines_takes_no_memory() -> None:
    # This would be a list of 2 GB.
    bomb = zstandard.ZstdCompressor().compress(b"\n" * (250 * 2**20))
    assert len(bomb) < 100_000
    with pytest.raises(CorruptError, match="absurd"):
        decode(bomb)


def test_an_access_must_be_of_a_file() -> None:
    trace = trace_of([TracedFile(b"a", b"")], [Access(0, 0, 1, 0)])
    text = zstandard.ZstdDecompressor().decompress(encode(trace)).decode()
    for bad in ("[1,0,1,0]", "[0,-1,1,0]", "[0,0,0,0]", "[0,0,1]", '[0,0,"1",0]', "{}"):
        changed = text.replace("[0,0,1,0]", bad)
        assert changed != text
        with pytest.raises(CorruptError):
            decode(zstandard.ZstdCompressor().compress(changed.encode()))


def test_paths_that_are_not_utf8_stay_ascii_json() -> None:
    data = encode(trace_of([TracedFile(b"\xff/\xc3\xa4", b"")], []))
    lines = zstandard.ZstdDecompressor().decompress(data).decode("ascii").splitlines()
    assert json.loads(lines[1])[0].encode("utf-8", "surrogateescape") == b"\xff/\xc3\xa4"


def test_log_survives_the_process_that_wrote_it() -> None:
    log = AccessLog(capacity=3)
    child = os.fork()
    if not child:
        log.append(1, 0, 10)
        log.append(2, 4096, 20)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert [entry[:3] for entry in log.entries()] == [(1, 0, 10), (2, 4096, 20)]
    log.append(3, 0, 1)
    log.append(4, 0, 1)
    assert len(log) == 3
    assert log.close()
    assert not log.close()
    assert not log.is_open
    log.append(5, 0, 1)
    assert len(log.entries()) == 3


def test_accesses_name_files_by_path_and_digest() -> None:
    digest = b"d" * 32
    tree = build_tree(
        [(b"", 0), (b"a", 1), (b"a/b", 2)],
        [Inode(0o40755), Inode(0o40755), Inode(0o100644, digest=digest)],
        [Blob("sha256:" + "0" * 64, 0, (), "sha256:" + "0" * 64, 0)],
    )
    files, accesses = accesses_of(tree, [(2, 0, 4096, 1), (2, 4096, 1, 2), (2, 0, 4096, 3)])
    assert files == (TracedFile(b"a/b", digest),)
    assert accesses == (Access(0, 0, 4096, 1), Access(0, 4096, 1, 2))


def test_a_log_of_another_numbering_is_of_the_same_files() -> None:
    blob = Blob("sha256:" + "0" * 64, 0, (), "sha256:" + "0" * 64, 0)
    file = Inode(0o100644)
    served = build_tree(
        [(b"", 0), (b"a", 1), (b"b", 2), (b"c", 3)], [Inode(0o40755)] + 3 * [file], [blob]
    )
    tree = build_tree([(b"", 0), (b"a", 2), (b"b", 1)], [Inode(0o40755)] + 2 * [file], [blob])
    entries = [(1, 0, 10, 1), (3, 0, 10, 2), (2, 5, 10, 3), (1, 10, 10, 4)]
    files, accesses = accesses_of(tree, entries, served=served)
    assert files == (TracedFile(b"a", b""), TracedFile(b"b", b""))
    assert accesses == (Access(0, 0, 10, 1), Access(1, 5, 10, 3), Access(0, 10, 10, 4))


def compressed(*lines: str) -> bytes:
    return zstandard.ZstdCompressor().compress("".join(f"{line}\n" for line in lines).encode())


def header(file_count: int, access_count: int) -> str:
    trace = trace_of([], [])
    text = zstandard.ZstdDecompressor().decompress(encode(trace)).decode().splitlines()[0]
    return json.dumps(json.loads(text) | {"file_count": file_count, "access_count": access_count})


@pytest.mark.parametrize(
    "lines",
    [
        [header(1, 1), '["a",""]', "[" + "[]," * 3_000_000 + "[]]"],
        [header(1, 1), "[" + "{}," * 2_000_000 + "{}]", "[0,0,1,0]"],
        [header(1, 1), '["a",""]', "[0,0,1,0]" * 1_000_000],
        [header(0, 0)[:-1] + ', "x": [' + "[]," * 2_000_000 + "[]]}"],
    ],
    ids=["access", "file", "many in a line", "header"],
)
def test_a_small_trace_makes_few_objects(lines: list[str]) -> None:
    data = compressed(*lines)
    assert len(data) < 10_000

    def read() -> None:
        decode(data)

    assert not run_bounded(read, (CorruptError,), memory_bytes=2**25)


def test_a_long_path_takes_little_memory() -> None:
    # A path of 7 MiB, the longest that a line holds.
    data = compressed(header(1, 0), json.dumps([os.urandom(7 * 2**19).hex(), ""]))

    def read() -> None:
        decode(data)

    assert run_bounded(read, memory_bytes=2**27)


@pytest.mark.parametrize("place", ["file", "access"])
def test_a_line_of_more_than_8_mib_is_refused(place: str) -> None:
    # Incompressible, so that it is no bomb.
    path = os.urandom(2**22).hex()
    blanks = os.urandom(2**23).translate(bytes(b" \t\r "[byte % 4] for byte in range(256)))
    lines = {
        "file": [header(1, 0), json.dumps([path, ""])],
        "access": [header(1, 1), '["a",""]', f"[0,0,1,{blanks.decode()}0]"],
    }
    with pytest.raises(CorruptError, match="line"):
        decode(compressed(*lines[place]))


def test_a_trace_names_each_file_once() -> None:
    data = compressed(header(2, 0), '["a",""]', '["a",""]')
    with pytest.raises(CorruptError, match="twice"):
        decode(data)


@pytest.mark.parametrize("value", ["1e400", "-1", "null", '"1"', "1.5"])
def test_numbers_of_a_header_are_whole(value: str) -> None:
    with pytest.raises(CorruptError):
        decode(compressed(header(0, 0).replace('"started_ns": 5', f'"started_ns": {value}')))
