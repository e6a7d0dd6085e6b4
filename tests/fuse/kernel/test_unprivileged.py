"""Mounts by an ordinary user through fusermount3."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.fuse.kernel.unmount import find_helper
from testbed.mounts import fuse_mount
from testbed.mounts.sweeping import sweep
from testbed.needs import MissingError, require
from testbed.users import NOBODY, as_ordinary_user, give_to_nobody, with_fuse

pytestmark = pytest.mark.needs("fuse")

_SESSION = """
import os, subprocess, sys
from pathlib import Path
from bootseer.linux.mount_table import find_mounts
from bootseer.fuse.kernel.unmount import find_helper
from bootseer.fuse.kernel.mount import can_mount_directly
from testbed.mounts.fuse_mount import mounted, short_options
from testbed.mounts.passthrough_fs import PassthroughFileSystem
assert not can_mount_directly()
root = Path(sys.argv[1])
options = short_options(name="a name", read_only=len(sys.argv) > 2)
with mounted(PassthroughFileSystem(root / "backing"), root / "mnt", options) as server:
    mount, = [m for m in find_mounts("bootseer-test") if m.path == root / "mnt"]
    assert (mount.name, mount.read_only) == ("a name", options.read_only), mount
    assert mount.device_minor == server.attached.device_minor
    assert server.attached.backing_table is None
    code = "cat $0/file; echo more 2>/dev/null >$0/new && cat $0/new; id -u"
    done = subprocess.run(["sh", "-c", code, root / "mnt"], capture_output=True, timeout=30)
    sys.stdout.write(done.stdout.decode())
print("left", [m for m in find_mounts("bootseer-test") if m.path == root / "mnt"])
"""


# Forks, since the user may not be able to start this Python again.
_SUPERVISED = """
import os, signal, subprocess, sys
from pathlib import Path
from bootseer.linux.mount_table import find_mounts
from testbed.mounts import flat_server
root = Path(sys.argv[1])
out, into = os.pipe()
server = os.fork()
if server == 0:
    os.dup2(into, 1)
    sys.argv[1:] = ["supervise", str(root / "backing"), str(root / "mnt"), "cached"]
    flat_server.main()
    os._exit(0)
os.close(into)
said = open(out)
assert said.readline() == "ready\\n"
os.kill(int(Path(f"/proc/{server}/task/{server}/children").read_text()), signal.SIGKILL)
done = subprocess.run(["cat", root / "mnt" / "file"], capture_output=True, timeout=30)
os.kill(server, signal.SIGTERM)
print(done.stdout.decode() + said.read(), os.waitpid(server, 0)[1], end="")
print(" left", [m for m in find_mounts("bootseer-test") if m.path == root / "mnt"])
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """Folder of an ordinary user."""
    require("fuse")
    if find_helper() is None:
        raise MissingError("there is no fusermount3")
    path = Path(tempfile.mkdtemp(prefix="bootseer-test-"))
    try:
        for name in (".", "backing", "mnt"):
            (path / name).mkdir(exist_ok=True)
        give_to_nobody(path)
        (path / "backing" / "file").write_text("hello\n")
        yield path
    finally:
        sweep(path)
        shutil.rmtree(path, ignore_errors=True)


def _as_nobody(code: str, *arguments: str | Path) -> str:
    prefix = with_fuse(as_ordinary_user(reading_all=True))
    done = fuse_mount.run([*prefix, sys.executable, "-c", code, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_ordinary_user_mounts_reads_writes_and_unmounts(home: Path) -> None:
    uid = str(NOBODY if os.geteuid() == 0 else os.geteuid())
    assert _as_nobody(_SESSION, home) == f"hello\nmore\n{uid}\nleft []\n"


def test_read_only_is_kept_by_the_kernel(home: Path) -> None:
    uid = str(NOBODY if os.geteuid() == 0 else os.geteuid())
    assert _as_nobody(_SESSION, home, "ro") == f"hello\n{uid}\nleft []\n"


def test_the_helpers_refusal_is_passed_on(home: Path) -> None:
    code = """
import sys
from pathlib import Path
from bootseer.errors import PermissionDeniedError
from bootseer.fuse.kernel.mount import mount
from testbed.mounts.fuse_mount import short_options
try:
    mount(Path("/usr"), short_options())
except PermissionDeniedError as error:
    print(error)
"""
    said = _as_nobody(code, home)
    assert "/usr" in said
    assert "fusermount" in said


def test_without_the_helper_it_says_what_to_install(home: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from bootseer.errors import UnsupportedError
from bootseer.fuse.kernel.mount import mount
from testbed.mounts.fuse_mount import short_options
os.environ["PATH"] = "/nowhere"
try:
    mount(Path(sys.argv[1]) / "mnt", short_options())
except UnsupportedError as error:
    print(error)
"""
    assert "install fuse3" in _as_nobody(code, home)


@pytest.mark.needs(linux=(6, 9))
def test_an_ordinary_users_supervised_mount_survives_kill_9(home: Path) -> None:
    assert _as_nobody(_SUPERVISED, home) == "hello\nended\n 0 left []\n"
