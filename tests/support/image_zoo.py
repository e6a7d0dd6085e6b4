"""Images with everything nasty in them that a container engine still unpacks.

Layers are tars of every dialect: by hand, header for header, where no tool would write them so, and
by GNU tar, bsdtar and Python where the point is what real tools write. `ZOO` maps a name to a
function that makes the layers, each an uncompressed tar and how it is stored.
"""

import os
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from tests.support.images import Layout, Member, tar_of
from tests.support.odd_tars import END, GNU, TIME, V7, block, gnu_long, pax, tool_tar
from tests.support.random_layers import random_layers

Layers: TypeAlias = Sequence[tuple[bytes, str]]
"""(uncompressed tar, compression as `images.compress` names it), the lowest first."""

FILE_CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
"""security.capability: cap_net_bind_service=ep, as setcap writes it (linux/capability.h)."""


def write_zoo_layout(directory: Path, layers: Layers, *, gzip_only: bool = False) -> Path:
    """An OCI layout of one image, tagged "latest"."""
    layout = Layout(directory)
    layout.add_image(
        [tar for tar, _ in layers],
        compression="gzip" if gzip_only else [compression for _, compression in layers],
    )
    return directory


def dialects(work: Path) -> Layers:
    """One layer in each way to write a header."""
    v7 = (
        block(b"v7/", b"\0", magic=V7, mode=0o755)
        + block(b"v7/file", b"\0", b"old", magic=V7, uid=3)
        + block(b"v7/link", b"2", link=b"file", magic=V7)
        + block(b"v7/hard", b"1", link=b"v7/file", magic=V7, uid=3)
        + END
    )
    ustar = (
        block(b"ustar/", b"5", mode=0o711)
        + block(b"n" * 99, data=b"prefix", prefix=b"ustar/" + b"p" * 100)
        + block(b"ustar/null", b"3", device=(1, 3), mode=0o666)
        + block(b"ustar/disk", b"4", device=(259, 70_000), mode=0o660, gid=6)
        + block(b"ustar/pipe", b"6", mode=0o620)
        # A file whatever its name ends with: only what is older than ustar means a directory.
        + block(b"ustar/slash/", b"0", b"file")
        + END
    )
    gnu = (
        block(b"gnu/", b"5", magic=GNU, mode=0o2755)
        + gnu_long(b"L", b"gnu/" + b"\xff\xfe" * 60)
        + block(b"gnu/cut off", data=b"not UTF-8", magic=GNU, uid=2**31, gid=3_000_000)
        + gnu_long(b"K", b"t/" * 100 + b"end")
        + gnu_long(b"L", b"gnu/" + b"l" * 200)
        + block(b"gnu/cut off", b"2", magic=GNU)
        + block(b"gnu/base256", data=b"x", magic=GNU, mtime=2**33 + 5)
        + block(b"gnu/not-utf8-\xff", data=b"y", magic=GNU)
        + END
    )
    extended = (
        block(b"pax/", b"5", mode=0o755)
        + pax({b"path": b"pax/" + "ä".encode() * 100, b"mtime": b"1234567890.987654321"})
        + block(b"pax/short", data=b"long")
        + pax({b"uid": b"4000000", b"gid": b"4000001", b"mtime": b"-1.5"})
        + block(b"pax/owner", data=b"big")
        + pax({b"size": b"0", b"mtime": b"1.0000000019"})
        + block(b"pax/empty", size=0)
        + pax({b"size": b"5"})
        + block(b"pax/size", data=b"01234", size=0)
        + pax({b"linkpath": b"x" * 300, b"path": b"pax/link"})
        + block(b"pax/l", b"2", link=b"y")
        + pax({b"path": b"pax/binary-\xff\xfe", b"hdrcharset": b"BINARY"})
        + block(b"pax/b", data=b"binary")
        + pax({b"path": b"", b"uid": b"", b"mtime": b""})
        + block(b"pax/deleted", data=b"empty records count for nothing", uid=9)
        + pax([(b"path", b"pax/first"), (b"path", b"pax/last")])
        + block(b"pax/z", data=b"the last record counts")
        + END
    )
    no_end = block(b"no-end/file", data=b"the archive just stops")
    garbage = block(b"garbage/file", data=b"and then") + END + b"trailing garbage" * 1000
    padded = block(b"padded/file", data=b"20 blocks") + bytes(20 * 512)
    return [
        (v7, "none"),
        (ustar, "gzip"),
        (gnu, "members"),
        (extended, "zstd"),
        (no_end, "frames"),
        (garbage, "gzip"),
        (padded, "zstd"),
    ]


def tools(work: Path) -> Layers:
    """One tree, as GNU tar, bsdtar and Python write it in each of their formats."""
    tree = work / "tree"
    tree.mkdir()
    (tree / "small").write_bytes(b"small")
    (tree / "hard").hardlink_to(tree / "small")
    (tree / "to-link").symlink_to("small")
    os.link(tree / "to-link", tree / "hard-to-link", follow_symlinks=False)
    (tree / ("long-" * 40)).write_bytes(b"long name")
    (tree / ("deep-" * 20) / ("er" * 60)).mkdir(parents=True)
    (tree / ("deep-" * 20) / ("er" * 60) / "file").write_bytes(b"deep")
    (tree / "far").symlink_to("far/" * 50)
    os.mkfifo(tree / "pipe")
    os.mknod(tree / "zero", 0o666 | 0o020000, os.makedev(1, 5))
    with (tree / "sparse").open("wb") as file:
        for start in range(12):
            file.seek(start * 300_000 + 100_000)
            file.write(b"data %d" % start)
        file.truncate(5_000_000)
    for number, path in enumerate(sorted(tree.rglob("*"))):
        if number % 2:
            os.chown(path, 1000 + number, 2000 + number, follow_symlinks=False)
        os.utime(path, ns=(0, TIME * 10**9 + number * 1_000_001), follow_symlinks=False)
    os.setxattr(tree / "small", "user.note", b"\0binary=\xff\n")
    os.setxattr(tree / "sparse", "security.capability", FILE_CAPABILITY)
    layers = []
    ways: dict[str, tuple[str, ...]] = {
        "gnu": ("tar", "--format=gnu"),
        "posix": ("tar", "--format=posix", "--xattrs", "--xattrs-include=*"),
        "sparse-0.0": ("tar", "--format=posix", "--sparse", "--sparse-version=0.0"),
        "sparse-0.1": ("tar", "--format=posix", "--sparse", "--sparse-version=0.1"),
        "sparse-1.0": ("tar", "--format=posix", "--sparse", "--sparse-version=1.0", "--xattrs"),
        "bsd-pax": ("bsdtar", "--format=pax"),
        "bsd-gnu": ("bsdtar", "--format=gnutar"),
    }
    for number, (name, command) in enumerate(ways.items()):
        (tree).rename(work / name)
        tar = tool_tar(*command, "-cf", "-", name, cwd=work)
        (work / name).rename(tree)
        layers.append((tar, ("gzip", "zstd", "members")[number % 3]))
    python = [Member(f"python/{kind}", data=b"x" * 700) for kind in ("a", "ä" * 100)]
    layers.append((tar_of(python, tarfile.GNU_FORMAT), "frames"))
    layers.append((tar_of(python, tarfile.PAX_FORMAT), "none"))
    return layers


def attributes(work: Path) -> Layers:
    """Modes, owners, times and extended attributes at their limits."""
    layer = block(b"./", b"5", mode=0o1700, uid=5, gid=6)
    for mode in (0, 0o1, 0o777, 0o4755, 0o2755, 0o6711, 0o1644, 0o7777, 0o100644):
        layer += block(b"file-%o" % mode, data=b"m", mode=mode, uid=mode, gid=1)
        layer += block(b"dir-%o/" % mode, b"5", mode=mode & 0o7777, gid=mode)
    for number, time in enumerate(
        (b"0", b"0.000000001", b"1.999999999", b"-0.5", b"-62135596800", b"4294967296.5",
         b"9223372036.854775807", b"9223372037", b"99999999999999", b"1e5"[:1])
    ):  # fmt: skip
        layer += pax({b"mtime": time}) + block(b"time-%d" % number, data=b"t")
        layer += pax({b"mtime": time}) + block(b"time-link-%d" % number, b"2", link=b"x")
        layer += pax({b"mtime": time}) + block(b"time-dir-%d/" % number, b"5", mode=0o755)
    layer += pax({b"SCHILY.xattr.security.capability": FILE_CAPABILITY})
    layer += block(b"capable", data=b"#!", mode=0o755)
    layer += pax(
        {
            b"SCHILY.xattr.user.empty": b"",
            b"SCHILY.xattr.user.binary": b"\0\1\n=\xff",
            b"SCHILY.xattr.user.a.b.c": b"v" * 3000,
            b"SCHILY.xattr.trusted.overlay.opaque": b"y",
            b"SCHILY.xattr.trusted.other": b"1",
            b"SCHILY.xattr.user.overlay.opaque": b"y",
            b"LIBARCHIVE.xattr.user.ignored": b"QQ",
            b"SCHILY.acl.access": b"user::rw-,group::r--,other::r--",
            b"RHT.security.selinux": b"ignored",
        }
    )
    layer += block(b"xattrs", data=b"x")
    layer += pax({b"SCHILY.xattr.user.d": b"1", b"SCHILY.xattr.trusted.overlay.opaque": b"y"})
    layer += block(b"xattr-dir/", b"5", mode=0o755)
    layer += pax({b"SCHILY.xattr.security.note": b"on a link"})
    layer += block(b"xattr-link", b"2", link=b"x", uid=12, mode=0o600)
    layer += pax({b"uid": b"4294967294", b"gid": b"4294967294"}) + block(b"last-owner")
    upper = (
        pax({b"SCHILY.xattr.user.e": b"2"})
        + block(b"xattr-dir/", b"5", mode=0o700)
        + block(b"capable", data=b"replaced without its capability", mode=0o755)
        + END
    )
    return [(layer + END, "gzip"), (upper, "zstd")]


def names(work: Path) -> Layers:
    """Names that are odd, long, doubled, unclean, or whose folders nobody mentions."""
    layer = b"".join(
        (
            block(b"/absolute", data=b"1"),
            block(b"./dot/./file", data=b"2"),
            block(b"dot//twice///file", data=b"3"),
            block(b"./slash/", b"5", mode=0o755),
            block(b"implied/by/a/file", data=b"4"),
            block(b"implied/late/file", data=b"5"),
            block(b"implied/late/", b"5", mode=0o700, uid=8),
            block(b"twice", data=b"first"),
            block(b"twice", data=b"second", mode=0o600),
            block(b"was-dir/", b"5"),
            block(b"was-dir/inside", data=b"gone"),
            block(b"was-dir", data=b"a file now"),
            block(b"was-file", data=b"gone"),
            block(b"was-file/", b"5", mode=0o750),
            block(b"was-file/inside", data=b"there"),
            block(b"was-link", b"2", link=b"slash"),
            block(b"was-link/", b"5", mode=0o755),
            block(b"was-link/inside", data=b"not in slash"),
            block(b"through", b"2", link=b"/slash/../slash"),
            block(b"through/it", data=b"in slash"),
            block(b" leading space", data=b"6"),
            block(b"back\\slash", data=b"7"),
            block(b"new\nline", data=b"8"),
            block(b"\xff\xfe\x01", data=b"9"),
            block(b"\xc3\xa4", data=b"NFC"),
            block(b"a\xcc\x88", data=b"NFD"),
            block(b"...", data=b"three dots"),
            block(b".whiteout", data=b"no whiteout"),
            block(b"wh.x", data=b"nor this"),
            block(b"dangling", b"2", link=b"/no/such/place"),
            block(b"self", b"2", link=b"self"),
            block(b"outside", b"2", link=b"../../../../etc/passwd"),
            pax({b"path": b"x" * 255}),
            block(b"x", data=b"255"),
            pax({b"path": b"/".join([b"y" * 255] * 12) + b"/end"}),
            block(b"y", data=b"a path of 3 KiB"),
            pax({b"linkpath": b"z" * 4095}),
            block(b"longest-target", b"2"),
        )
    )
    return [(layer + END, "gzip")]


def changes(work: Path) -> Layers:
    """Whiteouts, opaque folders, and one kind of name over another."""
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
    """Hard links: chains, to links, replaced, and what their own entries say."""
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
    """Hard links to what only lower layers have."""
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


def global_headers(work: Path) -> Layers:
    """What git archive and bsdtar may put first."""
    records = {b"comment": b"x", b"uid": b"77", b"mtime": b"5", b"SCHILY.xattr.user.g": b"1"}
    return [(pax(records, b"g") + block(b"file", data=b"1") + END, "gzip")]


def contested(work: Path) -> Layers:
    """On what follows, the peers differ among themselves, or from the specification."""
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
    """A layer that hides all below."""
    lower = block(b"old", data=b"1") + block(b"folder/old", data=b"2")
    return [(lower + END, "gzip"), (block(b".wh..wh..opq") + block(b"new") + END, "gzip")]


def random_stacks(work: Path) -> Layers:
    """Four layers of 200 small trees of few names, so that about everything collides."""
    tars = random_layers(seed=1, tree_count=200)
    return list(zip(tars, ("gzip", "zstd", "none", "members"), strict=True))


def many_files(work: Path) -> Layers:
    """3,000 files in a folder; some change, some go."""
    lower = block(b"many/", b"5", mode=0o755)
    lower += b"".join(block(b"many/%05d" % n, data=b"%d" % n) for n in range(3_000))
    upper = b"".join(block(b"many/%05d" % n, data=b"new") for n in range(0, 3_000, 150))
    upper += b"".join(block(b"many/.wh.%05d" % n) for n in range(1, 3_000, 150))
    return [(lower + END, "zstd"), (upper + END, "gzip")]


def many_layers(work: Path) -> Layers:
    """100 layers, some of them empty, that change one another."""
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


ZOO: Mapping[str, Callable[[Path], Layers]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        dialects,
        tools,
        attributes,
        names,
        changes,
        links,
        links_below,
        global_headers,
        contested,
        opaque_root,
        random_stacks,
        many_files,
        many_layers,
    )
}
