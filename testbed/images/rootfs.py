"""Root file systems of images for tests, and trees with every kind of entry.

`python_root` is a small real root: the running interpreter, some of its standard library, and a
shell. `odd_tree` has every kind of name and attribute. `tree_of` returns the attributes and content
of each path, for comparisons.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from bootseer.demo.image import build_base, shared_libraries

# Most of the standard library is removed: each test that starts an image on a fresh node reads all
# of it.
_UNUSED = (
    *("**/asyncio", "**/concurrent", "**/curses", "**/distutils", "**/ensurepip", "**/lib2to3"),
    *("**/multiprocessing", "**/pydoc_data", "**/sqlite3", "**/tkinter", "**/turtledemo"),
    *("**/unittest", "**/xml", "**/xmlrpc"),
)
# Extension modules that small programs import.
_USED = re.compile(
    "array|binascii|fcntl|grp|math|mmap|resource|select|zlib|"
    "_(bisect|blake2|contextvars|ctypes|datetime|decimal|heapq|json|md5|opcode|pickle|posixsubprocess|"
    "random|sha.*|socket|statistics|struct|typing)"
)


def python_root(root: Path) -> Path:
    """Make a small root file system in which `python3` runs small programs."""
    root.mkdir(parents=True, exist_ok=True)
    build_base(root)
    for path in [path for pattern in _UNUSED for path in root.glob(pattern)]:
        shutil.rmtree(path)
    modules = []
    for path in root.rglob("lib-dynload/*.so"):
        if _USED.fullmatch(path.name.partition(".")[0]):
            modules.append(path)
        else:
            path.unlink()
    interpreter = root / Path(sys.executable).resolve().relative_to("/")
    binaries = [*modules, interpreter, *root.glob("usr/bin/*"), *root.glob("bin/*")]
    needed = {root / path.relative_to("/") for path in shared_libraries(binaries)}
    libraries = set(root.rglob("*.so*")).difference(modules)
    for path in libraries - needed:
        path.unlink()
    # Debug symbols can be several times as large as the rest of a file.
    if shutil.which("strip"):
        files = [*modules, *(libraries & needed), interpreter]
        subprocess.run(["strip", "--strip-unneeded", *files], check=True, timeout=60)
    return root


def odd_tree(root: Path) -> Path:
    """Make a tree with names, kinds and attributes that file systems often get wrong."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "empty").touch()
    (root / "empty-dir").mkdir(mode=0o711)
    (root / "deep/er/and/deeper").mkdir(parents=True)
    (root / "deep/er/file").write_bytes(os.urandom(300_001))
    (root / "many").mkdir()
    for i in range(3000):
        (root / "many" / f"name-{i:05}").write_bytes(b"%d" % i)
    os.link(root / "deep/er/file", root / "hard-link")
    (root / "link").symlink_to("deep/er/file")
    (root / "dangling").symlink_to("/no/such/" + "x" * 200)
    (root / "long-\u00e4-name-" / ("y" * 200)).mkdir(parents=True)
    Path(os.fsdecode(os.fsencode(root) + b"/not-utf8-\xff\xfe")).write_bytes(b"?")
    with (root / "sparse").open("wb") as file:
        file.seek(1_000_000)
        file.write(b"middle")
        file.truncate(3_000_000)
    (root / "script").write_text("#!/bin/sh\necho hi\n")
    (root / "script").chmod(0o4755)
    os.mkfifo(root / "fifo", 0o622)
    for path in (root / "empty", root / "deep/er", root):
        os.utime(path, ns=(1_500_000_000_123_456_789, 1_400_000_000_987_654_321))
    if os.geteuid() == 0:
        os.chown(root / "deep/er/file", 1234, 4321)
        os.lchown(root / "link", 77, 78)
        os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.setxattr(root / "deep", "trusted.example", b"root only")
    os.setxattr(root / "script", "user.comment", b"\0binary\xff")
    return root


def _xattr_names(path: bytes) -> list[str]:
    try:
        return sorted(os.listxattr(path, follow_symlinks=False))
    except OSError as error:
        # A mounted image without attributes reports ENOTSUP once, and is not asked again.
        if error.errno == errno.ENOTSUP:
            return []
        raise


def tree_of(root: Path) -> dict[bytes, tuple[object, ...]]:
    """Return the attributes and content of each path below `root`.

    The values are (mode, owner, links, size, mtime, device, link target, xattrs, content digest,
    first name of the inode).
    """
    found: dict[bytes, tuple[object, ...]] = {}
    first_names: dict[int, bytes] = {}
    top = os.fsencode(root)
    pending = [b""]
    while pending:
        path = pending.pop()
        full = top + b"/" + path if path else top
        try:
            status = os.lstat(full)
        except FileNotFoundError:
            # Overlayfs lists the whiteouts of a directory that it merges with no other.
            continue
        mode = status.st_mode
        target = os.readlink(full) if stat.S_ISLNK(mode) else b""
        content = ""
        if stat.S_ISREG(mode):
            with Path(os.fsdecode(full)).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        xattrs = tuple(
            (name, os.getxattr(full, name, follow_symlinks=False)) for name in _xattr_names(full)
        )
        is_dir = stat.S_ISDIR(mode)
        found[path] = (
            mode,
            (status.st_uid, status.st_gid),
            status.st_nlink,
            0 if is_dir else status.st_size,
            status.st_mtime_ns,
            status.st_rdev,
            target,
            xattrs,
            content,
            first_names.setdefault(status.st_ino, path),
        )
        if is_dir:
            names = sorted(os.listdir(full), reverse=True)
            pending += [path + b"/" + name if path else name for name in names]
    return found
