"""Use of checkpoints by programs through a real mount, on a local folder and on real HDFS."""

import os
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError
from bootseer.fuse.striped.tools.copy import copy_in, copy_out, open_storage
from testbed.mounts.fuse_mount import check_python
from tests.fuse.striped.support.mounting import BIG, MIB, checkpoints, settings_in, shell

pytestmark = pytest.mark.needs("fuse")


# Several stripe units, and a part of one.
SOME = 16 * MIB + 12_345


# ---- what programs do ---------------------------------------------------------------------


def test_the_usual_tools(here: Path, big: Path, tmp_path: Path) -> None:
    some = tmp_path / "some"
    some.write_bytes(big.read_bytes()[:SOME])
    shell("cp {b} {d}/cp; cmp {b} {d}/cp", b=some, d=here)
    shell("cat {b} > {d}/cat; cat {d}/cat | cmp - {b}", b=some, d=here)
    shell("dd if={b} of={d}/dd bs=3M conv=fsync status=none; cmp {b} {d}/dd", b=some, d=here)
    shell(
        "head -c 100000 {b} >> {d}/dd; cat {b} <(head -c 100000 {b}) | cmp - {d}/dd", b=some, d=here
    )
    shell("test $(sha256sum < {b} | cut -c-64) = $(sha256sum < {d}/cp | cut -c-64)", b=some, d=here)
    shell("truncate -s 0 {d}/cat; test ! -s {d}/cat; rm {d}/cat", d=here)
    assert shell("ls {d}", d=here).split() == ["cp", "dd"]


def test_trees_of_small_files(here: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    for index in range(4):
        (source / "deep" / f"{index}.json").write_text(str(index) * index)
    (source / "deep" / "er" / "Umlaut ä").write_bytes(os.urandom(5 * MIB))
    (source / "empty").touch()
    shell("cp -a {s} {d}/copy; diff -r {s} {d}/copy", s=source, d=here)
    shell("mv {d}/copy {d}/moved; diff -r {s} {d}/moved", s=source, d=here)
    shell(
        "tar c -C {s} . | (mkdir {d}/tar; tar x -C {d}/tar); diff -r {s} {d}/tar", s=source, d=here
    )
    # Files of more than a unit cannot move to another folder in one step, so mv copies.
    shell("mv {d}/tar/deep/er/Uml* {d}/up; cmp {d}/up {s}/deep/er/Uml*", s=source, d=here)
    shell('rm -r {d}/moved {d}/tar {d}/up; test -z "$(ls -A {d})"', d=here)


TIMES = """
import os, sys
mounted, stored = sys.argv[1:]
def same():
    assert os.stat(mounted + "/d").st_mtime_ns == os.stat(stored + "/d").st_mtime_ns
os.mkdir(mounted + "/d")
for name in "abab":
    files = [open(f"{mounted}/d/{name}{number}", "w") for number in range(3)]
    same()
    for file in files:
        print("x", file=file)
        same()
        file.close()
        same()
"""


def test_a_directory_shows_its_time_at_once(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    """Regression: tar reported that a directory just written changed during the read."""
    with checkpoints(tmp_path, mountpoint, local_url):
        check_python(TIMES, mountpoint, tmp_path / "stored")


SAVE = """
import os, sys, random
path, size = sys.argv[1], int(sys.argv[2])
numbers = random.Random(11)
data = random.Random(7).randbytes(size)
with open(path + ".tmp", "wb") as file:          # as torch.save: small and large writes, in order
    at = 0
    while at < size:
        step = numbers.choice([1, 30, 64, 4096, 100_000, 3_000_000, 9_000_000])
        at += file.write(data[at : at + step])
    file.flush()
    os.fsync(file.fileno())
os.replace(path + ".tmp", path)
"""

CHECK = """
import mmap, os, random, sys
path, size = sys.argv[1], int(sys.argv[2])
data = random.Random(7).randbytes(size)
assert os.stat(path).st_size == size
fd = os.open(path, os.O_RDONLY)
numbers = random.Random(13)
for _ in range(60):
    offset = numbers.randrange(size + 100)
    length = numbers.choice([1, 4096, 70_000, 2_000_000])
    assert os.pread(fd, length, offset) == data[offset : offset + length], (offset, length)
mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
for _ in range(60):
    offset = numbers.randrange(size)
    assert mapped[offset : offset + 5000] == data[offset : offset + 5000]
assert mapped[:] == data
"""


def test_a_save_and_its_loads(here: Path) -> None:
    check_python(SAVE, here / "model.pt", str(BIG))
    check_python(CHECK, here / "model.pt", str(BIG))


OLD_READERS = """
import mmap, os, random, sys
folder, how = sys.argv[1], sys.argv[2]
old, new = random.Random(1).randbytes(9_000_000), random.Random(2).randbytes(11_000_000)
path = folder + "/f"
open(path, "wb").write(old)
fd = os.open(path, os.O_RDONLY)
mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
assert mapped[:100] == old[:100] and os.pread(fd, 10, 5_000_000) == old[5_000_000:5_000_010]
if how == "rename":
    open(path + ".new", "wb").write(new)
    os.rename(path + ".new", path)
elif how == "truncate":
    open(path, "wb").write(new)
else:
    os.unlink(path)
    assert os.listdir(folder) == []
assert os.pread(fd, len(old) + 1, 0) == old
assert mapped[:] == old
assert os.fstat(fd).st_size == len(old)
if how != "unlink":
    assert open(path, "rb").read() == new
    assert os.stat(path).st_size == len(new)
    with open(path, "rb") as file:
        assert mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:] == new
"""


@pytest.mark.parametrize("how", ["rename", "truncate", "unlink"])
def test_readers_of_the_old_file_stay_whole(here: Path, how: str) -> None:
    check_python(OLD_READERS, here, how)


REFUSALS = """
import errno, os, sys
folder = sys.argv[1]
def refused(code, call):
    try:
        call()
    except OSError as error:
        assert error.errno == code, (error, code)
    else:
        raise AssertionError(f"not refused: {errno.errorcode[code]}")
# A refused write dooms the file: the old file stays, whatever else is written and closed.
with open(folder + "/good", "wb") as file:
    file.write(b"good" * 3_000_000)
fd = os.open(folder + "/good", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
os.write(fd, bytes(10_000_000))
refused(errno.EOPNOTSUPP, lambda: os.pwrite(fd, b"x", 0))
refused(errno.EOPNOTSUPP, lambda: os.write(fd, b"more"))
refused(errno.EOPNOTSUPP, lambda: os.fsync(fd))
refused(errno.EOPNOTSUPP, lambda: os.close(fd))
assert open(folder + "/good", "rb").read() == b"good" * 3_000_000
fd = os.open(folder + "/f", os.O_RDWR | os.O_CREAT)
os.write(fd, bytes(10_000_000))
os.pwrite(fd, b"end", 9_999_990)                  # what is not sent yet can be changed
refused(errno.EOPNOTSUPP, lambda: os.ftruncate(fd, 5))
refused(errno.EOPNOTSUPP, lambda: os.pread(fd, 10, 0))
os.fsync(fd)
assert os.pread(fd, 10, 9_999_989) == bytes(1) + b"end" + bytes(6)
os.close(fd)
refused(errno.EOPNOTSUPP, lambda: os.truncate(folder + "/f", 5))
refused(errno.EPERM, lambda: os.symlink("f", folder + "/s"))
refused(errno.EPERM, lambda: os.link(folder + "/f", folder + "/l"))
refused(errno.EPERM, lambda: os.mkfifo(folder + "/p"))
refused(errno.EPERM, lambda: os.mkdir(folder + "/.bootseer-parts"))
refused(errno.ENOENT, lambda: os.stat(folder + "/.bootseer-parts"))
os.mkdir(folder + "/d")
refused(errno.EXDEV, lambda: os.rename(folder + "/f", folder + "/d/f"))
refused(errno.EEXIST, lambda: os.mkdir(folder + "/d"))
refused(errno.EISDIR, lambda: os.rename(folder + "/f", folder + "/d"))
refused(errno.EEXIST, lambda: os.open(folder + "/f", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
open(folder + "/d/small", "w").close()
refused(errno.ENOTEMPTY, lambda: os.rmdir(folder + "/d"))
refused(errno.ENAMETOOLONG, lambda: os.stat(folder + "/" + "x" * 256))
os.chmod(folder + "/f", 0o600); os.utime(folder + "/f", (1, 1))   # accepted, not kept
assert os.statvfs(folder).f_bavail > 0
# A small file can be written in any order, read back and cut until it is closed.
fd = os.open(folder + "/small", os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"world", 6); os.pwrite(fd, b"hello ", 0)
assert os.pread(fd, 99, 0) == b"hello world"
os.ftruncate(fd, 5); os.close(fd)
assert open(folder + "/small").read() == "hello"
"""


def test_what_is_refused_and_with_which_errno(here: Path) -> None:
    check_python(REFUSALS, here)


LOCKS = """
import fcntl, os, subprocess, sys
file = open(sys.argv[1] + "/f", "w")
fcntl.flock(file, fcntl.LOCK_EX)
other = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
done = subprocess.run([sys.executable, "-c", other, file.name], capture_output=True, timeout=20)
assert b"BlockingIOError" in done.stderr, done.stderr
"""


def test_locks_hold_on_one_node(here: Path) -> None:
    check_python(LOCKS, here)


def test_copy_functions(tmp_path: Path, url: str, big: Path) -> None:
    seen: list[int] = []
    with open_storage(settings_in(tmp_path), url) as storage:
        assert copy_in(storage, big, "sub/big", on_progress=seen.append) == BIG
        assert copy_out(storage, "sub/big", tmp_path / "out", on_progress=seen.append) == BIG
        with pytest.raises(NotFoundError):
            copy_out(storage, "none", tmp_path / "none")
    assert sum(seen) == 2 * BIG
    assert (tmp_path / "out").read_bytes() == big.read_bytes()
