"""A gzip layer read by seek points equals the output of gunzip."""

import gzip
import hashlib
import io
import os
import random
import struct
import tempfile
import zlib
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from bootseer.base.content_digest import content_digest
from bootseer.blob import seek_points
from bootseer.blob.seek_points import SeekPoints
from bootseer.blob.tar.inflate import ExpansionLimits
from bootseer.blob.tree import Blob
from bootseer.errors import CorruptError, UnknownFormatError, UnsupportedError
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.sources.layer_tar import pack_layer
from bootseer.prefetch.sources.seekable import write_seek_points
from bootseer.prefetch.sources.stream import ExpectedLayer
from testbed.images.building import Member, tar_of

pytestmark = pytest.mark.needs(modules=["indexed_gzip"])

_SPAN_BYTES = 2**16


def _tar() -> bytes:
    drawn = random.Random(1)
    words = [drawn.randbytes(drawn.randrange(2, 9)) for _ in range(3000)]
    members = [
        Member("text", data=b"".join(drawn.choices(words, k=100_000))),
        Member("noise", data=drawn.randbytes(300_000)),
        Member("zeros", data=bytes(300_000)),
        Member("small", data=b"x" * 77),
        Member("folder/hole", data=b"y" * 513),
    ]
    return tar_of(members)


TAR = _tar()


def _members(step: int) -> bytes:
    pieces = (TAR[at : at + step] for at in range(0, len(TAR), step))
    return b"".join(gzip.compress(piece) for piece in pieces)


def _flushed() -> bytes:
    """Return gzip data as pigz writes it: empty stored blocks between its pieces."""
    compressor = zlib.compressobj(6, wbits=31)
    made = []
    for at in range(0, len(TAR), 50_000):
        made += [compressor.compress(TAR[at : at + 50_000]), compressor.flush(zlib.Z_FULL_FLUSH)]
    return b"".join([*made, compressor.flush()])


def _fixed() -> bytes:
    compressor = zlib.compressobj(6, wbits=31, strategy=zlib.Z_FIXED)
    return compressor.compress(TAR) + compressor.flush()


GZIPS: dict[str, Callable[[], bytes]] = {
    "stored": lambda: gzip.compress(TAR, 0),
    "fast": lambda: gzip.compress(TAR, 1),
    "usual": lambda: gzip.compress(TAR, 6),
    "fixed codes": _fixed,
    "flushed": _flushed,
    "members": lambda: _members(70_001),
    "many members": lambda: _members(999),
    "padded": lambda: gzip.compress(TAR) + bytes(1000),
}


def _expected(stored: bytes, tar: bytes = TAR) -> ExpectedLayer:
    return ExpectedLayer(
        f"sha256:{hashlib.sha256(tar).hexdigest()}",
        len(stored),
        f"sha256:{hashlib.sha256(stored).hexdigest()}",
    )


def _write(stored: bytes, expected: ExpectedLayer | None = None) -> tuple[LayerTree, bytes]:
    with tempfile.TemporaryFile() as sink:
        layer = write_seek_points(
            io.BytesIO(stored),
            expected or _expected(stored),
            sink,
            ExpansionLimits(),
            lambda count: None,
            _SPAN_BYTES,
        )
        sink.seek(0)
        return layer, sink.read()


def _read(stored: bytes, blob: Blob, points: SeekPoints, number: int) -> bytes:
    frame = blob.frames[number]
    data = stored[frame.offset : frame.offset + frame.length]
    return points.decode_frame(number, frame, data)


@pytest.mark.parametrize("kind", GZIPS)
def test_each_span_alone_is_what_gunzip_gives(kind: str) -> None:
    stored = GZIPS[kind]()
    layer, data = _write(stored)
    (blob,) = layer.tree.blobs
    points = seek_points.decode(data)
    assert seek_points.encode(points) == data
    assert blob.digest == f"points:{hashlib.sha256(data).hexdigest()}"
    assert len(blob.frames) == len(points.points) > 3
    # Backwards, so that no read uses the state of the one before.
    for number in reversed(range(len(blob.frames))):
        frame = blob.frames[number]
        end = frame.stream_offset + frame.stream_length
        assert _read(stored, blob, points, number) == TAR[frame.stream_offset : end]
    assert sum(frame.length for frame in blob.frames) == blob.size_bytes == len(stored)
    assert all(frame.stream_offset % 512 == 0 for frame in blob.frames)


def test_the_tree_is_that_of_the_packed_layer() -> None:
    layer, _ = _write(gzip.compress(TAR))
    packed = pack_layer(io.BytesIO(TAR), io.BytesIO())
    assert _files(layer) == _files(packed)
    assert layer.implied == packed.implied


def _files(layer: LayerTree) -> dict[bytes, object]:
    return {path: layer.tree.inode(number) for path, number in layer.tree.walk()}


def test_a_changed_byte_is_refused_before_it_is_decompressed() -> None:
    stored = gzip.compress(TAR)
    layer, data = _write(stored)
    (blob,) = layer.tree.blobs
    points = seek_points.decode(data)
    for number, frame in enumerate(blob.frames):
        span = bytearray(stored[frame.offset : frame.offset + frame.length])
        span[len(span) // 2] ^= 1
        with pytest.raises(CorruptError, match="digest"):
            points.decode_frame(number, frame, bytes(span))
        with pytest.raises(CorruptError, match="digest"):
            points.decode_frame(number, frame, bytes(span[:-1]))


@pytest.mark.parametrize("change", ["window", "bits", "byte", "skipped", "member", "no window"])
def test_states_that_lie_never_give_more_than_the_frame_says(change: str) -> None:
    stored = gzip.compress(TAR)
    layer, data = _write(stored)
    (blob,) = layer.tree.blobs
    points = seek_points.decode(data)
    number = next(n for n, one in enumerate(points.points) if one.unused_bits)
    right = points.points[number]
    wrong = {
        "window": replace(right, window=points.points[number + 1].window),
        "bits": replace(right, unused_bits=(right.unused_bits % 7) + 1),
        "byte": replace(right, byte=right.byte ^ 0x80),
        "skipped": replace(right, skipped_bytes=(right.skipped_bytes + 1) % 512),
        "member": replace(right, is_member=True),
        "no window": replace(right, window=b""),
    }[change]
    lying = replace(points, points=[*points.points[:number], wrong, *points.points[number + 1 :]])
    try:
        content = _read(stored, blob, lying, number)
    except CorruptError:
        return
    assert len(content) == blob.frames[number].stream_length


def test_a_span_that_expands_further_than_the_frame_says_is_cut_there() -> None:
    bomb = gzip.compress(bytes(2**24))
    points = SeekPoints(f"sha256:{'00' * 32}", len(bomb), (_first_point(),))
    layer, _ = _write(gzip.compress(TAR))
    frame = replace(
        layer.tree.blobs[0].frames[0],
        length=len(bomb),
        stream_length=1000,
        digest=content_digest(bomb),
    )
    assert points.decode_frame(0, frame, bomb) == bytes(1000)
    with pytest.raises(CorruptError, match="length"):
        points.decode_frame(0, replace(frame, stream_length=2**24 + 512), bomb)


def _first_point() -> seek_points.SeekPoint:
    return seek_points.SeekPoint(True, 0, 0, 0, b"")


def test_hostile_objects_are_refused() -> None:
    _, data = _write(gzip.compress(TAR))
    for end in (*range(0, 200, 7), len(data) - 1):
        with pytest.raises((CorruptError, UnknownFormatError)):
            seek_points.decode(data[:end])
    with pytest.raises(CorruptError):
        seek_points.decode(data + b"\0")
    with pytest.raises(UnknownFormatError, match="version 2"):
        seek_points.decode(data[:8] + b"\2\0" + data[10:])
    with pytest.raises(UnknownFormatError):
        seek_points.decode(b"BOOTTREE" + data[8:])
    # A byte before the span, of which no bit belongs to the span.
    head, unused = data[: seek_points.HEAD_BYTES], data[seek_points.HEAD_BYTES + 10 :]
    with pytest.raises(CorruptError, match="byte"):
        seek_points.decode(head + struct.pack("<IHBBBB", 0, 0, 0, 7, 1, 0) + unused)
    # A count that is larger than the data costs nothing.
    with pytest.raises(CorruptError):
        seek_points.decode(data[:12] + b"\xff\xff\xff\xff" + data[16:])
    drawn = random.Random(2)
    for _ in range(300):
        changed = bytearray(data)
        changed[drawn.randrange(16, seek_points.HEAD_BYTES + 200)] = drawn.randrange(256)
        try:
            seek_points.decode(bytes(changed))
        except CorruptError:
            pass


@pytest.mark.parametrize("what", ["stored digest", "diff_id", "short", "long"])
def test_a_layer_that_is_not_what_the_image_says_is_refused(what: str) -> None:
    stored = gzip.compress(TAR)
    expected = _expected(stored)
    wrong = {
        "stored digest": replace(expected, stored_digest=f"sha256:{'00' * 32}"),
        "diff_id": replace(expected, diff_id=f"sha256:{'00' * 32}"),
        "short": replace(expected, size_bytes=len(stored) + 1),
        "long": replace(expected, size_bytes=len(stored) - 1),
    }[what]
    with pytest.raises(CorruptError):
        _write(stored, wrong)


def test_a_gzip_file_that_is_cut_or_damaged_is_refused() -> None:
    stored = gzip.compress(TAR)
    for broken in (stored[: len(stored) // 2], _damaged(stored)):
        with pytest.raises(CorruptError):
            _write(broken, _expected(broken))


def _damaged(stored: bytes) -> bytes:
    middle = len(stored) // 2
    return stored[:middle] + os.urandom(100) + stored[middle + 100 :]


def test_other_compressions_are_left_to_the_copy() -> None:
    with pytest.raises(UnsupportedError):
        _write(TAR)


def test_a_bomb_is_refused() -> None:
    bomb = gzip.compress(bytes(2**20))
    with tempfile.TemporaryFile() as sink, pytest.raises(CorruptError, match="bomb"):
        write_seek_points(
            io.BytesIO(bomb),
            _expected(bomb, bytes(2**20)),
            sink,
            ExpansionLimits(ratio_max=10, free_bytes=2**16),
            lambda count: None,
        )
