"""Stacks of real tars, packed and merged, against a model with every rule spelled out."""

import io
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.base.content_digest import content_digest
from bootseer.blob.pack import tar_packing as tar_pack
from bootseer.errors import CorruptError
from bootseer.prefetch.index.merge import LayerTree, merge_layers
from bootseer.prefetch.sources.layer_tar import pack_layer
from testbed.images.building import Member, tar_of
from testbed.images.odd_tars import END, block


def packed(members: Sequence[Member]) -> LayerTree:
    return pack_layer(io.BytesIO(tar_of(members)), io.BytesIO())


@dataclass(eq=False)
class Thing:
    """File or directory of the model; two names of one thing are hard links."""

    member: Member | None
    """Its tar member; None if it is implied."""

    @property
    def is_dir(self) -> bool:
        return self.member is None or self.member.kind == "d"


def above(path: str) -> list[str]:
    """Return every directory that leads to `path`, the root first."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts))] if path else []


def remove(state: dict[str, Thing], path: str) -> None:
    for name in [p for p in state if p == path or path in above(p)]:
        del state[name]


class Model:
    """Result of unpacking the layers one after another."""

    def __init__(self) -> None:
        self.state: dict[str, Thing] = {"": Thing(None)}
        self.layer: dict[str, Thing] = {"": Thing(None)}

    def accepts(self, member: Member) -> bool:
        """Return whether the member makes sense here; else it is left out of the tar."""
        path = member.name.removeprefix("./").rstrip("/")
        if any(p in self.layer and not self.layer[p].is_dir for p in above(path)):
            return False
        if not path and member.kind != "d":
            return False
        if member.kind == "h":
            target = self.layer.get(member.link) or self.state.get(member.link)
            # An entry of a layer hides everything below its path, also from its own links.
            leads = any(p in self.layer and not self.layer[p].is_dir for p in above(member.link))
            return (
                target is not None
                and not target.is_dir
                and not leads
                and member.link not in above(path)
                and ".wh." not in member.link + path
            )
        return True

    def add(self, member: Member) -> None:
        path = member.name.removeprefix("./").rstrip("/")
        for parent in above(path):
            self.layer.setdefault(parent, Thing(None))
        if member.kind == "h":
            thing = self.layer.get(member.link) or self.state[member.link]
            is_below = any(thing is below for below in self.state.values())
            if not is_below and thing.member is not None:
                thing.member = replace(thing.member, uid=member.uid)
            if self.layer.get(path) is not thing:
                remove(self.layer, path)
            self.layer[path] = thing
        elif member.kind == "d" and path in self.layer and self.layer[path].is_dir:
            self.layer[path] = Thing(member)
        else:
            remove(self.layer, path)
            self.layer[path] = Thing(member)

    def end_layer(self) -> None:
        for path in self.layer:
            directory, _, name = path.rpartition("/")
            if name == ".wh..wh..opq":
                for below in [p for p in self.state if directory in above(p)]:
                    del self.state[below]
            elif name.startswith(".wh.") and not name.startswith(".wh..wh."):
                remove(self.state, f"{directory}/{name[4:]}".lstrip("/"))
        for path, thing in sorted(self.layer.items()):
            if path.rpartition("/")[2].startswith(".wh."):
                continue
            known = self.state.get(path)
            if known is not None and known.is_dir and thing.is_dir:
                if thing.member is not None:
                    self.state[path] = thing
            else:
                remove(self.state, path)
                self.state[path] = thing
        self.layer = {"": Thing(None)}


NAMES = st.sampled_from(["a", "b", "c"])
LAST = st.sampled_from(["a", "b", "c", "d", ".wh.a", ".wh.b", ".wh..wh..opq", ".wh..wh.plnk"])


@st.composite
def members(draw: st.DrawFn, number: int) -> Member:
    directories = draw(st.lists(NAMES, max_size=2))
    name = "/".join([*directories, draw(LAST)])
    prefix = draw(st.sampled_from(["", "./"]))
    if "/.wh." in f"/{name}":
        return Member(prefix + name, uid=number)
    kind = draw(st.sampled_from("ffddhl"))
    if kind == "d":
        root = draw(st.integers(0, 9)) == 0
        return Member("./" if root else prefix + name + "/", "d", uid=number)
    if kind == "h":
        target = "/".join(draw(st.lists(NAMES, min_size=1, max_size=3)))
        return Member(prefix + name, "h", link=target, uid=number)
    if kind == "l":
        # Dangling links only: paths through symbolic links are tested with the tar packer.
        return Member(prefix + name, "l", link=f"absent-{number}", uid=number)
    return Member(prefix + name, data=b"%d" % number, uid=number)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[list[list[Member]], Model]:
    model = Model()
    layers: list[list[Member]] = []
    number = 0
    for _ in range(draw(st.integers(1, 4))):
        layer = []
        for _ in range(draw(st.integers(0, 8))):
            number += 1
            member = draw(members(number))
            if model.accepts(member):
                model.add(member)
                layer.append(member)
        model.end_layer()
        layers.append(layer)
    return layers, model


@settings(max_examples=150)
@given(stacks())
def test_tars_against_the_model(stack: tuple[list[list[Member]], Model]) -> None:
    layers, model = stack
    tree = merge_layers([packed(layer) for layer in layers])
    found = {path.decode(): number for path, number in tree.walk()}
    assert sorted(found) == sorted(model.state)
    numbers: dict[int, Thing] = {}
    for path, thing in model.state.items():
        inode = tree.inode(found[path])
        member = thing.member
        assert stat.S_ISDIR(inode.mode) == thing.is_dir, path
        # The root's attributes are not unpacked.
        assert inode.uid == (member.uid if member and path else 0), path
        if member and member.kind == "f":
            assert inode.digest == content_digest(member.data), path
        if member and member.kind == "l":
            assert inode.link_target == member.link.encode(), path
        # The same thing is the same inode, and only then.
        assert numbers.setdefault(found[path], thing) is thing, path
    assert len(numbers) == len({id(thing) for thing in model.state.values()})


def test_what_a_layer_only_implies() -> None:
    layer = packed([Member("a/b/c/", "d"), Member("x/", "d"), Member("x/y/z", data=b"z")])
    assert layer.implied == {b"", b"a", b"a/b", b"x/y"}
    assert packed([Member("./", "d"), Member("a/b"), Member("a/", "d")]).implied == set()


def test_links_to_lower_layers() -> None:
    layer = packed(
        [
            Member("new/one", "h", link="./lower"),
            Member("two", "h", link="new/one"),
            Member("three", "h", link="lower"),
            Member("three", data=b"replaced"),
            Member("lower", data=b"comes too late for the links above"),
            Member("four", "h", link="lower"),
        ]
    )
    assert layer.links == ((b"new/one", b"lower"), (b"two", b"lower"))
    tree = layer.tree
    assert tree.resolve(b"four") == tree.resolve(b"lower")


def test_a_link_whose_directory_is_replaced_is_gone() -> None:
    layer = packed([Member("d/link", "h", link="lower"), Member("d", data=b"a file now")])
    assert layer.links == ()


def test_a_link_into_a_directory_that_the_layer_removes() -> None:
    lower = [Member("old/file", data=b"f"), Member("old/other", data=b"o")]
    upper = [Member(".wh.old"), Member("new/file", "h", link="./old/file")]
    tree = merge_layers([packed(lower), packed(upper)])
    assert [path for path, _ in tree.walk()] == [b"", b"new", b"new/file"]


def test_a_link_through_a_symbolic_link_of_its_layer() -> None:
    layer = [Member("lib", "l", link="usr/lib"), Member("usr/lib/x", data=b"x")]
    tree = packed([*layer, Member("y", "h", link="lib/x")]).tree
    assert tree.resolve(b"y") == tree.resolve(b"usr/lib/x")


def test_a_link_that_hides_a_directory_below() -> None:
    lower = [Member("d/x", data=b"x"), Member("file", data=b"f")]
    tree = merge_layers([packed(lower), packed([Member("d", "h", link="file")])])
    assert tree.resolve(b"d/x") is None
    assert tree.resolve(b"d") == tree.resolve(b"file")


@pytest.mark.parametrize(
    "members", [[Member("../x")], [Member("a/../../x")], [Member("x", data=b"1"), Member("x/y")]]
)
def test_members_that_lead_astray(members: list[Member]) -> None:
    with pytest.raises(CorruptError):
        packed(members)


def test_a_link_in_the_place_of_the_root() -> None:
    with pytest.raises(CorruptError, match="root"):
        packed([Member("./", "h", link="below")])


def test_folders_that_are_replaced_again_and_again() -> None:
    """Regression: each replacement went through all names of the layer, or all its links."""
    # Written by hand, which takes a quarter of the time.
    headers = [block(b"many/%d" % n) for n in range(20_000)]
    headers += [block(b"links/%d" % n, b"1", link=b"below") for n in range(5_000)]
    for n in range(5_000):
        headers += [block(b"x/", b"5"), block(b"x/y", b"1", link=b"below"), block(b"x/%d" % n)]
        headers.append(block(b"x", data=b"a file"))
    layer = pack_layer(io.BytesIO(b"".join(headers) + END), io.BytesIO())
    assert len(layer.links) == 5_000
    assert layer.tree.name_count == 20_000 + 3
    assert stat.S_ISREG(layer.tree.mode(layer.tree.resolve(b"x") or 0))


def test_a_layer_that_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_pack, "MEMORY_BYTES_MAX", 2**20)
    deep = "/".join(["d"] * 1000)
    for members in (
        [Member(f"{n}") for n in range(2000)],
        [Member("same", data=b"x") for n in range(2000)],
        [Member(f"{n}", "h", link="below") for n in range(4000)],
        [Member(f"{n}/{deep}") for n in range(3)],
        [Member(f"{n}", xattrs={"user.x": "v" * 60_000}) for n in range(20)],
        [Member(f"{n}", "l", link="x" * 4000) for n in range(500)],
    ):
        with pytest.raises(CorruptError, match="GiB of memory"):
            packed(members)


def test_not_a_tar() -> None:
    for data in (b"", b"garbage" * 100, tar_of([Member("x", data=b"x" * 5000)])[:3000]):
        with pytest.raises(CorruptError):
            pack_layer(io.BytesIO(data), io.BytesIO())


def test_the_blob_holds_the_tar_unchanged() -> None:
    import zstandard

    tar = tar_of([Member("x", data=bytes(500_000)), replace(Member("y"), data=b"y" * 777)])
    sink = io.BytesIO()
    pack_layer(io.BytesIO(tar), sink)
    reader = zstandard.ZstdDecompressor().stream_reader(sink.getvalue(), read_across_frames=True)
    assert reader.read() == tar
