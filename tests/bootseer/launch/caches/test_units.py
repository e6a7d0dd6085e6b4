"""Files of a cache that belong together, that are new, and that are removed first."""

from hypothesis import given
from hypothesis import strategies as st

from bootseer.launch.caches.units import CacheFile, by_unit, new_units, of_start, unit_of, within

# As TorchInductor, Triton and CUDA name their entries.
KEY = b"ffq2hripqxymgtpqw33odbuwyr6etdngav2dwca6s2jsgo5ankue"
ENTRY = b"jqcfitmfsl6c3rh3qbw3jhyoftjmyiprb32etjt46l7k7um5mf5"
LIBRARY = b"3b/c3bwq5ttjvjxxpz7lfg36ryjh5jgoue4c67ayx65tq2k3sgg3yxa.so"


def test_a_directory_named_by_a_digest_is_one_unit() -> None:
    assert unit_of(b"fxgraph/fq/" + KEY + b"/" + ENTRY) == b"fxgraph/fq/" + KEY + b"/"
    assert unit_of(b"triton/0/" + KEY.upper() + b"/a/kernel.cubin").endswith(KEY.upper() + b"/")


def test_a_file_named_by_a_digest_is_one_unit() -> None:
    assert unit_of(LIBRARY) == LIBRARY


def test_other_files_go_with_their_neighbours() -> None:
    # Numba's index names the files beside it: those of another node are other functions.
    folder = b"job_" + b"0a" * 20
    assert unit_of(folder + b"/f.nbi") == unit_of(folder + b"/f.1.nbc") == folder + b"/"
    assert unit_of(b"index") == b"/"


def test_an_entry_that_another_node_made_as_well_is_not_new() -> None:
    here = {b"fxgraph/fq/" + KEY + b"/" + ENTRY: CacheFile(10), LIBRARY: CacheFile(5)}
    there = {b"fxgraph/fq/" + KEY + b"/other": 11, LIBRARY: 6}
    assert new_units(here, there, with_changed=True) == {}


def test_a_changed_index_makes_its_directory_new() -> None:
    here, there = (
        {b"d/f.nbi": CacheFile(10), b"d/f.1.nbc": CacheFile(5)},
        {b"d/f.nbi": 9, b"d/f.1.nbc": 5},
    )
    assert set(new_units(here, there, with_changed=True)) == {b"d/"}
    assert new_units(here, there, with_changed=False) == {}


def test_in_a_folder_of_the_user_only_this_start_and_the_generation_count() -> None:
    here = {
        b"a/old": CacheFile(1, put_ns=5),
        b"b/new": CacheFile(1, put_ns=20),
        b"c/known": CacheFile(1, put_ns=5),
        b"d/half": CacheFile(1, put_ns=20),
        b"d/older": CacheFile(1, put_ns=5),
    }
    assert of_start(here, {b"c/known": 1}, 10) == {b"b/new", b"c/known"}
    assert of_start(here, {b"c/known": 2}, 10) == {b"b/new"}


def test_what_was_used_last_stays() -> None:
    files = {
        b"a/x": CacheFile(6, 1),
        b"b/x": CacheFile(5, 3),
        b"b/y": CacheFile(1, 1),
        b"c/x": CacheFile(4, 2),
    }
    assert within(files, 10) == {b"b/x", b"b/y", b"c/x"}
    assert within(files, 16) == set(files)
    assert within(files, 0) == set()


_PATHS = st.lists(st.sampled_from([b"a", b"b", b"c", KEY]), min_size=1, max_size=4).map(b"/".join)
_FILES = st.dictionaries(_PATHS, st.builds(CacheFile, st.integers(0, 9), st.integers(0, 9)))


@given(_FILES, st.integers(0, 60))
def test_no_unit_is_divided_and_no_limit_exceeded(
    files: dict[bytes, CacheFile], limit: int
) -> None:
    kept = within(files, limit)
    assert sum(files[path].size_bytes for path in kept) <= limit
    for paths in by_unit(files).values():
        assert kept.issuperset(paths) or kept.isdisjoint(paths)


@given(_FILES)
def test_a_generation_of_all_that_is_here_leaves_nothing_new(files: dict[bytes, CacheFile]) -> None:
    there = {path: file.size_bytes for path, file in files.items()}
    assert new_units(files, there, with_changed=True) == {}
    assert new_units(files, {}, with_changed=True) == by_unit(files)
