"""Differences of scans against a model: a difference applied to the old tree gives the new one."""

import stat

from hypothesis import given
from hypothesis import strategies as st

from bootseer.snapshots.scan import Diff, Entry, Scan, diff

_ENTRIES = st.builds(
    Entry,
    mode=st.sampled_from([stat.S_IFREG | 0o644, stat.S_IFREG | 0o755, stat.S_IFLNK | 0o777]),
    uid=st.integers(0, 1),
    gid=st.just(0),
    size_bytes=st.integers(0, 2),
    mtime_ns=st.integers(0, 2),
    ctime_ns=st.integers(0, 2),
    inode=st.integers(1, 3),
    device=st.just(1),
    link_count=st.integers(1, 2),
)
_PATHS = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=4).map(b"/".join)


@st.composite
def _scans(draw: st.DrawFn) -> Scan:
    """Draw a possible tree: entries with entries below them are directories."""
    found: dict[bytes, Entry] = {}
    for path in draw(st.lists(_PATHS, max_size=8)):
        parts = path.split(b"/")
        for depth in range(len(parts)):
            above = b"/".join(parts[:depth])
            entry = draw(_ENTRIES)
            found[above] = entry._replace(mode=stat.S_IFDIR | 0o755)
        found.setdefault(path, draw(_ENTRIES))
    return found


@given(_scans(), _scans())
def test_the_difference_leads_from_one_to_the_other(before: Scan, after: Scan) -> None:
    difference = diff(before, after)
    result = dict(before)
    for path in difference.deleted:
        del result[path]
    for path in (*difference.created, *difference.changed, *difference.attributes_changed):
        result[path] = after[path]
    assert result.keys() == after.keys()
    for path, entry in result.items():
        wanted = after[path]
        if stat.S_ISDIR(wanted.mode):
            # Sizes, inodes and link counts of directories follow from their entries.
            assert entry[:3] == wanted[:3]
            assert entry.mtime_ns == wanted.mtime_ns
        else:
            assert entry == wanted


@given(_scans(), _scans())
def test_each_path_is_in_one_list_and_its_parents_are_packed(before: Scan, after: Scan) -> None:
    difference = diff(before, after)
    lists = [
        difference.created,
        difference.changed,
        difference.attributes_changed,
        difference.deleted,
    ]
    paths = [path for one in lists for path in one]
    assert len(paths) == len(set(paths))
    packed = set(difference.packed_paths())
    for path in packed:
        assert path in after
        parent = path.rpartition(b"/")[0]
        assert not parent or parent in packed


@given(_scans())
def test_nothing_happened(scanned: Scan) -> None:
    assert diff(scanned, dict(scanned)) == Diff((), (), (), ())


def test_a_rewrite_that_restores_size_and_times_is_seen() -> None:
    """Only ctime shows it: reproducible builds set the times of all files they write."""
    then = Entry(stat.S_IFREG | 0o644, 0, 0, 5, 100, 100, 1, 1, 1)
    assert diff({b"x": then}, {b"x": then._replace(ctime_ns=200)}).attributes_changed == (b"x",)


def test_a_file_of_another_device_is_another_file() -> None:
    """Inode numbers of two devices may be equal."""
    mode = stat.S_IFREG | 0o644
    before = Entry(mode, 0, 0, 1, 1, 1, inode=7, device=1, link_count=1)
    after = before._replace(device=2)
    assert diff({b"a": before}, {b"a": after}).changed == (b"a",)
