"""Errnos of refused calls through a real mount, as in docs/SEMANTICS.md, by pjdfstest's classes."""

import os
import re
import stat
from collections import defaultdict
from pathlib import Path

import pytest

from testbed.mounts.fuse_mount import check_python
from testbed.paths import REPOSITORY
from tests.fuse.striped.support.mounting import checkpoints, shell

pytestmark = pytest.mark.needs("fuse")


PREPARE = """
mkdir {d}/dir {d}/dir/sub {d}/full {d}/full/sub {d}/other
echo content > {d}/file; echo content > {d}/dir/file; head -c 5000000 /dev/zero > {d}/striped
"""

RUN = """
import ctypes, errno, os, socket, sys
os.chdir(sys.argv[1])
LONG = "x" * 256
DEEP = "/".join(["y" * 250] * 15 + ["z" * 200])
OVER = "/".join(["y" * 250] * 17)
W, R, C, X, T, A = os.O_WRONLY, os.O_RDONLY, os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND
libc = ctypes.CDLL(None, use_errno=True)

def libc_call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def bind(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path)

# Linux has one number for ENOTSUP and EOPNOTSUPP.
wrong = []
for line in sys.argv[2].strip().splitlines():
    if line.startswith("#"):
        continue
    wanted, _, call = line.strip().partition(" ")
    try:
        eval(call)
        found = "OK"
    except OSError as error:
        found = errno.errorcode[error.errno]
    if found != wanted:
        wrong.append(f"{call}: {found} instead of {wanted}")
assert not wrong, "\\n".join(wrong)
"""

# Grouped by the paragraphs of docs/SEMANTICS.md that promise them.
WRITABLE = """
# Errors have the errno that POSIX wants
EEXIST os.open("file", C | X | W)
EEXIST os.open("dir", C | X | W)
EISDIR os.open("dir", W)
EISDIR os.open("dir", os.O_RDWR)
EISDIR os.open("dir", C | W)
EISDIR os.open("dir", T | W)
ENOENT os.open("none", R)
ENOENT os.open("none/none", C | W)
ENOTDIR os.open("file/none", R)
ENOTDIR os.open("file/none", C | W)
ENOTDIR os.open("file", os.O_DIRECTORY)
ENOENT os.open(DEEP, C | W)
EEXIST os.mkdir("dir")
EEXIST os.mkdir("file")
ENOENT os.mkdir("none/dir")
ENOTDIR os.mkdir("file/dir")
ENOENT os.rmdir("none")
ENOTDIR os.rmdir("file")
ENOTDIR os.rmdir("file/none")
ENOTEMPTY os.rmdir("dir")
EINVAL os.rmdir("dir/.")
ENOTEMPTY os.rmdir("dir/sub/..")
EBUSY os.rmdir(sys.argv[1])
EISDIR os.unlink("dir")
ENOENT os.unlink("none")
ENOTDIR os.unlink("file/none")
ENOENT os.rename("none", "new")
ENOENT os.rename("file", "none/new")
ENOTDIR os.rename("file/none", "new")
ENOTDIR os.rename("file", "file/none/new")
ENOTDIR os.rename("dir", "file")
EISDIR os.rename("file", "dir")
ENOTEMPTY os.rename("dir", "full")
EINVAL os.rename("dir", "dir/sub/new")
EINVAL os.rename("dir", "dir/new")
EBUSY os.rename("dir/.", "new")
EXDEV os.rename("file", "/tmp/bootseer-elsewhere")
EEXIST libc_call("renameat2", -100, b"file", -100, b"striped", 1)
ENOENT os.truncate("none", 0)
EISDIR os.truncate("dir", 0)
ENOTDIR os.truncate("file/none", 0)
EINVAL os.truncate("file", -1)
ENOENT os.chmod("none", 0o600)
ENOTDIR os.chmod("file/none", 0o600)
ENOENT os.chown("none", 0, 0)
ENOENT os.utime("none")
ENOTDIR os.listdir("file")
EBADF os.write(os.open("file", R), b"x")
EBADF os.read(os.open("file", W), 1)
# Rename within a folder is atomic
EXDEV os.rename("striped", "dir/striped")
EINVAL libc_call("renameat2", -100, b"file", -100, b"striped", 2)
# `truncate` to nothing works
ENOTSUP os.truncate("striped", 10)
ENOTSUP os.truncate("file", 2**62)
ENOTSUP libc_call("fallocate", os.open("new", C | W), 0, 0, 100)
# Folders
EPERM os.mkdir(".bootseer-parts")
EPERM os.open(".bootseer-parts", C | W)
ENOENT os.listdir(".bootseer-parts")
# Symbolic links, hard links, devices, fifos and sockets
ENAMETOOLONG os.open(LONG, C | W)
ENAMETOOLONG os.open(OVER, C | W)
ENAMETOOLONG os.mkdir(LONG)
ENAMETOOLONG os.rmdir(LONG)
ENAMETOOLONG os.unlink(LONG)
ENAMETOOLONG os.rename("file", LONG)
ENAMETOOLONG os.rename(LONG, "new")
ENAMETOOLONG os.chmod(LONG, 0o600)
EPERM os.symlink("file", "link")
EPERM os.link("file", "link")
EPERM os.mkfifo("fifo")
EPERM os.mknod("node", 0o600 | 0o020000, 0)
EPERM bind("socket")
# Mode, owner and times cannot be set
OK os.chmod("file", 0o600)
OK os.chown("file", 7, 7)
OK os.utime("file")
ENOTSUP os.setxattr("file", "user.name", b"value")
ENOTSUP os.getxattr("file", "user.name")
"""

READ_ONLY = """
# Errors have the errno that POSIX wants
EROFS os.open("file", W)
EROFS os.open("new", C | W)
EROFS os.mkdir("new")
EROFS os.rmdir("dir")
EROFS os.unlink("file")
EROFS os.rename("file", "new")
EROFS os.truncate("file", 0)
EROFS os.chmod("file", 0o600)
EROFS os.chown("file", 0, 0)
EROFS os.utime("file")
EROFS os.symlink("file", "link")
EROFS os.link("file", "link")
EROFS os.mkfifo("fifo")
EEXIST os.mkdir("dir")
EROFS os.unlink("none")
OK open("file").read()
"""

SOMEBODY_ELSE = """
# Errors have the errno that POSIX wants
EACCES os.open("file", W)
EACCES os.open("new", C | W)
EACCES os.mkdir("new")
EACCES os.rmdir("full/sub")
EACCES os.unlink("file")
EACCES os.rename("file", "new")
EACCES os.truncate("file", 0)
EPERM os.chmod("file", 0o600)
EPERM os.chown("file", 1, 1)
OK open("file").read()
OK os.listdir("dir")
"""


def test_the_errno_of_each_refused_call(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    with checkpoints(tmp_path, mountpoint, local_url):
        shell(PREPARE, d=mountpoint)
        check_python(RUN, mountpoint, WRITABLE)
        # No refused call has changed anything.
        assert shell("cat {d}/file {d}/dir/file; stat -c %s {d}/striped", d=mountpoint) == (
            "content\ncontent\n5000000\n"
        )


def test_the_errnos_of_a_read_only_mount(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    stored = tmp_path / "stored"
    (stored / "dir").mkdir(parents=True)
    (stored / "file").write_text("content\n")
    with checkpoints(tmp_path, mountpoint, local_url, read_only=True):
        check_python(RUN, mountpoint, READ_ONLY)


@pytest.mark.needs("root", "mount")
def test_the_errnos_for_users_who_are_not_the_owner(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/") and not folder.stat().st_mode & stat.S_IXOTH:
            os.chmod(folder, 0o711)
    as_other = "os.setgroups([]); os.setgid(4321); os.setuid(4321)\nos.chdir("
    with checkpoints(tmp_path, mountpoint, local_url, allow_other=True):
        shell(PREPARE, d=mountpoint)
        check_python(RUN.replace("os.chdir(", as_other), mountpoint, SOMEBODY_ELSE)


def _paragraphs() -> dict[str, str]:
    """Return the paragraphs of docs/SEMANTICS.md by the bold text at their beginning."""
    text = (REPOSITORY / "docs" / "SEMANTICS.md").read_text(encoding="utf-8")
    starts = ((re.match(r"\*\*(.+?)\*\*", part, re.S), part) for part in text.split("\n\n"))
    return {match[1].replace("\n", " "): part for match, part in starts if match}


def test_the_errnos_are_the_documented_ones() -> None:
    """Each row belongs to a paragraph that names its test and errno, and no other is named."""
    shown: dict[str, set[str]] = defaultdict(set)
    tests: dict[str, set[str]] = defaultdict(set)
    for test, rows in (
        ("test_the_errno_of_each_refused_call", WRITABLE),
        ("test_the_errnos_of_a_read_only_mount", READ_ONLY),
        ("test_the_errnos_for_users_who_are_not_the_owner", SOMEBODY_ELSE),
    ):
        for line in rows.strip().splitlines():
            word, _, rest = line.partition(" ")
            if word == "#":
                title = rest
                tests[title].add(test)
            elif word != "OK":
                shown[title].add(word.replace("ENOTSUP", "EOPNOTSUPP"))
    paragraphs = _paragraphs()
    every_test = set().union(*tests.values())
    promised = {
        title: set(re.findall(r"`(test_\w+)`", text)) & every_test
        for title, text in paragraphs.items()
    }
    assert {
        title: named
        for title, named in promised.items()
        if named and not title.startswith("pjdfstest")
    } == tests
    for title, errnos in shown.items():
        assert set(re.findall(r"\bE[A-Z]{3,}\b", paragraphs[title])) == errnos, title


def test_each_known_difference_is_a_documented_one() -> None:
    """Each failing row of pjdfstest names the paragraphs that document it."""
    text = (REPOSITORY / "docs" / "SEMANTICS.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| its folder \|.*\n((?:\|.*\n)+)", text, re.M)
    titles = _paragraphs().keys()
    for row in table.splitlines()[1:]:
        *_, where = row.strip("| ").split(" | ")
        named = where.split("; ")
        assert set(named) <= titles, row
