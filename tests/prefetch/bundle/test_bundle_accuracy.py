"""Accuracy of bundles: hits, waste and misses, and the decision to record a start."""

from pathlib import Path

from bootseer.blob.tree import Extent
from bootseer.prefetch.bundle.accuracy import BundleAccuracy, accuracy_of, is_worthwhile
from bootseer.prefetch.bundle.format import decode_header
from bootseer.prefetch.bundle.hot_store import MERGED_TRACE_COUNT
from testbed.bounded import run_bounded
from tests.support.images.stored_image import INDEX, stored_image


def test_hits_waste_and_misses_are_counted(tmp_path: Path) -> None:
    image = stored_image(tmp_path)
    _, header = image.publish_bundle([image.place("big", 0, 8192), image.place("small", 0, 700)])
    lengths = [blob.stream_length for blob in image.tree.blobs]
    bundle = decode_header(header, INDEX, lengths)
    number = image.tree.resolve(b"big")
    assert number is not None
    aim = accuracy_of(
        bundle, lengths, [(number, 4096, 8192, 0)], lambda n: image.tree.inode(n).extents
    )
    assert (aim.bundle_bytes, aim.asked_bytes, aim.used_bytes) == (8192 + 1024, 8192, 4096)
    assert aim.recall == 0.5
    assert accuracy_of(None, lengths, [], lambda n: ()).precision is None


def test_many_ranges_of_a_file_in_many_pieces() -> None:
    count = 50_000
    extents = [Extent(8192 * n, 0, 4096 * n, 4096) for n in range(count)]
    entries = [(1, 8192 * n, 4096, 0) for n in range(0, count, 2)]

    def looked_up() -> None:
        aim = accuracy_of(None, [4096 * count], entries, lambda inode: extents)
        assert aim.asked_bytes == 4096 * len(entries)

    assert run_bounded(looked_up, cpu_s=20)


def test_when_a_start_is_worth_a_record() -> None:
    good, missed, wasteful = (
        BundleAccuracy(100, 100, 96),
        BundleAccuracy(100, 110, 96),
        BundleAccuracy(300, 100, 100),
    )
    assert not is_worthwhile(good, 1, "ready")
    assert is_worthwhile(missed, MERGED_TRACE_COUNT, "unmount")
    assert is_worthwhile(wasteful, 1, "window")
    # The start may have failed half-way, and further traces would change nothing.
    assert not is_worthwhile(wasteful, 1, "unmount")
    assert not is_worthwhile(wasteful, MERGED_TRACE_COUNT, "ready")
    assert is_worthwhile(BundleAccuracy(0, 100, 0), 1, "ready")
