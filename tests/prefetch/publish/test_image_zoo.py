"""Odd images have the same names and attributes as containerd and umoci unpack.

containerd's result with overlayfs counts. Its native snapshotter, which unpacks each layer on a
copy of those below, is used where overlayfs refuses an image. All differences are listed here, and
explained in docs/format/image.md under "Merging".
"""

import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from bootseer.blob.extract.extraction import extract
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Tree
from bootseer.prefetch.index.catalogue import find_image, load_tree
from bootseer.store import Store, open_store
from testbed.containers.containerd_unpack import RefusedError, UnpackingContainerd, umoci_unpacked
from testbed.images.odd_tars import END, block, pax
from testbed.images.zoo import ZOO, write_zoo_layout
from testbed.mounts.image_mounts import index, mounted, run_program, settings_at, tree_in_child
from testbed.needs import require

pytestmark = pytest.mark.needs("mount", "fuse")

Shown: TypeAlias = Mapping[bytes, tuple[object, ...]]
Differences: TypeAlias = set[tuple[str, str]]
"""Set of (path, attribute); "name" means that only one of the two has the path."""

_FIELDS = (
    "mode", "owner", "links", "size", "time", "device", "target", "xattrs", "content", "inode",
)  # fmt: skip
_ATTRIBUTES = ("mode", "owner")
_ALL = ("mode", "size", "target", "time")


def differing(*paths: str, fields: tuple[str, ...] = ("name",)) -> Differences:
    return {(path, field) for path in paths for field in fields}


PEERS: Sequence[str] = ("overlayfs", "native", "umoci")

REFUSED = {
    ("overlayfs", "links-below"): "no such file or directory",
    ("umoci", "global-headers"): "unknown typeflag",
    # A folder that a layer implies in the place of a lower layer's file.
    ("umoci", "random-stacks"): "not a directory",
}
"""Images that a program does not unpack at all, with its message."""

DIFFERENT: Mapping[tuple[str, str], Differences] = {
    # A folder that replaces a whiteout, and a root, are not made opaque.
    ("overlayfs", "opaque-root"): differing("old", "folder", "folder/old"),
    ("overlayfs", "contested"): (
        differing("again/old", "aufs/.wh..wh.plnk", "aufs/.wh..wh.plnk/1.2")
        # An implied folder gets the attributes of a lower layer's folder at its path, even if an
        # opaque mark hides that or a link leads to it.
        | differing("opaque/sub", fields=("mode",))
        | differing("link", "way", fields=_ATTRIBUTES)
    ),
    ("overlayfs", "changes"): differing("opaque/sub", fields=("mode",)),
    # umoci unpacks in place, so it follows links of lower layers.
    ("umoci", "contested"): (
        differing("absent", "aufs/.wh..wh.plnk", "aufs/.wh..wh.plnk/1.2")
        | differing("link/new", "real/new", "real/old")
        | differing("link", "way", fields=_ALL)
    ),
    # umoci keeps the root's attributes and times before 1970, but no empty xattrs.
    ("umoci", "attributes"): (
        differing("", fields=("mode", "owner"))
        | differing(
            *(f"time{kind}-{n}" for kind in ("", "-link", "-dir") for n in (3, 7, 8)),
            *("time-4", "time-link-4"),
            fields=("time",),
        )
        | differing("xattrs", fields=("xattrs",))
    ),
    ("umoci", "dialects"): differing("pax/owner", fields=("time",)),
    # umoci does not set a link's attributes.
    ("umoci", "links"): differing("plain", "brings", fields=("mode", "owner", "time", "xattrs")),
}


@pytest.fixture(scope="module")
def containerd() -> Iterator[UnpackingContainerd]:
    require("root")
    with UnpackingContainerd() as running:
        yield running


def differences(ours: Shown, theirs: Shown, unpacked_ns: int, time_unit_ns: int = 1) -> Differences:
    """Return the differing attributes of names, without those that depend on unpacking."""
    found: Differences = set()
    for path in ours.keys() | theirs.keys():
        shown = path.decode(errors="backslashreplace")
        if path not in ours or path not in theirs:
            found.add((shown, "name"))
            continue
        both = zip(_FIELDS, ours[path], theirs[path], strict=True)
        for field, our, their in both:
            if field == "time":
                assert isinstance(our, int)
                assert isinstance(their, int)
                # A folder without an entry in the image, or one that was changed afterwards.
                if their >= unpacked_ns and stat.S_ISDIR(_mode(ours[path])):
                    continue
                our, their = our // time_unit_ns, their // time_unit_ns
            # The programs count names that another layer hides, too; names of one inode are
            # compared.
            if our != their and field != "links":
                found.add((shown, field))
    return found


def _mode(shown: tuple[object, ...]) -> int:
    mode = shown[0]
    assert isinstance(mode, int)
    return mode


def check_links(shown: Shown) -> None:
    """Assert that the link count of each entry but folders is the number of its names."""
    names: dict[object, int] = {}
    for attributes in shown.values():
        names[attributes[-1]] = names.get(attributes[-1], 0) + 1
    for path, attributes in shown.items():
        if not stat.S_ISDIR(_mode(attributes)):
            assert attributes[2] == names[attributes[-1]], path


def without_link_counts_of_folders(shown: Shown) -> Shown:
    return {path: (*a[:2], 0, *a[3:]) if stat.S_ISDIR(_mode(a)) else a for path, a in shown.items()}


def extracted(tree: Tree, store: Store, target: Path) -> Shown:
    keys = [blob_key(blob.digest) for blob in tree.blobs]
    extract(
        tree,
        lambda blob, offset, length: store.read(keys[blob], offset, length),
        target,
        allow_devices=True,
    )
    return tree_in_child(target)


def peer_shows(peer: str, containerd: UnpackingContainerd, work: Path) -> Shown:
    """Return the entries that a program unpacks. Raises: RefusedError."""
    if peer == "umoci":
        return tree_in_child(umoci_unpacked(work / "gzip-layout", work / "bundle"))
    with containerd.unpacked(work / "layout", work / peer, peer) as root:
        return tree_in_child(root)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.needs("fuse")
def test_an_image_of_the_zoo(name: str, containerd: UnpackingContainerd, tmp_path: Path) -> None:
    settings = settings_at(tmp_path / "node")
    layers = ZOO[name](tmp_path)
    layout = write_zoo_layout(tmp_path / "layout", layers)
    # This umoci reads no zstd; the tree must be the same.
    write_zoo_layout(tmp_path / "gzip-layout", layers, gzip_only=True)
    index(settings, layout, "zoo")
    with mounted(settings, "zoo", tmp_path / "mount") as image:
        ours = tree_in_child(image.directory)
    check_links(ours)
    peers = PEERS
    with open_store(settings.store_url) as store:
        tree = load_tree(store, find_image(store, "zoo"), settings.cache_dir)
        assert ours.keys() == {path for path, _ in tree.walk()}
        if name == "many-files":
            # This takes long, and one result is enough.
            peers = ("overlayfs",)
        else:
            unpacked = extracted(tree, store, tmp_path / "extracted")
            assert without_link_counts_of_folders(unpacked) == without_link_counts_of_folders(ours)
    started_ns = time.time_ns() - 10**9
    asked = 0
    for peer in peers:
        # It copies the tree for each layer, so it is used only where it is needed.
        if peer == "native" and ("overlayfs", name) not in REFUSED:
            continue
        if (peer, name) in REFUSED:
            with pytest.raises(RefusedError, match=REFUSED[peer, name]):
                peer_shows(peer, containerd, tmp_path)
            continue
        theirs = peer_shows(peer, containerd, tmp_path)
        unit_ns = 100 if peer == "umoci" else 1
        found = differences(ours, theirs, started_ns, unit_ns)
        assert found == DIFFERENT.get((peer, name), set()), peer
        asked += 1
    assert asked


@pytest.mark.needs("root", "fuse")
def test_a_file_of_more_than_8_gib(tmp_path: Path) -> None:
    """A sparse file in PAX 1.0 form; other programs would write every zero of it."""
    size = 9 * 2**30 + 5
    segments = ((0, b"first"), (2**33 + 1, b"beyond 8 GiB"), (size - 4, b"last"))
    numbers = [len(segments), *(n for offset, data in segments for n in (offset, len(data)))]
    content = b"".join(b"%d\n" % n for n in numbers).ljust(512, b"\0")
    content += b"".join(data for _, data in segments)
    records = {
        b"GNU.sparse.major": b"1",
        b"GNU.sparse.minor": b"0",
        b"GNU.sparse.name": b"big",
        b"GNU.sparse.realsize": b"%d" % size,
    }
    tar = pax(records) + block(b"GNUSparseFile.0/big", data=content) + END
    settings = settings_at(tmp_path / "node")
    index(settings, write_zoo_layout(tmp_path / "layout", [(tar, "gzip")]), "big")
    with mounted(settings, "big", tmp_path / "mount") as image:
        program = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print(os.fstat(fd).st_size)
for offset in map(int, sys.argv[2:]):
    print(os.pread(fd, 12, offset))
"""
        found = run_program(
            program, image.directory / "big", *(offset for offset, _ in segments), 2**32
        )
    expected = [b"first".ljust(12, b"\0"), b"beyond 8 GiB", b"last", bytes(12)]
    assert found.splitlines() == [str(size), *map(repr, expected)]
