"""Through a real mount: what programs do with checkpoints, on a local folder and on real HDFS."""

import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.config import Settings, load_config
from bootseer.errors import BootseerError, InvalidInputError, NotFoundError, UnsupportedError
from bootseer.fuse.striped.copy import copy_in, copy_out, open_storage
from bootseer.fuse.striped.graveyard import find_garbage
from bootseer.fuse.striped.mount import (
    MountedCheckpoints,
    mount_checkpoints,
    unmount_checkpoints,
)
from bootseer.store import open_backend
from bootseer.store.local import LocalBackend
from tests.fuse.striped.faulty import FaultyBackend, hanging
from tests.fuse.striped.harness import Driver, storage_on
from tests.support.fuse_mount import check_python, clear_mount, mounted, run

pytestmark = pytest.mark.fuse

MIB = 2**20
BIG = 70 * MIB + 12_345


def settings_in(folder: Path) -> Settings:
    environ = {
        "HOME": str(folder),
        "BOOTSEER_RUN_DIR": str(folder / "run"),
        "BOOTSEER_MEMORY": "128MiB",
        "BOOTSEER_DEADLINE": "20",
    }
    return load_config(environ=environ).settings


@contextlib.contextmanager
def checkpoints(
    folder: Path, mountpoint: Path, url: str, **options: object
) -> Iterator[MountedCheckpoints]:
    """Mounted, and unmounted in the end, whatever happens; the server never outlives this."""
    made = mount_checkpoints(settings_in(folder), url, mountpoint, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        with contextlib.suppress(BootseerError):
            made.close(2.0)
        clear_mount(mountpoint)
        with contextlib.suppress(ProcessLookupError):
            os.kill(made.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(made.pid, 0)


@pytest.fixture(params=["file", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "hdfs":
        return str(request.getfixturevalue("hdfs_url"))
    return (tmp_path / "stored").as_uri()


@pytest.fixture
def here(tmp_path: Path, mountpoint: Path, url: str) -> Iterator[Path]:
    """A mounted tree."""
    with checkpoints(tmp_path, mountpoint, url):
        yield mountpoint


def shell(command: str, **paths: Path) -> str:
    """Run a shell command that must succeed."""
    text = command.format(**{name: shlex.quote(str(path)) for name, path in paths.items()})
    done = run(["bash", "-euo", "pipefail", "-c", text])
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "big"
    path.write_bytes(random.Random(7).randbytes(BIG))
    return path


# ---- what programs do ---------------------------------------------------------------------


def test_the_usual_tools(here: Path, big: Path) -> None:
    shell("cp {b} {d}/cp; cmp {b} {d}/cp", b=big, d=here)
    shell("cat {b} > {d}/cat; cat {d}/cat | cmp - {b}", b=big, d=here)
    shell("dd if={b} of={d}/dd bs=3M conv=fsync status=none; cmp {b} {d}/dd", b=big, d=here)
    shell(
        "head -c 100000 {b} >> {d}/dd; cat {b} <(head -c 100000 {b}) | cmp - {d}/dd", b=big, d=here
    )
    shell("test $(sha256sum < {b} | cut -c-64) = $(sha256sum < {d}/cp | cut -c-64)", b=big, d=here)
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
    # Files of more than a unit cannot move to another folder in one step: mv copies.
    shell("mv {d}/tar/deep/er/Uml* {d}/up; cmp {d}/up {s}/deep/er/Uml*", s=source, d=here)
    shell('rm -r {d}/moved {d}/tar {d}/up; test -z "$(ls -A {d})"', d=here)


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
fd = os.open(folder + "/f", os.O_RDWR | os.O_CREAT)
os.write(fd, bytes(10_000_000))
refused(errno.EOPNOTSUPP, lambda: os.pwrite(fd, b"x", 0))
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
# A small file can be written in any order, read back, and cut, until it is closed.
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


# ---- the life of a mount ------------------------------------------------------------------

SLOW_WRITER = """
import os, sys, time
old = os.open(sys.argv[1] + "/old", os.O_WRONLY | os.O_TRUNC)
new = os.open(sys.argv[1] + "/new", os.O_WRONLY | os.O_CREAT)
for _ in range(10):
    os.write(old, bytes(2_000_000)); os.write(new, bytes(2_000_000))
print("written", flush=True)
time.sleep(60)
"""


def start_slow_writer(mountpoint: Path) -> "subprocess.Popen[bytes]":
    (mountpoint / "old").write_bytes(b"old" * 3_000_000)
    writer = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(mountpoint)], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    return writer


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(20)
    if process.stdout is not None:
        process.stdout.close()


def assert_only_the_old_file(tmp_path: Path, url: str) -> None:
    with open_storage(settings_in(tmp_path), url) as storage:
        assert [info.path for info in storage.tree.entries("")] == ["old"]
        copy_out(storage, "old", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"old" * 3_000_000


def test_kill_9_of_the_server_in_a_save(tmp_path: Path, mountpoint: Path, url: str) -> None:
    with checkpoints(tmp_path, mountpoint, url) as mount:
        writer = start_slow_writer(mountpoint)
        os.kill(mount.pid, signal.SIGKILL)
        os.waitpid(mount.pid, 0)
        assert run(["stat", mountpoint / "old"], deadline_s=20).returncode != 0
        end(writer)
        unmount_checkpoints(mount.run_dir, mountpoint, timeout_s=1.0)
    assert_only_the_old_file(tmp_path, url)
    with contextlib.closing(open_backend(url)) as backend:
        assert list(find_garbage(backend, ""))


def test_unmount_names_what_was_not_finished(tmp_path: Path, mountpoint: Path, url: str) -> None:
    with checkpoints(tmp_path, mountpoint, url) as mount:
        writer = start_slow_writer(mountpoint)
        command = [sys.executable, "-m", "bootseer", "--run-dir", str(mount.run_dir)]
        done = run([*command, "unmount", "--timeout", "1", str(mountpoint)], deadline_s=50)
        end(writer)
        assert done.returncode == 1
        assert "old was still being written" in done.stderr
        assert "new was still being written" in done.stderr
        again = run([*command, "unmount", str(mountpoint)])
        assert again.returncode == 2
        assert "nothing is mounted" in again.stderr
    assert_only_the_old_file(tmp_path, url)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_writer_that_is_killed_leaves_the_old_file(
    tmp_path: Path, mountpoint: Path, local_url: str, number: int
) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        writer = start_slow_writer(mountpoint)
        writer.send_signal(number)
        writer.wait(20)
        end(writer)
        shell("test $(stat -c %s {d}/old) = 9000000; test ! -e {d}/new", d=mountpoint)
        # A process that exits without closing its files has finished them.
        shell("sh -c 'head -c 9000000 /dev/zero; exit 3' > {d}/done || true", d=mountpoint)
        shell("test $(stat -c %s {d}/done) = 9000000; rm {d}/done", d=mountpoint)
        mount.close()
    assert_only_the_old_file(tmp_path, local_url)


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    return (tmp_path / "stored").as_uri()


def wait_until_gone(pid: int) -> None:
    for _ in range(300):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.05)
    raise AssertionError("the server does not end")


def test_sigterm_unmounts(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    with checkpoints(tmp_path, mountpoint, local_url) as mount:
        os.kill(mount.pid, signal.SIGTERM)
        wait_until_gone(mount.pid)
        assert not os.path.ismount(mountpoint)


def test_the_mount_ends_with_the_process_it_is_for(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    job = subprocess.Popen(["sleep", "60"])
    try:
        with checkpoints(tmp_path, mountpoint, local_url, lifetime_pid=job.pid) as mount:
            assert os.path.ismount(mountpoint)
            job.kill()
            wait_until_gone(mount.pid)
            assert not os.path.ismount(mountpoint)
    finally:
        job.kill()
        job.wait()


def test_read_only(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "f").write_bytes(b"content")
    with checkpoints(tmp_path, mountpoint, local_url, read_only=True):
        code = (
            "import errno, sys\n"
            "assert open(sys.argv[1] + '/f').read() == 'content'\n"
            "try: open(sys.argv[1] + '/g', 'w')\n"
            "except OSError as error: assert error.errno == errno.EROFS\n"
            "else: raise AssertionError\n"
        )
        check_python(code, mountpoint)


def test_warming_reads_the_newest_checkpoint(
    tmp_path: Path, mountpoint: Path, local_url: str, big: Path
) -> None:
    with open_storage(settings_in(tmp_path), local_url) as storage:
        copy_in(storage, big, "step-1/model")
        copy_in(storage, big, "step-2/model")
        storage.backend.create("latest").close()
    (tmp_path / "stored" / "latest").write_text("step-1\n")
    with checkpoints(tmp_path, mountpoint, local_url, warm=True) as mount:
        for _ in range(200):
            if "of the newest checkpoint ahead" in mount.log.read_text():
                break
            time.sleep(0.05)
        assert f"read {BIG} bytes of the newest checkpoint ahead" in mount.log.read_text()
        shell("cmp {b} {d}/step-1/model; cmp {b} {d}/step-2/model", b=big, d=mountpoint)


def test_a_mount_that_cannot_be_made_says_why(tmp_path: Path, mountpoint: Path) -> None:
    settings = settings_in(tmp_path)
    with pytest.raises(NotFoundError, match="absent"):
        mount_checkpoints(settings, (tmp_path / "absent").as_uri(), mountpoint, read_only=True)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="is a file"):
        mount_checkpoints(settings, str(tmp_path / "file"), mountpoint)
    with pytest.raises(InvalidInputError, match="stripe unit"):
        mount_checkpoints(settings, str(tmp_path), mountpoint, stripe_unit_bytes=100)
    with pytest.raises(NotFoundError):
        mount_checkpoints(settings, str(tmp_path / "stored"), tmp_path / "nowhere")
    assert not os.path.ismount(mountpoint)


def test_the_command_line(tmp_path: Path, mountpoint: Path) -> None:
    command = [sys.executable, "-m", "bootseer", "--run-dir", str(tmp_path / "run")]
    for name in ("mount", "unmount"):
        assert "Example:" in run([*command, name, "--help"]).stdout
    bad = run([*command, "mount", "--stripe-unit", "many", str(tmp_path / "s"), str(mountpoint)])
    assert bad.returncode == 2
    assert "not a size" in bad.stderr
    missing = run([*command, "mount", "--read-only", str(tmp_path / "absent"), str(mountpoint)])
    assert missing.returncode == 10
    done = run(
        [*command, "mount", "--json", "--stripe-unit", "1MiB", str(tmp_path / "s"), str(mountpoint)]
    )
    try:
        assert done.returncode == 0, done.stderr
        assert '"pid"' in done.stdout
        shell("echo hello > {d}/f; grep hello {d}/f", d=mountpoint)
        twice = run([*command, "mount", str(tmp_path / "s"), str(mountpoint)])
        assert twice.returncode == 19
    finally:
        ended = run([*command, "unmount", "--json", str(mountpoint)])
    assert ended.returncode == 0, ended.stderr
    assert '"unwritten": []' in ended.stdout
    assert (tmp_path / "s" / "f").read_text() == "hello\n"


# ---- a storage that hangs -----------------------------------------------------------------


def test_a_hung_storage_ends_in_an_error_and_its_readers_can_be_killed(
    tmp_path: Path, mountpoint: Path
) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "f").write_bytes(bytes(20 * MIB))
    released = threading.Event()
    backend = FaultyBackend(LocalBackend(stored))
    driver = Driver(storage_on(backend, unit=MIB, deadline_s=3.0))
    try:
        with mounted(driver.fs, mountpoint):
            backend.rules.append(hanging("read", released))
            code = (
                "import errno, sys\n"
                "try: open(sys.argv[1] + '/f', 'rb').read()\n"
                "except OSError as error: assert error.errno == errno.ETIMEDOUT, error\n"
                "else: raise AssertionError\n"
            )
            check_python(code, mountpoint, deadline_s=30)
            reader = subprocess.Popen(["cat", str(mountpoint / "f")], stdout=subprocess.DEVNULL)
            time.sleep(0.3)
            reader.kill()
            # Not by the deadline: the kernel's INTERRUPT ends the wait.
            assert reader.wait(20) == -signal.SIGKILL
            released.set()
    finally:
        released.set()
        driver.storage.close()


# ---- servers that die under it ------------------------------------------------------------


@pytest.mark.hdfs
def test_a_datanode_that_dies_under_a_reader(
    request: pytest.FixtureRequest, tmp_path: Path, mountpoint: Path, big: Path
) -> None:
    hdfs_url = str(request.getfixturevalue("hdfs_url")) + "?replication=2"
    cluster = request.getfixturevalue("hdfs")
    with checkpoints(tmp_path, mountpoint, hdfs_url):
        shell("cp {b} {d}/f", b=big, d=mountpoint)
    with checkpoints(tmp_path, mountpoint, hdfs_url):
        code = (
            "import os, sys\n"
            "file = open(sys.argv[1] + '/f', 'rb', buffering=0)\n"
            "data = file.read(1 << 20)\n"
            "print('started', flush=True); sys.stdin.readline()\n"
            "while piece := file.read(1 << 20): data += piece\n"
            "assert data == open(sys.argv[2], 'rb').read()\n"
        )
        reader = subprocess.Popen(
            [sys.executable, "-c", code, str(mountpoint), str(big)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"started\n"
            cluster.kill_datanode(0)
            reader.communicate(b"\n", timeout=60)
            assert reader.returncode == 0
        finally:
            end(reader)
            cluster.start_datanode(0)
            cluster.wait_for_datanodes(cluster.datanode_count)


def test_a_backend_without_append_is_not_asked_to(tmp_path: Path) -> None:
    """A large ordinary file cannot be appended to; the refusal names the reason."""
    driver = Driver(storage_on(tmp_path))
    (tmp_path / "plain").write_bytes(bytes(100_000))
    file = driver.open("plain", os.O_WRONLY | os.O_APPEND)
    with pytest.raises(UnsupportedError, match="not appended"):
        driver.pwrite(file, 100_000, b"x")
    driver.close(file)
    driver.storage.close()
