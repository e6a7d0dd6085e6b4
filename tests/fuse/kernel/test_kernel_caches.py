"""The kernel's caches: lookups and forgets, passthrough, negative entries, notifications."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.fuse.kernel.operations import (
    ROOT_NODE,
    Attributes,
    Buffer,
    Caller,
    NodeEntry,
    Opened,
    Operations,
)
from bootseer.fuse.kernel.server import FuseServer
from testbed.mounts import fuse_mount
from testbed.mounts.passthrough_fs import PassthroughFileSystem
from testbed.needs import MissingError
from testbed.waiting import wait_for

pytestmark = pytest.mark.needs("fuse")

_DEADLINE_S = 30.0
_LONG_S = 3600.0


class CountingMirror(PassthroughFileSystem):
    """Mirror that counts the requests that reach the server."""

    def __init__(self, root: Path, **named: bool | float) -> None:
        super().__init__(root, **named)  # type: ignore[arg-type]
        self.lookups: list[bytes] = []
        self.nodes: dict[bytes, int] = {}
        self.reads = 0

    def lookup(self, caller: Caller, parent: int, name: bytes) -> NodeEntry:
        self.lookups.append(name)
        entry = super().lookup(caller, parent, name)
        if entry.attributes is not None:
            self.nodes[name] = entry.attributes.node
        return entry

    def read(self, caller: Caller, node: int, handle: int, offset: int, length: int) -> Buffer:
        self.reads += 1
        data = super().read(caller, node, handle, offset, length)
        assert isinstance(data, bytes)
        return data


def _read(path: Path) -> str:
    return fuse_mount.check_python("import sys; sys.stdout.write(open(sys.argv[1]).read())", path)


def _exists(path: Path) -> bool:
    code = "import os, sys; sys.stdout.write(str(os.path.lexists(sys.argv[1])))"
    return fuse_mount.check_python(code, path) == "True"


# ---- lookups --------------------------------------------------------------------------------


@pytest.mark.needs("mount", "fuse")
def test_forgotten_nodes_are_dropped_and_come_back(backing: Path, mountpoint: Path) -> None:
    (backing / "d").mkdir()
    for number in range(200):
        (backing / "d" / str(number)).write_text(str(number))
    file_system = PassthroughFileSystem(backing, ttl_s=_LONG_S)
    listing = "import os, sys; print(sum(e.stat().st_size > 0 for e in os.scandir(sys.argv[1])))"
    with fuse_mount.mounted(file_system, mountpoint):
        for _ in range(2):
            assert fuse_mount.check_python(listing, mountpoint / "d") == "200\n"
            assert file_system.node_count == 202
            # 2: drops dentries and inodes of the whole machine, never dirty data.
            Path("/proc/sys/vm/drop_caches").write_text("2")
            wait_for(lambda: file_system.node_count == 1)


def test_negative_entries_are_remembered(backing: Path, mountpoint: Path) -> None:
    file_system = CountingMirror(backing, ttl_s=_LONG_S)
    with fuse_mount.mounted(file_system, mountpoint):
        for _ in range(3):
            assert not _exists(mountpoint / "new")
        assert file_system.lookups.count(b"new") == 1
        (backing / "new").write_text("x")
        assert not _exists(mountpoint / "new")


# ---- notifications about contents -------------------------------------------------------------


def test_pages_stay_until_invalidated(backing: Path, mountpoint: Path) -> None:
    (backing / "file").write_text("old")
    file_system = CountingMirror(backing, ttl_s=_LONG_S)
    options = fuse_mount.short_options(invalidate_on_change=False)
    with fuse_mount.mounted(file_system, mountpoint, options) as server:
        assert _read(mountpoint / "file") == "old"
        (backing / "file").write_text("new")
        assert _read(mountpoint / "file") == "old"
        assert file_system.reads == 1
        assert server.notify_inval_inode(file_system.nodes[b"file"])
        assert _read(mountpoint / "file") == "new"
        assert not server.notify_inval_inode(99)


def test_stored_pages_are_read_without_asking(backing: Path, mountpoint: Path) -> None:
    (backing / "file").write_bytes(b"a" * 8192)
    file_system = CountingMirror(backing, ttl_s=_LONG_S)
    with fuse_mount.mounted(file_system, mountpoint) as server:
        assert _exists(mountpoint / "file")
        assert server.notify_store(file_system.nodes[b"file"], 0, b"b" * 8192)
        assert _read(mountpoint / "file") == "b" * 8192
        assert file_system.reads == 0
        assert not server.notify_store(99, 0, b"x")


# ---- passthrough ----------------------------------------------------------------------------


def _backing_counts(server: FuseServer) -> list[tuple[int, int]]:
    """Return the backing id and the number of opens of each open file."""
    table = server.attached.backing_table
    assert table is not None
    rows = struct.iter_unpack("=QII", table[: 16 * 64])
    return [(backing_id, opens) for node, backing_id, opens in rows if node]


def _passthrough(server: FuseServer) -> None:
    if not server.attached.connection.passthrough:
        raise MissingError("this kernel has no FUSE passthrough (Linux 6.9 does)")


@pytest.mark.needs("mount", "fuse")
def test_passthrough_reads_never_ask_us(backing: Path, mountpoint: Path) -> None:
    (backing / "file").write_text("hello")
    file_system = CountingMirror(backing, passthrough=True)
    options = fuse_mount.short_options(passthrough=True)
    with fuse_mount.mounted(file_system, mountpoint, options) as server:
        _passthrough(server)
        holder = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; files = [open(sys.argv[1]) for _ in range(3)]; "
                "print(*[f.read() for f in files], flush=True); sys.stdin.read(1)",
                mountpoint / "file",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "hello hello hello\n"
        assert file_system.reads == 0
        ((backing_id, opens),) = _backing_counts(server)
        assert (backing_id > 0, opens) == (True, 3)
        holder.communicate("x", timeout=_DEADLINE_S)
        wait_for(lambda: _backing_counts(server) == [])
        # Writes and new files, too: the bytes are in the file behind the mount.
        code = "import sys; f = open(sys.argv[1], 'w'); f.write('written'); f.close()"
        fuse_mount.check_python(code, mountpoint / "new")
        assert (backing / "new").read_text() == "written"
        assert _read(mountpoint / "new") == "written"
        wait_for(lambda: _backing_counts(server) == [])


class Moody(CountingMirror):
    """Mirror that offers passthrough for every second open only."""

    opens = 0

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        self.opens += 1
        self.passthrough = self.opens % 2 == self.first
        return super().open(caller, node, flags)

    first = 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.needs("mount", "fuse")
def test_all_opens_of_a_node_share_the_first_ones_mode(
    backing: Path, mountpoint: Path, first: int
) -> None:
    (backing / "file").write_text("hello")
    file_system = Moody(backing)
    file_system.first = first
    options = fuse_mount.short_options(passthrough=True)
    with fuse_mount.mounted(file_system, mountpoint, options) as server:
        _passthrough(server)
        code = (
            "import sys; f = [open(sys.argv[1]) for _ in range(4)]; print(*[x.read() for x in f])"
        )
        assert fuse_mount.check_python(code, mountpoint / "file") == "hello " * 3 + "hello\n"
        assert (file_system.reads > 0) is (first == 0)
        wait_for(lambda: _backing_counts(server) == [])


class Refused(CountingMirror):
    """Mirror that offers a directory for passthrough, which the kernel refuses."""

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        opened = super().open(caller, node, flags)
        return Opened(handle=opened.handle, passthrough_fd=self._fds[ROOT_NODE])


@pytest.mark.needs("mount", "fuse")
def test_refused_passthrough_falls_back_and_says_so_once(
    backing: Path, mountpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        (backing / name).write_text(name)
    options = fuse_mount.short_options(passthrough=True)
    caplog.set_level("INFO")
    with fuse_mount.mounted(Refused(backing), mountpoint, options) as server:
        _passthrough(server)
        assert [_read(mountpoint / name) for name in ("one", "two")] == ["one", "two"]
    assert caplog.text.count("not passed through") == 1


# ---- what ENOSYS switches off -----------------------------------------------------------------


class NoOpen(Operations):
    """File system of one file, without open, flush and xattrs."""

    asked: list[str]

    def __init__(self) -> None:
        self.asked = []

    def lookup(self, caller: Caller, parent: int, name: bytes) -> NodeEntry:
        if name != b"file":
            return NodeEntry(None, _LONG_S)
        return NodeEntry(Attributes(2, 0o100644, 5), _LONG_S, _LONG_S)

    def getattr(self, caller: Caller, node: int, handle: int | None) -> tuple[Attributes, float]:
        mode = 0o040755 if node == ROOT_NODE else 0o100644
        return Attributes(node, mode, 5), _LONG_S

    def open(self, caller: Caller, node: int, flags: int) -> Opened:
        self.asked.append("open")
        return super().open(caller, node, flags)

    def flush(self, caller: Caller, node: int, handle: int) -> None:
        self.asked.append("flush")
        super().flush(caller, node, handle)

    def getxattr(self, caller: Caller, node: int, name: bytes) -> bytes:
        self.asked.append("getxattr")
        return super().getxattr(caller, node, name)

    def read(self, caller: Caller, node: int, handle: int, offset: int, length: int) -> Buffer:
        self.asked.append("read")
        return b"hello"[offset : offset + length]


def test_what_is_not_implemented_is_asked_once(mountpoint: Path) -> None:
    file_system = NoOpen()
    with fuse_mount.mounted(file_system, mountpoint):
        for _ in range(3):
            assert _read(mountpoint / "file") == "hello"
            code = "import os, sys\ntry: os.getxattr(sys.argv[1], 'user.x')\nexcept OSError: pass"
            fuse_mount.check_python(code, mountpoint / "file")
    asked = file_system.asked
    assert asked.count("open") == 1
    assert asked.count("getxattr") == 1
    assert asked.count("flush") <= 1
    assert asked.count("read") == 1, "pages are kept between opens"


class Scattered(NoOpen):
    """Mirror that answers reads in many small buffers."""

    def read(  # type: ignore[override]
        self, caller: Caller, node: int, handle: int, offset: int, length: int
    ) -> list[Buffer]:
        letters: list[Buffer] = [memoryview(bytes([letter])) for letter in b"hello"[offset:]]
        return letters + [b""] * 2000


_REFUSED = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def fallocate(path):
    fd = os.open(path, os.O_RDWR)
    if libc.fallocate64(fd, 0, ctypes.c_int64(0), ctypes.c_int64(9)):
        raise OSError(ctypes.get_errno(), "fallocate")
os.chdir(sys.argv[1])
for call in (
    lambda: os.symlink("file", "new"),
    lambda: os.link("file", "new"),
    lambda: os.mkfifo("new"),
    lambda: os.setxattr("file", "user.x", b"y"),
    lambda: os.removexattr("file", "user.x"),
    lambda: fallocate("file"),
):
    try:
        call()
        print("done")
    except OSError as error:
        print(errno.errorcode[error.errno])
print(os.access("file", os.W_OK))
"""


def test_what_no_file_system_of_ours_can_do_is_refused_by_its_errno(mountpoint: Path) -> None:
    options = fuse_mount.short_options(default_permissions=False)
    with fuse_mount.mounted(NoOpen(), mountpoint, options):
        said = fuse_mount.check_python(_REFUSED, mountpoint).split()
    assert said == [*["EPERM"] * 3, *["ENOTSUP"] * 3, "True"]


def test_replies_of_many_buffers_arrive_whole(mountpoint: Path) -> None:
    with fuse_mount.mounted(Scattered(), mountpoint):
        assert _read(mountpoint / "file") == "hello"


def test_a_small_readahead_needs_no_privilege(
    mountpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.fuse.kernel.server.set_readahead", lambda minor, size: False)
    options = fuse_mount.short_options(max_readahead_bytes=32 << 10)
    with fuse_mount.mounted(NoOpen(), mountpoint, options) as server:
        control = Path(f"/sys/class/bdi/0:{server.attached.device_minor}/read_ahead_kb")
        assert control.read_text() == "32\n"


@pytest.mark.needs("mount", "fuse")
def test_readahead_is_set_where_root_asks(mountpoint: Path) -> None:
    options = fuse_mount.short_options(max_readahead_bytes=4 << 20)
    with fuse_mount.mounted(NoOpen(), mountpoint, options) as server:
        control = Path(f"/sys/class/bdi/0:{server.attached.device_minor}/read_ahead_kb")
        if not os.access(control, os.W_OK):
            raise MissingError("/sys is read-only here")
        assert control.read_text() == "4096\n"
