"""Set-ID programs, file capabilities and device nodes of a store: they give no privileges.

A user who may write to a store does not become root on other nodes.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import PermissionDeniedError
from bootseer.settings.config import Settings
from bootseer.snapshots import capture
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.mounted import unmount_snapshot
from bootseer.snapshots.restore import restore_snapshot
from testbed.needs import require
from testbed.users import NOBODY, as_ordinary_user
from tests.snapshots.conftest import MakeNode

pytestmark = pytest.mark.needs("mount", "fuse")

# cap_net_raw=ep in VFS_CAP_REVISION_2 (linux/capability.h).
_CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Environment with set-ID root programs, where every user can reach it."""
    require("root", "fuse")
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    target = tmp_path / "env"
    (target / "shared").mkdir(parents=True)
    (target / "shared").chmod(0o2775)
    for name in ("user", "group", "capable", "plain"):
        shutil.copy(shutil.which("id") or "id", target / name)
        (target / name).chmod(0o755)
    (target / "user").chmod(0o4755)
    (target / "group").chmod(0o2755)
    os.setxattr(target / "capable", "security.capability", _CAPABILITY)
    os.setxattr(target / "capable", "user.kept", b"yes")
    return target


def ids(target: Path) -> list[str]:
    """Return user and group of the programs when an ordinary user starts them."""
    done = subprocess.run(
        [
            *as_ordinary_user(),
            *("sh", "-c", f"{target}/user -u; {target}/group -g"),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.split()


@pytest.fixture(params=["mount", "link", "extract"])
def node(
    mounting: MakeNode, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    monkeypatch.delenv("BOOTSEER_RESTORE_PRIVILEGES")
    return replace(mounting("a"), restore_mode=request.param)


def test_privileges_of_files_are_left_out_and_said(
    node: Settings, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = create_snapshot(node, [str(target)])
    assert "3 files" in caplog.text
    assert ids(target) == ["0", "0"]
    shutil.rmtree(target)
    caplog.clear()
    restore_snapshot(node, manifest.fingerprint)
    (line,) = [record for record in caplog.messages if "lose" in record]
    assert "3 files" in line
    assert "BOOTSEER_RESTORE_PRIVILEGES" in line
    assert ids(target) == [str(NOBODY), str(NOBODY)]
    # A directory's set-group-ID bit gives no privilege.
    assert stat.S_IMODE((target / "shared").stat().st_mode) == 0o2775
    assert os.getxattr(target / "capable", "user.kept") == b"yes"
    flags = os.statvfs(target).f_flag
    if node.restore_mode == "mount":
        assert flags & os.ST_NOSUID
        assert flags & os.ST_NODEV
    else:
        assert stat.S_IMODE((target / "user").stat().st_mode) == 0o755
        assert "security.capability" not in os.listxattr(target / "capable")


def test_they_are_restored_where_that_is_asked_for(node: Settings, target: Path) -> None:
    manifest = create_snapshot(node, [str(target)])
    shutil.rmtree(target)
    # The node has a tree without these bits already.
    restore_snapshot(node, manifest.fingerprint)
    if os.path.ismount(target):
        unmount_snapshot(node, target, lazy=True)
    shutil.rmtree(target, ignore_errors=True)
    asked = replace(node, restore_privileges=True)
    restore_snapshot(asked, manifest.fingerprint)
    assert ids(target) == ["0", "0"]
    assert os.getxattr(target / "capable", "security.capability") == _CAPABILITY
    if node.restore_mode == "mount":
        assert os.statvfs(target).f_flag & os.ST_NODEV


def test_device_nodes_are_refused_in_every_mode(
    node: Settings, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture leaves out device nodes, so this store was changed by hand."""
    os.mknod(target / "disk", 0o666 | stat.S_IFBLK, os.makedev(8, 0))
    monkeypatch.setattr(capture, "is_device", lambda change, path: False)
    manifest = create_snapshot(node, [str(target)])
    shutil.rmtree(target)
    asked = replace(node, restore_privileges=True)
    with pytest.raises(PermissionDeniedError, match="device node"):
        restore_snapshot(asked, manifest.fingerprint)
    assert not target.exists() or os.listdir(target) == []
    assert not os.path.ismount(target)
