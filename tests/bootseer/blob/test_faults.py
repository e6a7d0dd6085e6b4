"""Faults of real machines: changing, vanishing or unreadable files, kills, large holes."""

import contextlib
import io
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blob import index
from bootseer.blob.extract.extraction import extract
from bootseer.blob.pack.packing import pack_directory
from bootseer.blob.read import BlobReader, verify
from bootseer.errors import BusyError
from testbed.needs import MissingError
from testbed.users import folder_for_all_users
from testbed.waiting import wait_for
from tests.bootseer.blob.trees import packed, reader_of, state

NOBODY = 65534


class Meddling(io.BytesIO):
    """Sink that changes the source at the first write."""

    def __init__(self, meddle: object) -> None:
        super().__init__()
        self.meddle = meddle

    def write(self, data: object) -> int:
        if callable(self.meddle):
            self.meddle()
            self.meddle = None
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite"])
def test_a_large_file_that_changes_while_being_packed(tmp_path: Path, change: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(os.urandom(40_000_000))

    def meddle() -> None:
        if change == "shrink":
            os.truncate(victim, 30_000_000)
        else:
            with victim.open("ab" if change == "grow" else "r+b") as f:
                f.write(b"x")

    with pytest.raises(BusyError, match=r"victim.*changed"):
        pack_directory(tmp_path, Meddling(meddle), threads=1)


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(20_000_000))
    (tmp_path / "b").write_bytes(b"gone soon")
    with pytest.raises(BusyError, match="b changed"):
        pack_directory(tmp_path, Meddling((tmp_path / "b").unlink), threads=1)


def test_sockets_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x").touch()
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "s"))
        tree, _ = packed(tmp_path)
    assert [path for path, _ in tree.walk()] == [b"", b"x"]
    assert "socket s" in caplog.text


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_for_all_users() as folder:
        yield folder


def as_nobody(code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    if os.geteuid():
        raise MissingError("changing the user needs root")
    # The interpreter of a virtual environment may not be readable for others: fork instead.
    script = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    imports = (
        "import io, sys; from pathlib import Path\n"
        "from bootseer.blob.pack.packing import pack_directory\n"
        "from bootseer.blob.extract.extraction import extract\n"
        "from bootseer.blob.index import decode\n"
        "import bootseer.errors, bootseer.blob.read, encodings.idna, concurrent.futures.thread\n"
    )
    return subprocess.run(
        [sys.executable, "-c", imports + script + textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "in/d").mkdir(parents=True)
    (tmp_path / "in/d/secret").write_bytes(b"x")
    (tmp_path / "in/d/secret").chmod(0o600)
    code = """
        try:
            pack_directory(sys.argv[1], io.BytesIO())
        except bootseer.errors.PermissionDeniedError as error:
            print(error)
    """
    done = as_nobody(code, tmp_path / "in")
    assert "in/d/secret" in done.stdout, done.stderr
    (tmp_path / "in/d").chmod(0o700)
    done = as_nobody(code, tmp_path / "in")
    assert "in/d" in done.stdout, done.stderr


def test_extraction_without_privileges(tmp_path: Path) -> None:
    (tmp_path / "in/read-only").mkdir(parents=True)
    (tmp_path / "in/read-only/file").write_bytes(b"content")
    (tmp_path / "in/set-id").write_bytes(b"program")
    (tmp_path / "in/set-id").chmod(0o6755)
    (tmp_path / "in/read-only/file").chmod(0o444)
    (tmp_path / "in/read-only").chmod(0o555)
    tree, blob = packed(tmp_path / "in")
    (tmp_path / "blob").write_bytes(blob)
    (tmp_path / "index").write_bytes(index.encode(tree))
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    code = """
        base = Path(sys.argv[1])
        blob = (base / "blob").read_bytes()
        tree = decode((base / "index").read_bytes())
        read = lambda number, offset, length: blob[offset : offset + length]
        extract(tree, read, base / "open/out")
        def broken(number, offset, length):
            raise OSError(5, "broken")
        try:
            extract(tree, broken, base / "open/broken")
        except bootseer.errors.BootseerError as error:
            print(error)
    """
    done = as_nobody(code, tmp_path)
    assert "set-user-ID and set-group-ID bits are left out" in done.stderr
    assert "broken" in done.stdout, done.stderr
    assert os.listdir(tmp_path / "open") == ["out"]
    status = (tmp_path / "open/out/set-id").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o755, NOBODY)
    assert stat.S_IMODE((tmp_path / "open/out/read-only").stat().st_mode) == 0o555


def is_session_alive(session: int) -> bool:
    """Return whether a process of the session runs.

    A process that nobody waits for may stay as a zombie, which does not count.
    """
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                return True
    return False


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_extraction_leaves_no_target_and_the_next_one_sweeps(
    tmp_path: Path, processes: int
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for number in range(300):
        (source / f"{number:03d}").write_bytes(os.urandom(3000))
    tree, blob = packed(source)
    (tmp_path / "blob").write_bytes(blob)
    (tmp_path / "index").write_bytes(index.encode(tree))
    code = """
        import sys, time
        from pathlib import Path
        from bootseer.blob.extract.extraction import extract
        from bootseer.blob.index import decode
        base = Path(sys.argv[1])
        blob = (base / "blob").read_bytes()
        def read(number, offset, length):
            if offset:
                print("half way", flush=True)
                time.sleep(60)
            return blob[offset : offset + length]
        tree = decode((base / "index").read_bytes())
        extract(tree, read, base / "targets/out", processes=int(sys.argv[2]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), str(processes)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"half way\n"
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
    # Its processes end by themselves, and until then they write, and hold the folder's lock.
    wait_for(lambda: not is_session_alive(child.pid), "their end", interval_s=0.01)
    (left,) = (tmp_path / "targets").iterdir()
    assert left.name.startswith(".out.extracting-")
    # Young leftovers stay: they could belong to an extraction that is just starting.
    extract(tree, reader_of(blob), tmp_path / "targets/out")
    assert left.exists()
    assert state(tmp_path / "targets/out") == state(source)
    subprocess.run(["rm", "-r", tmp_path / "targets/out"], check=True, timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bootseer.blob.extract.extraction.ABANDONED_AFTER_S", -1.0)
        extract(tree, reader_of(blob), tmp_path / "targets/out")
    assert [path.name for path in (tmp_path / "targets").iterdir()] == ["out"]


def test_more_than_eight_gibibytes_of_holes(tmp_path: Path) -> None:
    size = 9 * 1024**3 + 5
    root = tmp_path / "in"
    root.mkdir()
    with (root / "huge").open("wb") as f:
        f.write(b"start")
        f.seek(size - 3)
        f.write(b"end")
    if (root / "huge").stat().st_blocks > 1000:
        raise MissingError("this file system keeps no holes")
    tree, blob = packed(root)
    assert len(blob) < 10_000
    number = tree.resolve(b"huge")
    assert number is not None
    inode = tree.inode(number)
    assert (inode.size_bytes, inode.digest) == (size, None)
    verify(tree, reader_of(blob))
    reader = BlobReader(tree, reader_of(blob))
    assert reader.read(number, size - 5, 100) == b"\0\0end"
    assert reader.read(number, 0, 7) == b"start\0\0"
    extract(tree, reader_of(blob), tmp_path / "out")
    (tmp_path / "tar").mkdir()
    (tmp_path / "blob").write_bytes(blob)
    subprocess.run(
        ["tar", "--use-compress-program=zstd", "-xf", "../blob"],
        cwd=tmp_path / "tar",
        check=True,
        timeout=60,
    )
    for name in ("out", "tar"):
        status = (tmp_path / name / "huge").stat()
        assert status.st_size == size
        assert status.st_blocks < 1000
        with (tmp_path / name / "huge").open("rb") as f:
            assert f.read(7) == b"start\0\0"
            f.seek(size - 5)
            assert f.read() == b"\0\0end"
