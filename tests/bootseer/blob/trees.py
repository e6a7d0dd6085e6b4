"""Directories to pack, and their state to compare as a dict."""

import io
import os
import stat
from pathlib import Path

from bootseer.blob.pack.packing import pack_directory
from bootseer.blob.read import ReadBlob
from bootseer.blob.tree import Tree


def reader_of(blob: bytes) -> ReadBlob:
    return lambda number, offset, length: blob[offset : offset + length]


def packed(root: Path, **options: object) -> tuple[Tree, bytes]:
    sink = io.BytesIO()
    tree = pack_directory(root, sink, **options)  # type: ignore[arg-type]
    return tree, sink.getvalue()


def state(root: Path) -> dict[bytes, object]:
    """Return the attributes and content that must survive, path by path."""
    found: dict[bytes, object] = {}
    inodes: dict[int, bytes] = {}
    base = os.fsencode(root)
    paths = [base]
    for directory, directories, files in os.walk(base):
        directories.sort()
        paths += [os.path.join(directory, name) for name in directories + sorted(files)]
    for path in sorted(paths):
        name = os.path.relpath(path, base)
        status = os.lstat(path)
        first = inodes.setdefault(status.st_ino, name)
        content: object = None
        if stat.S_ISREG(status.st_mode):
            content = Path(os.fsdecode(path)).read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        xattrs = [
            (n, os.getxattr(path, n, follow_symlinks=False))
            for n in sorted(os.listxattr(path, follow_symlinks=False))
        ]
        links = 0 if stat.S_ISDIR(status.st_mode) else status.st_nlink
        found[name] = (
            status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_rdev,
            links, first, content, xattrs,
        )  # fmt: skip
    return found


def can_set_xattrs(directory: Path) -> bool:
    try:
        os.setxattr(directory, "user.probe", b"x")
        os.removexattr(directory, "user.probe")
    except OSError:
        return False
    return True


def make_zoo(root: Path) -> None:
    """Make an entry of every kind; owners and devices only as root."""
    (root / "a/deep/er").mkdir(parents=True)
    (root / "a/file").write_bytes(b"content")
    (root / "a/deep/large").write_bytes(os.urandom(300_000) + bytes(400_000))
    (root / "a/deep/er/empty").touch()
    (root / "empty-directory").mkdir()
    os.link(root / "a/file", root / "a/second-name")
    os.link(root / "a/file", root / "zz-link")
    (root / "link").symlink_to("a/file")
    (root / "dangling").symlink_to("/" + "very-long-target/" * 20)
    os.symlink(b"\xff\xfe/" * 60, os.fsencode(root) + b"/dangling-not-utf-8")
    os.mkfifo(root / "fifo")
    for name in (
        b"n" * 100, b"n" * 101, b"n" * 255, b"\xff\xfe", b"\xff" * 150, "\u00e9".encode() * 100,
        b"new\nline", b" space ", b"back\\slash", b"-dash", b"*", b"a.b", b"a-b", b"\x01", b"~",
    ):  # fmt: skip
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(name)
        directory = Path(os.fsdecode(os.fsencode(root) + b"/d" + name[:200]))
        directory.mkdir()
        (directory / "x").write_bytes(b"x")
    os.link(os.fsencode(root) + b"/" + b"\xff" * 150, os.fsencode(root) + b"/" + b"\xff" * 151)
    with (root / "sparse").open("wb") as f:
        f.seek(5_000_000)
        f.write(b"x")
        f.truncate(9_000_000)
    with (root / "sparse-end").open("wb") as f:
        f.write(b"start")
        f.seek(1_000_000)
        f.write(b"end")
    with (root / "only-a-hole").open("wb") as f:
        f.truncate(3_000_000)
    (root / "a/file").chmod(0o4751)
    (root / "a/deep").chmod(0o2570)
    (root / "empty-directory").chmod(0o1777)
    if can_set_xattrs(root):
        os.setxattr(root / "a/file", "user.simple", b"value")
        os.setxattr(root / "a/file", "user.binary", bytes(range(256)))
        os.setxattr(root / "a/file", "user.a=b%c", b"")
        os.setxattr(root / "a", "user.on-directory", b"line\nbreak=")
    if not os.geteuid():
        os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(root / "disk", stat.S_IFBLK | 0o640, os.makedev(259, 1_000_000))
        os.chown(root / "a.b", 3_000_000_000, 2_500_000)
        os.chown(root / "a-b", 12, 34)
        os.lchown(root / "link", 56, 78)
    for changed, time_ns in (
        ("a/file", 1_234_567_890_123_456_789),
        ("a-b", -1),
        ("a.b", -1_500_000_000),
        ("~", 2**33 * 10**9 + 5),
        ("fifo", 999_999_999),
        ("a", 5_000_000_007),
        ("empty-directory", 0),
        ("link", 77),
    ):
        os.utime(root / changed, ns=(1, time_ns), follow_symlinks=False)
    os.utime(root, ns=(1, 1_000_000_000_000_000_001))
