"""Plans of pages and names to preload, compared with the files' own bytes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.prefetch.bundle.preload import PreloadPlan, PreloadWindow, plan_preload
from bootseer.prefetch.index.stream_contents import PAGE_BYTES
from testbed.images.building import Member
from tests.prefetch.bundle.test_translation import Image, bundle_of, image_of, whole_files


def _files(**sizes: int) -> list[Member]:
    random.seed(1)
    folders = sorted({path.rpartition("/")[0] for path in sizes if "/" in path})
    members = [Member(folder, kind="d") for folder in folders]
    return members + [Member(path, data=random.randbytes(size)) for path, size in sizes.items()]


def _pages_of(image: Image, plan: PreloadPlan) -> dict[bytes, set[int]]:
    """Return the numbers of all pages by path; assert that each has the right place."""
    found: dict[bytes, set[int]] = {}
    for number, pages in enumerate(plan.pieces):
        path = image.tree.path(pages.inode)
        content = image.content(path)
        end = pages.file_offset + pages.length
        assert pages.file_offset % PAGE_BYTES == 0
        assert end % PAGE_BYTES == 0 or end == len(content)
        assert plan.number_at(pages.inode, end - 1) == number
        stream = image.streams[pages.blob]
        start = pages.blob_offset
        assert stream[start : start + pages.length] == content[pages.file_offset : end]
        numbers = set(range(pages.file_offset // PAGE_BYTES, -(-end // PAGE_BYTES)))
        found.setdefault(path, set()).update(numbers)
    return found


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=5),
    st.integers(1, 40).map(lambda sectors: 512 * sectors),
)
def test_whole_files_are_all_their_pages_however_frames_are_cut(
    sizes: list[int], frame_bytes: int
) -> None:
    image = image_of(_files(**{f"d/{i}": size for i, size in enumerate(sizes)}))
    paths = [b"d/%d" % i for i in range(len(sizes))]
    bundle, _ = bundle_of(image, whole_files(image, paths), frame_bytes)
    found = _pages_of(image, plan_preload(image.tree, bundle.frames))
    for path, size in zip(paths, sizes, strict=True):
        assert found[path] == set(range(-(-size // PAGE_BYTES)))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 150_000), st.integers(1, 30_000)), max_size=6))
def test_no_page_is_there_of_which_a_byte_is_missing(ranges: list[tuple[int, int]]) -> None:
    image = image_of(_files(**{f"d/{i}": size for i, size in enumerate((70_000, 4096, 60_000))}))
    end = len(image.streams[0])
    wanted = [(0, start, min(length, end - start)) for start, length in ranges if start < end]
    bundle, _ = bundle_of(image, wanted)
    held = {
        sector
        for frame in bundle.frames
        for extent in frame.extents
        for sector in range(extent.offset // 512, -(-(extent.offset + extent.length) // 512))
    }
    plan = plan_preload(image.tree, bundle.frames)
    _pages_of(image, plan)
    for pages in plan.pieces:
        first, stop = pages.blob_offset, pages.blob_offset + pages.length
        assert held.issuperset(range(first // 512, -(-stop // 512)))


def test_pieces_are_in_the_order_of_use_and_names_lead_to_them() -> None:
    image = image_of(_files(**{"a/b/one": 5000, "a/b/two": 100, "c/three": 9000, "c/cold": 10}))
    bundle, _ = bundle_of(image, whole_files(image, [b"c/three", b"a/b/two", b"a/b/one"]))
    plan = plan_preload(image.tree, bundle.frames)
    paths = [image.tree.path(pages.inode) for pages in plan.pieces]
    assert paths == [b"c/three", b"a/b/two", b"a/b/one"]
    cold = image.tree.resolve(b"c/cold")
    assert cold is not None
    assert plan.number_at(cold, 0) == -1
    assert plan.names == (b"/", b"c/", b"a/", b"a/b/")


def test_of_a_huge_directory_only_what_is_wanted_is_looked_up() -> None:
    many = {f"d/{i:04d}": 1 for i in range(1100)}
    image = image_of(_files(**many))
    bundle, _ = bundle_of(image, whole_files(image, [b"d/0007", b"d/0003"]))
    names = plan_preload(image.tree, bundle.frames).names
    assert names[0] == b"/"
    assert sorted(names[1:]) == [b"d/0003", b"d/0007"]


def test_a_window_grows_while_pieces_are_read_in_order() -> None:
    window = PreloadWindow(1000)
    asked = []
    for number in range(1000):
        if not window.is_stored(number):
            asked.append(number)
            assert window.due_after_read(number)[0] == number
    assert len(asked) < 50
    assert all(window.is_stored(number) for number in range(1000))
    assert window.due_after_read(7) == []


@settings(max_examples=60)
@given(st.lists(st.integers(0, 199), max_size=60))
def test_what_nobody_needs_is_less_than_what_is_read(order: list[int]) -> None:
    window = PreloadWindow(200)
    handed: set[int] = set()
    for number in order:
        found = window.due_after_read(number)
        assert handed.isdisjoint(found)
        handed.update(found)
        assert number in handed
    assert len(handed - set(order)) <= 2 * len(set(order))
