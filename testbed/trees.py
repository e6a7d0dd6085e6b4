"""Compares directories attribute by attribute, and makes a directory with every kind of entry."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any


def describe(top: Path) -> dict[str, dict[str, Any]]:
    """Return every attribute that a copy must preserve, for each path below `top`; "" is `top`."""
    found: dict[str, dict[str, Any]] = {"": _describe(top, top, {})}
    first_names: dict[tuple[int, int], str] = {}
    for directory, folders, files in sorted(os.walk(top)):
        for name in sorted((*folders, *files)):
            path = Path(directory, name)
            found[str(path.relative_to(top))] = _describe(path, top, first_names)
    return found


def _describe(path: Path, top: Path, first_names: dict[tuple[int, int], str]) -> dict[str, Any]:
    info = path.lstat()
    one: dict[str, Any] = {
        "mode": oct(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "mtime_ns": info.st_mtime_ns,
        "xattrs": {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in os.listxattr(path, follow_symlinks=False)
        },
    }
    if stat.S_ISREG(info.st_mode):
        one["size"] = info.st_size
        one["content"] = hashlib.sha256(path.read_bytes()).hexdigest()
    if stat.S_ISLNK(info.st_mode):
        one["target"] = os.readlink(path)
    if not stat.S_ISDIR(info.st_mode):
        name = str(path.relative_to(top))
        one["first_name"] = first_names.setdefault((info.st_dev, info.st_ino), name)
        one["links"] = info.st_nlink
    return one


def differences(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> list[str]:
    """Return the differences between two descriptions, one line each."""
    lines = []
    for path in sorted(one.keys() | other.keys()):
        if path not in one or path not in other:
            lines.append(f"{path}: only in the {'first' if path in one else 'second'}")
            continue
        lines += [
            f"{path}: {key}: {one[path].get(key)!r} != {other[path].get(key)!r}"
            for key in sorted(one[path].keys() | other[path].keys())
            if one[path].get(key) != other[path].get(key)
        ]
    return lines


def make_zoo(top: Path) -> None:
    """Make a folder with every kind of file, name and attribute that the running user can make."""
    top.mkdir(parents=True)
    (top / "empty").write_bytes(b"")
    (top / "small").write_bytes(b"hello\n")
    (top / "large").write_bytes(os.urandom(3_000_000) + bytes(2_000_000))
    (top / "sub/deeper/deepest").mkdir(parents=True)
    (top / "sub/deeper/file").write_text("x" * 1000)
    (top / "hard").hardlink_to(top / "small")
    (top / "sub/hard").hardlink_to(top / "small")
    (top / "link").symlink_to("sub/deeper")
    (top / "dangling").symlink_to("/nowhere/at/all")
    (top / "sub/up").symlink_to("../../../outside")
    (top / ("n" * 250)).write_text("long name")
    Path(os.fsdecode(bytes(os.fsencode(top)) + b"/not-utf8-\xff\xfe")).write_text("bytes")
    (top / "new\nline").write_text("odd")
    (top / "executable").write_text("#!/bin/sh\necho run\n")
    (top / "executable").chmod(0o755)
    (top / "read-only").write_text("r")
    (top / "read-only").chmod(0o444)
    with (top / "sparse").open("wb") as file:
        file.truncate(4_000_000)
        file.seek(2_000_000)
        file.write(b"in the middle")
    os.mkfifo(top / "fifo")
    (top / "sticky").mkdir()
    (top / "sticky").chmod(0o1777)
    try:
        os.setxattr(top / "small", "user.note", b"\x00binary\xff")
        os.setxattr(top / "sub", "user.note", b"directory")
    except OSError:
        pass  # a file system without them
    if os.geteuid() == 0:
        os.chown(top / "executable", 12345, 23456)
        (top / "executable").chmod(0o4755)
        os.chown(top / "link", 12345, 23456, follow_symlinks=False)
    for number, path in enumerate(sorted(top.rglob("*"))):
        when_ns = 1_600_000_000_123_456_789 + number * 1_000_000_001
        os.utime(path, ns=(when_ns, when_ns), follow_symlinks=False)
    (top / "sub/empty-dir").mkdir()
    (top / "sub/empty-dir").chmod(0o700)


def make_deep_folder(folder: Path, levels: int) -> None:
    """Make folders called `d` inside one another, deeper than the longest allowed path."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
