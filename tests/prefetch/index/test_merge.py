"""Merging of layers as the specification says: against a simple model, and in chosen cases."""

import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blob import index
from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Frame, Inode, Tree
from bootseer.errors import CorruptError
from bootseer.prefetch.index.merge import LayerTree, merge_layers
from tests.support.images.forged_index import forge, sections_of

DIRECTORY = stat.S_IFDIR | 0o755
FRAMES = (Frame(0, 10, 0, 100, bytes(32)),)
FILE = stat.S_IFREG | 0o644


@dataclass
class Entry:
    """Inode in the model; `uid` is the number of the entry that made it."""

    uid: int
    is_dir: bool
    implied: bool = False


@dataclass
class ModelLayer:
    """Content of a layer's tar: entries by path, whiteouts included, and links to lower layers."""

    entries: dict[str, Entry] = field(default_factory=dict)
    links: list[tuple[str, str]] = field(default_factory=list)

    def packed(self) -> LayerTree:
        numbers: dict[int, int] = {}
        inodes: list[Inode] = []
        names = []
        for path in sorted(self.entries):
            entry = self.entries[path]
            if entry.uid not in numbers:
                numbers[entry.uid] = len(inodes)
                inodes.append(Inode(DIRECTORY if entry.is_dir else FILE, uid=entry.uid))
            names.append((path.encode(), numbers[entry.uid]))
        return LayerTree(
            build_tree(names, inodes, []),
            frozenset(p.encode() for p, entry in self.entries.items() if entry.implied),
            tuple((a.encode(), b.encode()) for a, b in self.links),
        )


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def under(path: str, directory: str) -> bool:
    return path != directory and (not directory or path.startswith(directory + "/"))


def model_merge(layers: Sequence[ModelLayer]) -> dict[str, Entry]:
    """Merge layers into one flat dictionary, with every rule spelled out."""
    state: dict[str, Entry] = {"": Entry(0, True)}
    for layer in layers:
        below = dict(state)
        for path in layer.entries:
            name = path.rpartition("/")[2]
            if name == ".wh..wh..opq":
                for old in [p for p in state if under(p, parent(path))]:
                    del state[old]
            elif name.startswith(".wh.") and not name.startswith(".wh..wh."):
                hidden = (parent(path) + "/" + name.removeprefix(".wh.")).lstrip("/")
                for old in [p for p in state if p == hidden or under(p, hidden)]:
                    del state[old]
        for path, entry in sorted(layer.entries.items()):
            if path.rpartition("/")[2].startswith(".wh."):
                continue
            if not (path in state and state[path].is_dir and entry.is_dir):
                for old in [p for p in state if under(p, path)]:
                    del state[old]
                state[path] = entry
            elif not entry.implied:
                state[path] = entry
        for path, target in layer.links:
            state[path] = below[target]
    return state


def check(layers: Sequence[ModelLayer]) -> None:
    tree = merge_layers([layer.packed() for layer in layers])
    expected = model_merge(layers)
    found = {path.decode(): tree.inode(number).uid for path, number in tree.walk()}
    # The root's attributes are not unpacked.
    assert found == {path: entry.uid if path else 0 for path, entry in expected.items()}
    for path, number in tree.walk():
        entry = expected[path.decode()]
        assert stat.S_ISDIR(tree.mode(number)) == entry.is_dir
        if not entry.is_dir:
            same = sum(other.uid == entry.uid for other in expected.values())
            assert tree.link_count(number) == same


NAMES = st.sampled_from(["a", "b", "c"])
WHITEOUTS = st.sampled_from([".wh.a", ".wh.b", ".wh..wh..opq", ".wh..wh.plnk"])


@st.composite
def stacks(draw: st.DrawFn) -> list[ModelLayer]:
    """Draw layers over few names, so that they collide."""
    uid = 1
    flags: st.SearchStrategy[bool] = st.booleans()
    layers: list[ModelLayer] = []
    for _ in range(draw(st.integers(1, 4))):
        layer = ModelLayer({"": Entry(uid, True, implied=draw(flags))})
        uid += 1
        for _ in range(draw(st.integers(0, 8))):
            directories = draw(st.lists(NAMES, min_size=0, max_size=2))
            parts = [*directories, draw(st.one_of(NAMES, WHITEOUTS))]
            path = "/".join(parts)
            kind = "f" if parts[-1].startswith(".wh.") else draw(st.sampled_from("fdh"))
            above = ["/".join(parts[:n]) for n in range(1, len(parts))]
            if path in layer.entries or any(
                not layer.entries[p].is_dir for p in above if p in layer.entries
            ):
                continue
            for p in above:
                if p not in layer.entries:
                    layer.entries[p] = Entry(uid, True, implied=draw(flags))
                    uid += 1
            files = [e for p, e in layer.entries.items() if not e.is_dir and ".wh." not in p]
            if kind == "h" and files:
                layer.entries[path] = draw(st.sampled_from(files))
                continue
            layer.entries[path] = Entry(uid, kind == "d")
            uid += 1
        below = model_merge(layers)
        targets = [p for p, entry in below.items() if not entry.is_dir]
        if draw(flags) and targets:
            layer.links.append((draw(NAMES) + "-link", draw(st.sampled_from(targets))))
        layers.append(layer)
    return layers


@settings(max_examples=150)
@given(stacks())
def test_against_the_model(layers: list[ModelLayer]) -> None:
    check(layers)


def packed(*entries: tuple[str, Inode], implied: Sequence[str] = ()) -> LayerTree:
    inodes = [Inode(DIRECTORY), *(inode for _, inode in entries)]
    names = [(path.encode(), number + 1) for number, (path, _) in enumerate(entries)]
    return LayerTree(build_tree(names, inodes, []), frozenset(path.encode() for path in implied))


def paths(tree: Tree) -> list[str]:
    return [path.decode() for path, _ in tree.walk()]


def test_no_layers_are_an_empty_root() -> None:
    assert paths(merge_layers([])) == [""]


def test_of_the_root_only_the_time_counts() -> None:
    lower = LayerTree(build_tree([], [Inode(stat.S_IFDIR | 0o700, uid=5, mtime_ns=7)], []))
    upper = packed(implied=("",))
    # Its owner and mode are those that containerd gives to every image's root.
    assert merge_layers([lower, upper]).inode(0) == Inode(stat.S_IFDIR | 0o755, mtime_ns=7)


def test_what_containerd_does_not_unpack_is_left_out() -> None:
    xattrs = ((b"trusted.overlay.opaque", b"y"), (b"user.kept", b"1"))
    layer = packed(("a", Inode(FILE, mtime_ns=-1, xattrs=xattrs)))
    inode = merge_layers([layer]).inode(1)
    assert inode.mtime_ns == 0
    assert inode.xattrs == ((b"user.kept", b"1"),)


def test_a_directory_over_a_symbolic_link_replaces_it() -> None:
    link = Inode(stat.S_IFLNK | 0o777, size_bytes=7, link_target=b"usr/lib")
    lower = packed(("lib", link), ("usr", Inode(DIRECTORY)), ("usr/lib", Inode(DIRECTORY)))
    upper = packed(("lib", Inode(DIRECTORY)), ("lib/x", Inode(FILE)), implied=("lib",))
    tree = merge_layers([lower, upper])
    assert paths(tree) == ["", "lib", "lib/x", "usr", "usr/lib"]


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh..."])
def test_whiteouts_that_name_no_file_are_refused(name: str) -> None:
    with pytest.raises(CorruptError, match="whiteout"):
        merge_layers([packed(), packed((name, Inode(FILE)))])


@pytest.mark.parametrize("target", ["absent", "directory", "directory/absent"])
def test_a_hard_link_to_nothing_is_refused(target: str) -> None:
    lower = packed(("directory", Inode(DIRECTORY)))
    upper = LayerTree(packed().tree, links=((b"new", target.encode()),))
    with pytest.raises(CorruptError, match=r"layer 2 of 2 .*hard link 'new' points to '"):
        merge_layers([lower, upper])


def test_a_plain_root_file_system_has_no_whiteouts() -> None:
    tree = packed((".wh.x", Inode(FILE)), ("x", Inode(FILE))).tree
    assert paths(merge_layers([LayerTree(tree, is_changeset=False)])) == ["", ".wh.x", "x"]


def test_only_blobs_that_are_needed_are_kept() -> None:
    def layer(name: str, digit: str) -> LayerTree:
        inode = Inode(FILE, size_bytes=5, extents=(Extent(0, 0, 20, 5),))
        tree = build_tree(
            [(name.encode(), 1)],
            [Inode(DIRECTORY), inode],
            [Blob("sha256:" + digit * 64, 10, FRAMES, "sha256:" + digit * 64, 100)],
        )
        return LayerTree(tree)

    tree = merge_layers([layer("x", "1"), layer("y", "2"), layer("x", "3"), layer("z", "2")])
    assert [blob.digest[7] for blob in tree.blobs] == ["2", "3"]
    found = {p: tree.inode(n).extents[0].blob for p, n in tree.walk() if p}
    assert found == {b"x": 1, b"y": 0, b"z": 0}


def test_an_extent_in_no_blob_of_its_layer_is_not_looked_for_in_the_next_layers_blobs() -> None:
    blob = Blob("sha256:" + "1" * 64, 10, FRAMES, "sha256:" + "1" * 64, 100)
    inode = Inode(FILE, size_bytes=5, extents=(Extent(0, 0, 20, 5),))
    right = build_tree([(b"x", 1)], [Inode(DIRECTORY), inode], [blob])
    sections = {**sections_of(right), "extent_blob": bytes([1, 0, 0, 0])}
    wrong = index.decode(forge(sections, 2, 1))
    with pytest.raises(CorruptError, match="blob"):
        merge_layers([LayerTree(wrong), LayerTree(right)])


def test_deep_trees_do_not_recurse() -> None:
    path, entries = "", []
    for _ in range(2000):
        path = f"{path}/d".lstrip("/")
        entries.append((path, Inode(DIRECTORY)))
    layer = packed(*entries)
    assert merge_layers([layer, layer]).name_count == 2000
