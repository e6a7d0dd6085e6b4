"""Bundles of one image used for another: translation compared with the bytes themselves."""

import hashlib
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Inode, Tree
from bootseer.prefetch.bundle import similar
from bootseer.prefetch.bundle.format import (
    SECTOR_BYTES,
    Bundle,
    decode_frame,
    decode_header,
    plan_frames,
    sectors_of,
    write_bundle,
)
from bootseer.prefetch.bundle.similar import shared_streams, translate
from bootseer.prefetch.index.merge import merge_layers
from bootseer.prefetch.sources.layer_tar import pack_layer
from testbed.images.building import Member, digest, tar_of

OLD, NEW = "sha256:" + "1" * 64, "sha256:" + "2" * 64


@dataclass
class Image:
    """Tree and the streams that hold its files."""

    tree: Tree
    streams: list[bytes]

    def content(self, path: bytes) -> bytes:
        number = self.tree.resolve(path)
        assert number is not None
        inode = self.tree.inode(number)
        data = bytearray(inode.size_bytes)
        for e in inode.extents:
            stop = e.blob_offset + e.length
            data[e.file_offset : e.file_offset + e.length] = self.streams[e.blob][
                e.blob_offset : stop
            ]
        return bytes(data)


def image_of(*layers: Sequence[Member]) -> Image:
    """Return an image as it is indexed: each layer's stream is its tar."""
    tars = [tar_of(layer) for layer in layers]
    tree = merge_layers(
        [pack_layer(io.BytesIO(tar), io.BytesIO(), diff_id=digest(tar)) for tar in tars]
    )
    by_digest = {digest(tar): tar for tar in tars}
    return Image(tree, [by_digest[blob.stream_digest] for blob in tree.blobs])


def bundle_of(
    image: Image, ranges: Sequence[tuple[int, int, int]], frame_bytes: int = 2**19
) -> tuple[Bundle, bytes]:
    """Return a bundle of these ranges of streams, and its only part."""
    lengths = [len(stream) for stream in image.streams]
    part = io.BytesIO()

    def read(blob: int, offset: int, length: int) -> bytes:
        return image.streams[blob][offset : offset + length]

    header = write_bundle(OLD, plan_frames(ranges, lengths, frame_bytes), read, [part])
    return decode_header(header, OLD, lengths), part.getvalue()


def whole_files(image: Image, paths: Sequence[bytes]) -> list[tuple[int, int, int]]:
    """Return the places of files in the image's streams."""
    numbers = [image.tree.resolve(path) for path in paths]
    return [
        (blob, offset, length)
        for number in numbers
        if number is not None
        for _, blob, offset, length in image.tree.extents(number)
    ]


def check(bundle: Bundle, part: bytes, image: Image) -> set[tuple[int, int]]:
    """Check the bytes of a translated bundle against the image. Return its sectors."""
    found: set[tuple[int, int]] = set()
    for frame in bundle.frames:
        content = decode_frame(frame, part[frame.offset : frame.offset + frame.length])
        assert len(frame.extents) == len(frame.positions) > 0
        for extent, position in zip(frame.extents, frame.positions, strict=True):
            stream = image.streams[extent.blob]
            end = extent.offset + extent.length
            assert extent.length > 0
            assert extent.offset % SECTOR_BYTES == 0
            assert end % SECTOR_BYTES == 0 or end == len(stream)
            assert content[position : position + extent.length] == stream[extent.offset : end]
            brought = {(extent.blob, s) for s in range(*sectors_of(extent.offset, extent.length))}
            assert not brought & found, "a sector comes twice"
            found |= brought
    return found


def sectors_of_files(image: Image, paths: Sequence[bytes]) -> set[tuple[int, int]]:
    return {
        (blob, sector)
        for blob, offset, length in whole_files(image, paths)
        for sector in range(*sectors_of(offset, length))
    }


def files(seed: int, count: int, folder: str) -> list[Member]:
    """Return files of 1 to 20000 random bytes."""
    chance = random.Random(seed)
    return [
        Member(f"{folder}/file-{number}", data=chance.randbytes(chance.randint(1, 20_000)))
        for number in range(count)
    ]


BASE, PACKAGES, CODE = files(1, 30, "usr"), files(2, 60, "site"), files(3, 20, "app")
HOT = [m.name.encode() for m in (*BASE[5:15], *CODE[:10], *PACKAGES[10:40], *CODE[12:])]


def touched(member: Member) -> Member:
    """Return the same file, built later."""
    return Member(member.name, data=member.data, mtime=member.mtime + 77)


CHANGED = [Member(CODE[0].name, data=b"new code"), *map(touched, CODE[1:])]
REBUILT = {
    "top layer": (BASE, PACKAGES, CHANGED),
    "middle layer": (BASE, [touched(m) for m in reversed(PACKAGES)], CODE),
    "base in another order": (random.Random(4).sample(BASE, len(BASE)), PACKAGES, CODE),
    "everything in one layer": ([*map(touched, BASE), *PACKAGES, *CODE],),
    "a layer between": (BASE, [Member("new", data=b"x" * 3000)], PACKAGES, CODE),
    "moved": (BASE, [Member("opt/" + m.name, data=m.data) for m in PACKAGES], CODE),
}


@pytest.mark.parametrize("change", REBUILT)
def test_a_rebuilt_image_is_served_by_the_old_bundle(change: str) -> None:
    old, new = image_of(BASE, PACKAGES, CODE), image_of(*REBUILT[change])
    bundle, part = bundle_of(old, whole_files(old, HOT), 64 * 1024)
    translated = translate(bundle, old.tree, new.tree, NEW)
    assert translated.index_digest == NEW
    moved = change == "moved"
    paths = [
        (b"opt/" if moved and path.startswith(b"site") else b"") + path
        for path in HOT
        if change != "top layer" or path != CODE[0].name.encode()
    ]
    assert check(translated, part, new) == sectors_of_files(new, paths)


def test_the_same_image_is_served_by_all_of_it() -> None:
    image = image_of(BASE, PACKAGES, CODE)
    bundle, _ = bundle_of(image, whole_files(image, HOT))
    assert translate(bundle, image.tree, image.tree, OLD) == bundle


def test_another_image_gets_nothing() -> None:
    old, new = image_of(BASE), image_of(files(9, 30, "usr"))
    bundle, _ = bundle_of(old, whole_files(old, [m.name.encode() for m in BASE]))
    assert translate(bundle, old.tree, new.tree, NEW).frames == ()


def test_frames_that_bring_too_little_are_left_out() -> None:
    large = [Member(f"f{n}", data=random.Random(n).randbytes(10_240)) for n in range(20)]
    old = image_of(large)
    bundle, part = bundle_of(old, whole_files(old, [m.name.encode() for m in large]), 102_400)
    assert [frame.stream_length for frame in bundle.frames] == [102_400] * 2
    # One of ten files of the first frame, two of ten of the second.
    new = image_of([large[3], large[12], large[17]])
    translated = translate(bundle, old.tree, new.tree, NEW)
    assert [frame.offset for frame in translated.frames] == [bundle.frames[1].offset]
    assert check(translated, part, new) == sectors_of_files(new, [b"f12", b"f17"])


def test_content_that_is_there_twice_comes_once() -> None:
    data = b"same content" * 400
    old = image_of([Member("a", data=data), Member("b", data=data)])
    new = image_of([Member("c", data=data), Member("d", data=data)])
    bundle, part = bundle_of(old, whole_files(old, [b"a", b"b"]))
    assert check(translate(bundle, old.tree, new.tree, NEW), part, new) == sectors_of_files(
        new, [b"c"]
    )


def test_of_a_huge_bundle_only_the_beginning_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similar, "EXTENT_COUNT_MAX", 10)
    image = image_of(BASE)
    bundle, _ = bundle_of(image, whole_files(image, [m.name.encode() for m in BASE]), 2048)
    translated = translate(bundle, image.tree, image.tree, NEW)
    assert 0 < len(translated.frames) < len(bundle.frames)
    assert translated.frames == bundle.frames[: len(translated.frames)]


# ---- any layout at all -----------------------------------------------------------------------


@st.composite
def odd_images(draw: st.DrawFn, contents: Sequence[bytes]) -> Image:
    """Draw an image whose files lie as in no tar: with holes, off sectors, adjacent, in many
    streams."""
    chosen = draw(st.lists(st.integers(0, len(contents) - 1), min_size=1, max_size=6))
    streams = [bytearray() for _ in range(draw(st.integers(1, 2)))]
    inodes = [Inode(0o40755)]
    names: list[tuple[bytes, int]] = []
    for position, number in enumerate(chosen):
        blob = draw(st.integers(0, len(streams) - 1))
        stream = streams[blob]
        data = contents[number]
        extents = []
        start = 0
        for end in sorted({*draw(st.lists(st.integers(1, len(data)), max_size=2)), len(data)}):
            if any(data[start:end]):
                if draw(st.booleans()):
                    # Bytes of no file, such as a tar's headers: the file before is padded.
                    stream += bytes(-len(stream) % SECTOR_BYTES)
                    stream += b"h" * draw(st.sampled_from([0, 512, 1, 700]))
                if draw(st.integers(0, 3)):
                    stream += bytes(-len(stream) % SECTOR_BYTES)
                extents.append(Extent(start, blob, len(stream), end - start))
                stream += data[start:end]
            start = end
        inodes.append(
            Inode(
                0o100644,
                size_bytes=len(data),
                extents=tuple(extents),
                digest=hashlib.sha256(data).digest(),
            )
        )
        names.append((b"%d" % (number if draw(st.booleans()) else 100 + position), len(inodes) - 1))
    kept = dict(names)
    if len(kept) < len(names):
        names = [(b"x%d" % number, number) for _, number in names]
    for stream in streams:
        # A tar ends with zeros; a truncated one ends with its last file.
        if draw(st.booleans()):
            stream += bytes(-len(stream) % SECTOR_BYTES + 1024)
    blobs = [
        Blob(digest(b"%d" % n + bytes(s)), 0, (), digest(bytes(s)), len(s))
        for n, s in enumerate(streams)
    ]
    return Image(build_tree(names, inodes, blobs), [bytes(s) for s in streams])


@st.composite
def image_pairs(draw: st.DrawFn) -> tuple[Image, Image, list[tuple[int, int, int]]]:
    chance = random.Random(draw(st.integers(0, 2**32)))
    contents = [
        chance.randbytes(draw(st.sampled_from([1, 511, 512, 513, 1536, 3000]))) for _ in range(4)
    ]
    contents.append(contents[0] + bytes(2000) + contents[1])
    old, new = draw(odd_images(contents)), draw(odd_images(contents))
    ranges = []
    for _ in range(draw(st.integers(1, 6))):
        blob = draw(st.integers(0, len(old.streams) - 1))
        if length := len(old.streams[blob]):
            offset = draw(st.integers(0, length - 1))
            ranges.append((blob, offset, draw(st.integers(1, length - offset))))
    return old, new, ranges


@settings(max_examples=120)
@given(image_pairs(), st.sampled_from([512, 2048, 2**19]))
def test_what_is_translated_is_right_however_files_lie(
    pair: tuple[Image, Image, list[tuple[int, int, int]]], frame_bytes: int
) -> None:
    old, new, ranges = pair
    bundle, part = bundle_of(old, ranges, frame_bytes)
    check(translate(bundle, old.tree, new.tree, NEW), part, new)


def test_zeros_behind_a_file_end_with_its_sector() -> None:
    """Regression: bytes behind a file that ended with a sector were taken for its padding."""
    data = random.Random(1).randbytes(SECTOR_BYTES - 1)

    def image(stream: bytes, start: int) -> Image:
        extent = Extent(0, 0, start, len(data))
        inode = Inode(
            0o100644,
            size_bytes=len(data),
            extents=(extent,),
            digest=hashlib.sha256(data).digest(),
        )
        blob = Blob(digest(b"blob" + stream), 0, (), digest(stream), len(stream))
        return Image(build_tree([(b"f", 1)], [Inode(0o40755), inode], [blob]), [stream])

    old = image(b"h" + data + b"h" * SECTOR_BYTES, 1)
    new = image(data + bytes(1 + SECTOR_BYTES), 0)
    bundle, part = bundle_of(old, [(0, 0, SECTOR_BYTES + 1)])
    check(translate(bundle, old.tree, new.tree, NEW), part, new)


def test_streams_are_shared_by_what_they_hold() -> None:
    old, new = image_of(BASE, PACKAGES, CODE), image_of(CODE, BASE)
    shared = shared_streams(old.tree.blobs, new.tree.blobs)
    assert {old.streams[a] for a in shared} == {tar_of(BASE), tar_of(CODE)}
    assert all(old.streams[a] == new.streams[b] for a, b in shared.items())
