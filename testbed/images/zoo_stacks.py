"""Layers of `zoo` that change one another: whiteouts, links, and very many."""

from pathlib import Path

from testbed.images.odd_tars import END, block, pax
from testbed.images.random_layers import random_layers
from testbed.images.zoo_layers import Layers


def changes(work: Path) -> Layers:
    """Return layers with whiteouts, opaque folders, and one kind of name over another."""
    lower = b"".join(
        (
            block(b"opaque/", b"5", mode=0o755),
            block(b"opaque/old", data=b"hidden"),
            block(b"opaque/sub/", b"5", mode=0o700),
            block(b"opaque/sub/old", data=b"hidden"),
            block(b"opaque-late/", b"5", mode=0o755),
            block(b"opaque-late/old", data=b"hidden"),
            block(b"opaque-late/sub/old", data=b"hidden"),
            block(b"opaque-only/", b"5", mode=0o711, uid=4),
            block(b"opaque-only/old", data=b"hidden"),
            block(b"white/", b"5", mode=0o750, gid=3),
            block(b"white/file", data=b"hidden"),
            block(b"white/again", data=b"old"),
            block(b"white/folder/", b"5", mode=0o755),
            block(b"white/folder/deep/file", data=b"hidden"),
            block(b"white/link", b"2", link=b"file"),
            block(b"file-to-folder", data=b"file"),
            block(b"folder-to-file/", b"5", mode=0o755),
            block(b"folder-to-file/inside", data=b"hidden"),
            block(b"folder-to-link/", b"5", mode=0o755),
            block(b"folder-to-link/inside", data=b"hidden"),
            block(b"target/", b"5", mode=0o755),
            block(b"target/inside", data=b"stays"),
            block(b"link-to-folder", b"2", link=b"target"),
            block(b"link-to-file", b"2", link=b"target/inside"),
            block(b"merged/", b"5", mode=0o700, uid=1),
            block(b"merged/low", data=b"both"),
            block(b"kept/", b"5", mode=0o710, uid=2),
            block(b"kept/low", data=b"attributes stay"),
            block(b"fifo", b"6", mode=0o600),
            block(b"replaced", data=b"low", mode=0o4755, uid=7),
        )
    )
    middle = b"".join(
        (
            block(b"opaque/.wh..wh..opq"),
            block(b"opaque/new", data=b"shown"),
            block(b"opaque/sub/new", data=b"shown"),
            block(b"opaque-late/", b"5", mode=0o700),
            block(b"opaque-late/new", data=b"shown"),
            block(b"opaque-late/sub/", b"5", mode=0o711),
            block(b"opaque-late/sub/new", data=b"shown"),
            block(b"opaque-late/.wh..wh..opq"),
            block(b"opaque-only/.wh..wh..opq"),
            block(b"white/.wh.file"),
            block(b"white/.wh.again"),
            block(b"white/again", data=b"new"),
            block(b"white/.wh.folder"),
            block(b"white/.wh.link"),
            block(b".wh.never-there"),
            block(b"file-to-folder/", b"5", mode=0o711),
            block(b"file-to-folder/inside", data=b"folder"),
            block(b"folder-to-file", data=b"file"),
            block(b"folder-to-link", b"2", link=b"target"),
            block(b"link-to-folder/", b"5", mode=0o755),
            block(b"link-to-folder/new", data=b"a folder of its own"),
            block(b"link-to-file", data=b"a file of its own"),
            block(b"merged/", b"5", mode=0o755, uid=3),
            block(b"merged/high", data=b"both"),
            block(b"kept/high", data=b"implied"),
            block(b"fifo", data=b"a file"),
            block(b"replaced", data=b"high"),
        )
    )
    upper = b"".join(
        (
            block(b"opaque/old", data=b"back again"),
            block(b"white/folder/", b"5", mode=0o700),
            block(b"white/folder/new", data=b"the old contents stay away"),
            block(b"white/file/", b"5", mode=0o755),
            block(b"folder-to-file/", b"5", mode=0o755),
            block(b"folder-to-file/new", data=b"a folder again"),
            block(b"file-to-folder", data=b"a file again"),
            block(b".wh.merged"),
            block(b".wh.target"),
        )
    )
    return [(lower + END, "gzip"), (middle + END, "zstd"), (upper + END, "none")]


def links(work: Path) -> Layers:
    """Return layers with hard links: chains, to symbolic links, and to replaced files."""
    first = b"".join(
        (
            block(b"a", data=b"chain", uid=1),
            block(b"b", b"1", link=b"a", uid=1),
            block(b"c", b"1", link=b"./b", uid=1),
            block(b"sub/d", b"1", link=b"/c", uid=1),
            block(b"symbolic", b"2", link=b"a", uid=3),
            block(b"hard-symbolic", b"1", link=b"symbolic", uid=3),
            block(b"loop-1", b"2", link=b"loop-2"),
            block(b"loop-2", b"2", link=b"loop-1"),
            block(b"hard-loop", b"1", link=b"loop-1"),
            block(b"pipe", b"6"),
            block(b"hard-pipe", b"1", link=b"pipe"),
            block(b"null", b"3", device=(1, 3), mode=0o666),
            block(b"hard-null", b"1", link=b"null", mode=0o666),
            block(b"target", data=b"old", mode=0o600),
            block(b"keeps-old", b"1", link=b"target", mode=0o600),
            block(b"target", data=b"new", mode=0o644),
            block(b"has-new", b"1", link=b"target", mode=0o644),
            block(b"plain", data=b"attributes of the last link", mode=0o600),
            pax({b"SCHILY.xattr.user.by": b"link", b"mtime": b"5.5"}),
            block(b"brings", b"1", link=b"plain", mode=0o4755, uid=8, gid=9),
            block(b"claims-content", b"1", link=b"a", uid=1, size=1000),
            block(b"real/", b"5", mode=0o755),
            block(b"real/file", data=b"through"),
            block(b"way", b"2", link=b"real"),
            block(b"through", b"1", link=b"way/file"),
        )
    )
    second = b"".join(
        (
            block(b".wh.b"),
            block(b"a", data=b"only this name"),
            block(b".wh.target"),
            block(b"e", data=b"x", mode=0o640),
            block(b"sub/f", b"1", link=b"e", mode=0o640),
        )
    )
    return [(first + END, "gzip"), (second + END, "gzip")]


def links_below(work: Path) -> Layers:
    """Return layers with hard links to files that only lower layers have."""
    first = b"".join(
        (
            block(b"a", data=b"1", uid=1, mode=0o600),
            block(b"b", b"1", link=b"a", uid=1, mode=0o600),
            block(b"sub/", b"5", mode=0o755),
            block(b"sub/deep", data=b"2"),
            block(b"goes", data=b"3"),
        )
    )
    second = b"".join(
        (
            block(b"c", b"1", link=b"a", uid=1, mode=0o600),
            block(b"sub/e", b"1", link=b"sub/deep"),
            block(b"kept", b"1", link=b"goes"),
            block(b".wh.goes"),
        )
    )
    third = block(b"d", b"1", link=b"c", uid=1, mode=0o600) + block(b"a", data=b"other")
    return [(first + END, "gzip"), (second + END, "gzip"), (third + END, "zstd")]


def contested(work: Path) -> Layers:
    """Return layers on which other programs differ from one another or from the specification."""
    lower = b"".join(
        (
            block(b"again/", b"5", mode=0o755),
            block(b"again/old", data=b"1"),
            block(b"opaque/sub/", b"5", mode=0o700),
            block(b"opaque/sub/old", data=b"2"),
            block(b"real/", b"5", mode=0o710, uid=9),
            block(b"real/old", data=b"3"),
            block(b"link", b"2", link=b"real"),
            block(b"way", b"2", link=b"real"),
        )
    )
    upper = b"".join(
        (
            block(b".wh.again"),
            block(b"again/", b"5", mode=0o755),
            block(b"again/new", data=b"4"),
            block(b"opaque/.wh..wh..opq"),
            block(b"opaque/sub/new", data=b"5"),
            block(b"link/new", data=b"6"),
            block(b"way/.wh.old"),
            block(b"absent/.wh.old"),
            block(b"aufs/.wh..wh.plnk/", b"5", mode=0o755),
            block(b"aufs/.wh..wh.plnk/1.2", data=b"7"),
        )
    )
    return [(lower + END, "gzip"), (upper + END, "gzip")]


def opaque_root(work: Path) -> Layers:
    """Return a layer below one that hides everything."""
    lower = block(b"old", data=b"1") + block(b"folder/old", data=b"2")
    return [(lower + END, "gzip"), (block(b".wh..wh..opq") + block(b"new") + END, "gzip")]


def random_stacks(work: Path) -> Layers:
    """Return four layers of 200 small random trees with few names, so that names collide."""
    tars = random_layers(seed=1, tree_count=200)
    return list(zip(tars, ("gzip", "zstd", "none", "members"), strict=True))


def many_files(work: Path) -> Layers:
    """Return a layer with 3,000 files in a folder, and one that changes and removes some."""
    lower = block(b"many/", b"5", mode=0o755)
    lower += b"".join(block(b"many/%05d" % n, data=b"%d" % n) for n in range(3_000))
    upper = b"".join(block(b"many/%05d" % n, data=b"new") for n in range(0, 3_000, 150))
    upper += b"".join(block(b"many/.wh.%05d" % n) for n in range(1, 3_000, 150))
    return [(lower + END, "zstd"), (upper + END, "gzip")]


def many_layers(work: Path) -> Layers:
    """Return 100 layers, some of them empty, that change one another."""
    layers = []
    for number in range(100):
        if number % 7 == 3:
            layers.append((END, "gzip"))
            continue
        tar = block(b"own/%03d" % number, data=b"%d" % number)
        tar += block(b"shared", data=b"%d" % number, uid=number)
        tar += block(b"folders/%d/file" % (number % 10), data=b"%d" % number)
        if number % 5 == 4:
            tar += block(b"own/.wh.%03d" % (number - 2))
        if number % 11 == 10:
            tar += block(b"folders/.wh.%d" % ((number + 5) % 10))
        layers.append((tar + END, ("gzip", "zstd", "none")[number % 3]))
    return layers
