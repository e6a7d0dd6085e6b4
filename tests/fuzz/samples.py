"""Valid documents to mutate."""

import io
import stat
import tarfile

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Frame, Inode, Tree
from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.trace import Access, Trace

INDEX = "sha256:" + "12" * 32
DIGEST = "sha256:" + "ab" * 32


def tree() -> Tree:
    """Return a tree with every kind of entry."""
    blobs = [
        Blob(DIGEST, 100,
             [Frame(0, 50, 0, 1000, b"f" * 32), Frame(50, 9, 1000, 7, b"g" * 32)],
             INDEX, 1007),
        Blob("sha256:" + "cd" * 32, 9, [], "sha256:" + "34" * 32, 9),
    ]  # fmt: skip
    inodes = [
        Inode(stat.S_IFDIR | 0o755),
        Inode(stat.S_IFDIR | 0o700, 1, 2, -5, xattrs=((b"user.a", b"\0"), (b"user.b", b""))),
        Inode(stat.S_IFREG | 0o644, 7, 0, 2**62, 5000, 0, b"", (),
              (Extent(0, 0, 0, 10), Extent(4990, 0, 990, 10)), b"d" * 32),
        Inode(stat.S_IFLNK | 0o777, size_bytes=3, link_target=b"a/b"),
        Inode(stat.S_IFCHR | 0o600, rdev=259),
    ]  # fmt: skip
    names = [(b"d", 1), (b"d/f", 2), (b"z", 2), (b"s", 3), (b"d/c", 4)]
    return build_tree(names, inodes, blobs)


def trace() -> Trace:
    files = (TracedFile(b"a", b""), TracedFile(b"\xff/\xc3\xa4", b"d" * 32))
    accesses = (Access(0, 0, 4096, 1), Access(1, 2**40, 32768, 2), Access(0, 4096, 1, 3))
    return Trace(INDEX, "train", "node", 5, "ready", 32768, files, accesses)


def tars() -> list[bytes]:
    """Return archives of all formats, with long names, extended headers, links and holes."""
    found = []
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as tar:
            for name, kind, link, content in (
                ("d", tarfile.DIRTYPE, "", b""),
                ("d/f", tarfile.REGTYPE, "", b"hello" * 200),
                ("l", tarfile.SYMTYPE, "d/f", b""),
                ("h", tarfile.LNKTYPE, "d/f", b""),
                ("d/.wh.x", tarfile.REGTYPE, "", b""),
                ("c", tarfile.CHRTYPE, "", b""),
                *(
                    (("n" * 120, tarfile.REGTYPE, "", b"x"),)
                    if form != tarfile.USTAR_FORMAT
                    else ()
                ),
            ):
                info = tarfile.TarInfo(name)
                info.type, info.linkname, info.size = kind, link, len(content)
                if form == tarfile.PAX_FORMAT and name == "d/f":
                    info.pax_headers = {"SCHILY.xattr.user.a": "b", "mtime": "1.5"}
                if form == tarfile.PAX_FORMAT and name == "n" * 120:
                    info.pax_headers = {"GNU.sparse.map": "5,1", "GNU.sparse.size": "9"}
                tar.addfile(info, io.BytesIO(content))
        found.append(out.getvalue())
    return found
