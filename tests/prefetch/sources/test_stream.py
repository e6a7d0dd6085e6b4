"""Decompression of layers: bounded, and verified to the last byte."""

import gzip
import hashlib
import io
import os
import threading
from collections.abc import Iterator

import pytest
import zstandard

from bootseer.blob.tar.inflate import ERRORS, ExpansionLimits, decompress
from bootseer.errors import BootseerError, CorruptError, UnsupportedError
from bootseer.prefetch.sources.stream import ExpectedLayer, tar_stream
from testbed.images.building import compress, digest

CONTENT = os.urandom(3_000_000) + bytes(2_000_000) + b"end"
COMPRESSIONS = ("none", "gzip", "members", "zstd", "frames")


def read(
    stored: bytes,
    *,
    content: bytes = CONTENT,
    size_bytes: int | None = None,
    stored_digest: str | None = "",
    limits: ExpansionLimits | None = None,
) -> bytes:
    expected = ExpectedLayer(
        digest(content),
        len(stored) if size_bytes is None else size_bytes,
        digest(stored) if stored_digest == "" else stored_digest,
    )
    with tar_stream(
        io.BytesIO(stored), expected, limits or ExpansionLimits(), lambda count: None
    ) as stream:
        data = stream.read()
        stream.finish()
        return data


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    names = {"layer-source", "layer-reader", "hash"}
    assert not [t for t in threading.enumerate() if t.name in names]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_compression_gives_the_same_bytes(compression: str) -> None:
    assert read(compress(CONTENT, compression)) == CONTENT


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_empty_layer(compression: str) -> None:
    assert read(compress(b"", compression), content=b"") == b""


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_source_that_gives_little_at_a_time(compression: str) -> None:
    class Dribbling(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(3, size) if size and size > 0 else 3)

    content = CONTENT[:20_000] + bytes(30_000)
    stored = compress(content, compression)
    expected = ExpectedLayer(digest(content), len(stored), digest(stored))
    source = Dribbling(stored)
    with tar_stream(source, expected, ExpansionLimits(), lambda count: None) as stream:
        assert stream.read() == content
    assert source.closed


def test_zeros_after_gzip_are_padding() -> None:
    assert read(gzip.compress(CONTENT) + bytes(5_000_000)) == CONTENT


def test_a_layer_without_a_digest_of_its_own() -> None:
    assert read(gzip.compress(CONTENT), stored_digest=None) == CONTENT


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("position", [0.01, 0.5, 0.999])
def test_a_flipped_byte_is_refused(compression: str, position: float) -> None:
    stored = bytearray(compress(CONTENT, compression))
    whole = digest(bytes(stored))
    stored[int(len(stored) * position)] ^= 0x40
    with pytest.raises(CorruptError):
        read(bytes(stored), stored_digest=whole)
    # Also if only the uncompressed digest is known; a byte that decompresses to the same content
    # (in a header's time stamp, say) does no harm there.
    try:
        assert read(bytes(stored), stored_digest=None) == CONTENT
    except (CorruptError, UnsupportedError):
        pass


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kept", [0, 1, 1000, -1])
def test_a_cut_off_layer_is_refused(compression: str, kept: int) -> None:
    stored = compress(CONTENT, compression)
    with pytest.raises(CorruptError):
        read(stored[:kept], size_bytes=len(stored), stored_digest=digest(stored))
    with pytest.raises(CorruptError):
        read(stored[:kept], stored_digest=None)


@pytest.mark.parametrize("compression", ["gzip", "members", "zstd", "frames"])
def test_a_stream_that_ends_amid_a_frame_is_no_whole_one(compression: str) -> None:
    """The compression shows it, not the digest, which not every caller knows."""
    stored = compress(CONTENT, compression)
    assert b"".join(decompress(io.BytesIO(stored).read, "stream")) == CONTENT
    for cut in (10, 1000, len(stored) // 2, len(stored) - 1):
        with pytest.raises((*ERRORS, CorruptError)):
            for _ in decompress(io.BytesIO(stored[:cut]).read, "stream"):
                pass


def test_more_bytes_than_declared() -> None:
    stored = gzip.compress(CONTENT)
    with pytest.raises(CorruptError, match="longer than"):
        read(stored + stored, size_bytes=len(stored), stored_digest=digest(stored))


def test_garbage_after_gzip() -> None:
    with pytest.raises(CorruptError):
        read(gzip.compress(CONTENT) + b"garbage")


def test_the_digest_in_the_configuration_is_checked() -> None:
    with pytest.raises(CorruptError, match="configuration"):
        read(compress(b"other", "gzip"), content=CONTENT)


def test_a_bomb_ends_at_the_limit() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(200_000_000))
    limits = ExpansionLimits(ratio_max=100, free_bytes=1_000_000)
    with pytest.raises(CorruptError, match="bomb"):
        read(bomb, content=b"", limits=limits)
    with pytest.raises(CorruptError, match="bomb"):
        read(gzip.compress(bytes(50_000_000)), content=b"", limits=ExpansionLimits(bytes_max=10**7))


def test_a_few_kilobytes_do_not_become_a_gigabyte() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(2**30))
    assert len(bomb) < 61_000
    pieces: list[bytes] = []
    expected = ExpectedLayer(digest(b""), len(bomb), None)
    with (
        tar_stream(io.BytesIO(bomb), expected, ExpansionLimits(), lambda count: None) as stream,
        pytest.raises(CorruptError, match="bomb"),
    ):
        pieces.extend(iter(lambda: stream.read(2**20), b""))
    assert sum(map(len, pieces)) < 2**27


def test_a_window_that_would_need_gigabytes_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    stored = writer.compress(b"x" * 1000) + writer.flush()
    with pytest.raises(CorruptError, match="decompressed"):
        read(stored, content=b"x" * 1000)


@pytest.mark.parametrize("magic", [b"BZh91AY", b"\xfd7zXZ\x00"])
def test_other_compressions_are_named(magic: bytes) -> None:
    with pytest.raises(UnsupportedError, match="only gzip"):
        read(magic + bytes(100))


def test_a_reader_that_stops_early_leaves_no_thread() -> None:
    expected = ExpectedLayer(digest(CONTENT), len(CONTENT), None)
    with tar_stream(
        io.BytesIO(CONTENT * 5), expected, ExpansionLimits(), lambda count: None
    ) as stream:
        assert stream.read(10) == CONTENT[:10]


def test_errors_of_the_source_are_ours() -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    with (
        pytest.raises(BootseerError, match="Input/output"),
        tar_stream(
            Broken(), ExpectedLayer(digest(b""), 0, None), ExpansionLimits(), lambda count: None
        ) as stream,
    ):
        stream.finish()


def test_progress_counts_stored_bytes() -> None:
    stored = gzip.compress(CONTENT)
    counts: list[int] = []
    expected = ExpectedLayer(digest(CONTENT), len(stored), digest(stored))
    with tar_stream(io.BytesIO(stored), expected, ExpansionLimits(), counts.append) as stream:
        stream.finish()
    assert sum(counts) == len(stored)


def test_a_layer_named_by_sha512_is_verified() -> None:
    name = f"sha512:{hashlib.sha512(CONTENT).hexdigest()}"
    expected = ExpectedLayer(name, len(CONTENT), name)
    with tar_stream(io.BytesIO(CONTENT), expected, ExpansionLimits(), lambda count: None) as stream:
        stream.finish()
