"""Layers of `zoo` that are odd by themselves: dialects, tools, attributes and names."""

import os
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from testbed.images.building import Member, tar_of
from testbed.images.odd_tars import END, GNU, TIME, V7, block, gnu_long, pax, tool_tar

Layers: TypeAlias = Sequence[tuple[bytes, str]]
"""(uncompressed tar, compression as `building.compress` names it), the lowest layer first."""


FILE_CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
"""Value of security.capability: cap_net_bind_service=ep, as setcap writes it
(linux/capability.h)."""


def dialects(work: Path) -> Layers:
    """Return layers with headers in each dialect of tar."""
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
        # A file in spite of the slash: only formats older than ustar mean a directory by it.
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
    """Return layers with one tree, in each format that GNU tar, bsdtar and Python write."""
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
    """Return layers with modes, owners, times and extended attributes at their limits."""
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
    """Return a layer with odd, long, repeated and unclean names, and without some folders."""
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


def global_headers(work: Path) -> Layers:
    """Return a layer with a global header, as git archive and bsdtar may write."""
    records = {b"comment": b"x", b"uid": b"77", b"mtime": b"5", b"SCHILY.xattr.user.g": b"1"}
    return [(pax(records, b"g") + block(b"file", data=b"1") + END, "gzip")]
