"""Calls to a folder on a network file system that hangs end by the deadline.

The file system is FUSE, which counts as a network; its server waits when a test says so.
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.linux.mount_table import parse_mount_points
from bootseer.store import open_backend
from bootseer.store.local.network import lies_on_network
from testbed.mounts.fuse_mount import mounted, short_options
from testbed.mounts.passthrough_fs import PassthroughFileSystem
from testbed.paths import REPOSITORY
from testbed.waiting import TIMEOUT_S
from tests.bootseer.store.using import put

WAITING = (
    *("lookup", "getattr", "setattr", "mkdir", "unlink", "rmdir", "rename", "open", "create"),
    *("read", "write", "flush", "fsync", "opendir", "readdir", "fsyncdir", "statfs"),
)
CALLS = {
    "stat": "backend.stat('file')",
    "read": "backend.read('file')",
    "read_into": "backend.read_into('file', 0, memoryview(bytearray(10)), Attempt())",
    "kept reader": "reader.read_into(0, memoryview(bytearray(10)), Attempt())",
    "kept reader's look": "reader.current()",
    "write": "writer.write(b'y')",
    "abort": "other.abort()",
    "create": "backend.create('new')",
    "rename": "backend.rename('file', 'moved')",
    "list": "list(backend.list(''))",
    "mkdir": "backend.mkdir('folder')",
    "delete": "backend.delete('file')",
    "space": "backend.space()",
    "publish": "Store(backend).publish('key', b'x')",
    "read of a store": "Store(backend).read('file')",
    "lease": "Store(backend).lease('leases/x', ttl_s=60, owner='me')",
}
CODE = f"""
import sys
from bootseer.errors import DeadlineError
from bootseer.store import Store, open_backend
from bootseer.transfer.attempt import Attempt
backend = open_backend(sys.argv[1], deadline_s=240)
reader, writer, other = (
    backend.open_reader("file"), backend.create("begun"), backend.create("other")
)
writer.write(b"x")
print("opened", flush=True)
sys.stdin.readline()
backend.deadline_s = 0.3
for name, call in {CALLS!r}.items():
    try:
        eval(call)
        print(name, "ended", flush=True)
    except DeadlineError as error:
        print(name, "left", flush=True)
print("done", flush=True)
sys.stdin.readline()
"""


class HangingFileSystem(PassthroughFileSystem):
    """File system that mirrors a folder, and answers nothing while `hangs` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, direct_io=True, ttl_s=0.0)
        self.hangs = False
        self.goes_on = threading.Event()


def waiting(name: str) -> Callable[..., object]:
    """Return the operation `name`, preceded by a wait while its file system hangs."""
    operation = getattr(PassthroughFileSystem, name)

    def wait(self: HangingFileSystem, *arguments: object) -> object:
        if self.hangs:
            self.goes_on.wait(600)
        return operation(self, *arguments)

    return wait


for operation_name in WAITING:
    setattr(HangingFileSystem, operation_name, waiting(operation_name))


@pytest.mark.needs("fuse")
def test_a_folder_whose_server_hangs_is_left_at_the_deadline(tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    put(open_backend(str(behind)), "file", b"x" * 1000)
    operations = HangingFileSystem(behind)
    # A call that is not left ends then, and says so.
    end = threading.Timer(TIMEOUT_S, operations.goes_on.set)
    end.start()
    said: list[str] = []
    with mounted(operations, tmp_path / "mount", short_options(threads=64)):
        child = subprocess.Popen(
            [sys.executable, "-c", CODE, str(tmp_path / "mount")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={"PYTHONPATH": str(REPOSITORY), "LC_ALL": "C"},
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin, child.stdout:
            for line in child.stdout:
                said.append(line.strip())
                if said[-1] == "opened":
                    operations.hangs = True
                    child.stdin.write("\n")
                    child.stdin.flush()
                elif said[-1] == "done":
                    break
        operations.hangs = False
        operations.goes_on.set()
        end.cancel()
        child.kill()
        child.wait(TIMEOUT_S)
    # That a file which was begun cannot be removed now is no failure.
    expected = [f"{name} {'ended' if name == 'abort' else 'left'}" for name in CALLS]
    assert said == ["opened", *expected, "done"]


MOUNTS = parse_mount_points(
    b"""\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:40 / /shared rw - nfs4 server:/x rw
23 22 8:2 / /shared/scratch rw - xfs /dev/sdb rw
24 21 0:41 / /with\\040space rw - lustre a@tcp:/b rw
25 21 0:42 / /home rw - autofs systemd-1 rw
26 21 0:43 / /mnt/bucket rw - fuse.goofys x rw
27 21 8:3 / /windows rw - fuseblk /dev/sdc rw
"""
)


@pytest.mark.parametrize(
    ("path", "is_remote"),
    [
        ("/", False),
        ("/var/store", False),
        ("/shared", True),
        ("/shared/stores/a", True),
        ("/shared/scratch/a", True),  # the way to it leads through another machine
        ("/sharedness/a", False),
        ("/with space/a", True),
        ("/home/me/store", True),
        ("/mnt/bucket/store", True),
        ("/windows/store", False),
    ],
)
def test_knows_network_file_systems(path: str, is_remote: bool) -> None:
    assert lies_on_network(path, MOUNTS) == is_remote


def test_follows_links_to_network_file_systems(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/shared/stores")
    (tmp_path / "upwards").symlink_to("../" * 30 + "shared")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "here").symlink_to(".")
    assert lies_on_network(f"{tmp_path}/link/a", MOUNTS)
    assert lies_on_network(f"{tmp_path}/here/upwards", MOUNTS)
    assert not lies_on_network(f"{tmp_path}/loop/a", MOUNTS)
    assert not lies_on_network(f"{tmp_path}/here/a", MOUNTS)
