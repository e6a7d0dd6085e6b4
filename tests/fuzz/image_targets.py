"""Targets that read images' files from the store, a registry or the node's cache."""

import contextlib
import hashlib
import io
import shutil
import struct
import tempfile
import zlib
from array import array
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import zstandard
from hypothesis import strategies as st

from bootseer.base.content_digest import content_digest
from bootseer.blob import index, seek_points
from bootseer.blob.pack.packing import pack_tar
from bootseer.blob.read import verify
from bootseer.blob.tree import Frame
from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    UnknownFormatError,
    UnsupportedError,
)
from bootseer.linux.processes import boot_id
from bootseer.prefetch.bundle import format as bundle
from bootseer.prefetch.bundle.file import ExtentMap
from bootseer.prefetch.cache.node_cache import STREAMS, NodeCache
from bootseer.prefetch.cache.stream import checksum, encode_sums
from bootseer.prefetch.record import hints, hotset, trace
from bootseer.prefetch.record.hotset import PAGE_BYTES, TOUCH_COUNT_MAX
from bootseer.prefetch.sources.layer_tar import index_layer
from bootseer.prefetch.warm import record
from tests.fuzz import samples
from tests.fuzz.harness import Target
from tests.fuzz.mutations import mutated
from tests.support.images.forged_index import SECTIONS, forge, sections_of

_DAMAGED = (CorruptError, UnknownFormatError)


# ---- the tree index ---------------------------------------------------------------------------


@st.composite
def _indexes(draw: st.DrawFn) -> bytes:
    tree = samples.tree()
    sections = sections_of(tree)
    counts = [tree.inode_count, tree.name_count]
    for name in draw(st.lists(st.sampled_from(sorted(sections)), max_size=2)):
        sections[name] = draw(mutated((sections[name],)))
        typecode = SECTIONS[name]
        if typecode:
            width = array(typecode).itemsize
            sections[name] = sections[name][: len(sections[name]) // width * width]
    if draw(st.integers(0, 9)) == 0:
        counts[draw(st.integers(0, 1))] = draw(st.sampled_from((0, 1, 5, 2**22, 2**32 - 1)))
    data = forge(sections, counts[0], counts[1], draw(st.integers(0, 1)))
    return draw(mutated((data,))) if draw(st.integers(0, 4)) == 0 else data


def _read_index(data: bytes) -> None:
    tree = index.decode(data)
    tree.validate()
    assert tree.inode_count <= index.COUNT_MAX
    assert sum(blob.stream_length for blob in tree.blobs) <= index.STREAMS_BYTES_MAX
    paths = [path for path, _ in tree.walk()]
    assert len(set(paths)) == len(paths) == tree.name_count + 1
    for number in range(tree.inode_count):
        inode = tree.inode(number)
        assert sum(extent.length for extent in inode.extents) <= inode.size_bytes
        tree.path(number)
        tree.link_count(number)


# ---- bundles, traces, hot sets, warm records -----------------------------------------------------

_LENGTHS = (40 * 512 + 77, 9 * 512)


def _bundle() -> tuple[bytes, bytes, int, int]:
    """Return head, tables, number of frames and number of extents of a bundle."""
    frames = bundle.plan_frames([(0, 0, 9000), (1, 512, 1024), (0, 20_000, 557)], _LENGTHS, 2048)
    streams = [bytes(length) for length in _LENGTHS]
    header = bundle.write_bundle(
        samples.INDEX, frames, lambda n, at, count: streams[n][at : at + count], [io.BytesIO()] * 2
    )
    tables = zstandard.ZstdDecompressor().decompress(header[64:-32])
    return header[:64], tables, len(frames), sum(map(len, frames))


@st.composite
def _bundles(draw: st.DrawFn) -> bytes:
    head, tables, frame_count, extent_count = _bundle()
    tables = draw(mutated((tables,)))
    # Counts that mostly fit the length of the tables.
    frame_count = draw(st.sampled_from((frame_count, 0, 1, 2**17, 2**32 - 1)))
    rest = len(tables) - 44 * frame_count
    extent_count = rest // 16 if 0 <= rest < 2**32 else extent_count
    tables = tables[: 44 * frame_count + 16 * extent_count]
    packed = zstandard.compress(tables)
    parts = draw(st.sampled_from((2, 0, 256, 257)))
    head = head[:12] + struct.pack("<I", parts) + head[16:48]
    head += struct.pack("<IIII", len(packed), len(tables), frame_count, extent_count)
    return head + packed + hashlib.sha256(head + packed).digest()


def _read_bundle(data: bytes) -> None:
    found = bundle.decode_header(data, samples.INDEX, _LENGTHS)
    assert found.stream_bytes <= sum(_LENGTHS)
    for frame in found.frames:
        assert sum(extent.length for extent in frame.extents) == frame.stream_length
        for extent in frame.extents:
            assert extent.offset + extent.length <= _LENGTHS[extent.blob]
    ExtentMap(found.frames, len(_LENGTHS)).frames_for(0, 0, 10**6)


def _expanded(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _read_trace(data: bytes) -> None:
    found = trace.decode(zstandard.compress(data))
    assert all(access.offset + access.length <= 2**62 for access in found.accesses)
    hot = hotset.merge_traces(found.index_digest, found.workload, [found] * 3)
    assert sum(r.length for r in hot.ranges) <= TOUCH_COUNT_MAX * PAGE_BYTES
    list(hotset.stream_ranges(hot, samples.tree()))


def _warm() -> bytes:
    files = (
        record.WarmFile(
            b"a", 10_000, 2**62, (record.FileRange(0, 10), record.FileRange(4096, 5000))
        ),
        record.WarmFile(b"b/\xff", 0, -1, ()),
    )
    return _expanded(record.encode(record.WarmRecord("path:/x", "w", "fanotify", 2, 5, files)))


def _read_warm(data: bytes) -> None:
    found = record.decode(zstandard.compress(data), "path:/x", "w")
    assert all(r.end <= file.size_bytes for file in found.files for r in file.ranges)


def _hotset() -> bytes:
    return _expanded(hotset.encode(hotset.merge_traces(samples.INDEX, "w", [samples.trace()])))


def _read_hotset(data: bytes) -> None:
    assert all(
        r.offset >= 0 and r.length > 0 for r in hotset.decode(zstandard.compress(data)).ranges
    )


# ---- tars ---------------------------------------------------------------------------------------


@st.composite
def _tars(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(mutated(samples.tars())))
    # Make the checksum of each header right.
    for start in range(0, len(data) - 511, 512):
        if data[start + 257 : start + 262] == b"ustar":
            total = sum(data[start : start + 148]) + 256 + sum(data[start + 156 : start + 512])
            data[start + 148 : start + 156] = b"%06o\0 " % total
    return bytes(data)


def _read_tar(data: bytes) -> None:
    sink = io.BytesIO()
    packed = pack_tar(io.BytesIO(data), sink, threads=1, level=1)
    stored = sink.getvalue()
    verify(packed, lambda number, offset, length: stored[offset : offset + length])
    index.decode(index.encode(packed))
    index_layer(io.BytesIO(data), lambda: samples.DIGEST)


# ---- the node's cache ---------------------------------------------------------------------------

_STREAM = bytes(range(256)) * 20 + b"end"
_STARTS = (*range(0, len(_STREAM), 512), len(_STREAM))


@st.composite
def _cached(draw: st.DrawFn) -> bytes:
    """Draw a table of checksums of a stream, some of them absent."""
    boot = draw(st.sampled_from((bytes.fromhex(boot_id().replace("-", "")), bytes(16))))
    sums = [
        checksum(_STREAM[start:stop]) if number % 3 else 0
        for number, (start, stop) in enumerate(pairwise(_STARTS))
    ]
    return draw(mutated((encode_sums(_STARTS, sums, boot),)))


def _read_cached(data: bytes) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-cache-"))
    try:
        streams = folder / STREAMS / samples.DIGEST.replace(":", "-")
        streams.mkdir(parents=True, mode=0o700)
        (streams / "sums").write_bytes(data)
        (streams / "data").write_bytes(_STREAM)
        cache = NodeCache(folder)
        assert cache.recheck(samples.DIGEST) >= 0
        whole = cache.open_whole(samples.DIGEST)
        if whole is not None:
            assert whole.get(0, len(_STREAM)) in (None, _STREAM)
            whole.close()
        found = cache.details(samples.DIGEST)
        assert found is None or 0 <= found.present_bytes <= found.stream_length
        with closing(cache.open_pieces(samples.DIGEST, _STARTS)) as stream:
            assert 0 <= stream.present_bytes() <= len(_STREAM)
            for start, stop in pairwise(_STARTS):
                content = stream.get(start, stop - start)
                assert content is None or bytes(content) == _STREAM[start:stop]
            assert stream.check_all() == 0
            assert set(stream.missing(0, len(_STREAM))) <= set(range(stream.count))
    finally:
        shutil.rmtree(folder)


_HINTS = b"# list\nusr/bin/x\n/usr/lib/y\t0\t4096\nusr/z 4096 10\n"
_RECORDS = b'{"path":"usr/bin/x","manifestDigest":"sha256:0","layerIndex":1}\n{"path":"y"}\n'

# ---- seek points ------------------------------------------------------------------------------


def _layer() -> tuple[tuple[bytes, bytes], seek_points.SeekPoints]:
    """Return two spans of a gzip file, and their seek points."""
    text = bytes(range(256)) * 40
    compressor = zlib.compressobj(wbits=31)
    first = compressor.compress(text) + compressor.flush(zlib.Z_SYNC_FLUSH)
    second = compressor.compress(text) + compressor.flush()
    points = (
        seek_points.SeekPoint(True, 0, 0, 0, b""),
        seek_points.SeekPoint(False, 0, 0, 0, zstandard.compress(text)),
    )
    size_bytes = len(first) + len(second)
    return (first, second), seek_points.SeekPoints(f"sha256:{'00' * 32}", size_bytes, points)


_SPANS, _POINTS = _layer()


def _read_points(data: bytes) -> None:
    points = seek_points.decode(data)
    for number, span in enumerate(_SPANS[: len(points.points)]):
        frame = Frame(0, len(span), 0, 10_240, content_digest(span))
        with contextlib.suppress(CorruptError):
            assert len(points.decode_frame(number, frame, span)) == frame.stream_length


IMAGE_TARGETS = (
    Target("blob-index", _indexes(), _read_index, _DAMAGED),
    Target("seek-points", mutated((seek_points.encode(_POINTS),)), _read_points, _DAMAGED),
    Target("bundle", _bundles(), _read_bundle, _DAMAGED),
    Target("trace", mutated((_expanded(trace.encode(samples.trace())),)), _read_trace, _DAMAGED),
    Target("hot-set", mutated((_hotset(),)), _read_hotset, _DAMAGED),
    Target("warm-record", mutated((_warm(),)), _read_warm, _DAMAGED),
    Target("tar", _tars(), _read_tar, (CorruptError, UnsupportedError), memory_bytes=2**29),
    Target("node-cache", _cached(), _read_cached, (BootseerError,)),
    Target("hints", mutated((_HINTS, _RECORDS)), hints.parse, (InvalidInputError,)),
)
