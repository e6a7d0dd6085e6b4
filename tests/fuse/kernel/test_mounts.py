"""Finding mounts in mount tables, and errors of mounting."""

import os
from pathlib import Path

import pytest

from bootseer.errors import BusyError, InvalidInputError, NotFoundError
from bootseer.fuse.kernel.mount import mount
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import FuseServer, attach
from bootseer.fuse.kernel.unmount import unmount
from bootseer.linux import mount_table
from bootseer.linux.mount_table import find_mounts
from testbed.mounts import fuse_mount

_MOUNTINFO = rb"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
90 22 0:45 / /mnt/with\040space\134 ro,nosuid,nodev - fuse.bootseer-tree hdfs://nn/ckpt ro,user_id=0
91 22 0:46 / /mnt/plain rw shared:5 master:2 - fuse sshfs rw
92 22 0:47 / /mnt/blk rw - fuseblk /dev/sdb1 rw
93 22 0:48 / /sys/fs/fuse/connections rw - fusectl fusectl rw
broken line
"""


def test_mountinfo_is_parsed() -> None:
    first, second = mount_table.parse_mountinfo(_MOUNTINFO)
    assert first == mount_table.FuseMount(
        Path("/mnt/with space\\"), 45, "bootseer-tree", "hdfs://nn/ckpt", True
    )
    assert (second.path, second.subtype, second.read_only) == (Path("/mnt/plain"), "", False)
    points = mount_table.parse_mount_points(_MOUNTINFO)
    assert [one.path for one in points[:2]] == [b"/", b"/mnt/with space\\"]
    assert len(points) == 5


# A Slurm job with its own /tmp, in which it has mounted again.
_OWN_TMP = rb"""22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:40 / /tmp rw - tmpfs none rw
31 30 0:41 / /tmp/ckpt rw - fuse.bootseer-stripe before rw
32 22 0:42 / /tmpfile rw - fuse.bootseer-stripe beside rw
33 30 254:0 /own /tmp rw - ext4 /dev/vda rw
"""


def test_what_is_mounted_below_a_later_mount_is_hidden() -> None:
    before = _OWN_TMP[: _OWN_TMP.index(b"33 30")]
    assert not mount_table.is_hidden(before, b"/tmp/ckpt")
    assert mount_table.is_hidden(_OWN_TMP, b"/tmp/ckpt")
    for path in (b"/", b"/tmp", b"/tmpfile", b"/nowhere"):
        assert not mount_table.is_hidden(_OWN_TMP, path)
    again = _OWN_TMP + b"34 33 0:43 / /tmp/ckpt rw - fuse.bootseer-stripe again rw\n"
    assert not mount_table.is_hidden(again, b"/tmp/ckpt")


def test_absolute_resolves_the_parent_only(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "last").symlink_to("nowhere")
    resolved = mount_table.absolute(tmp_path / "link" / "last")
    assert resolved == tmp_path.resolve() / "real" / "last"
    assert mount_table.absolute(Path("/")) == Path("/")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a,b"},
        {"name": ""},
        {"subtype": "a.b"},
        {"subtype": "a\nb"},
        {"threads": 0},
        {"max_readahead_bytes": 1 << 40},
    ],
)
def test_mount_options_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        MountOptions(**change)  # type: ignore[arg-type]


@pytest.mark.needs("fuse")
def test_a_mountpoint_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError, match="create it"):
        mount(tmp_path / "missing", fuse_mount.short_options())
    with pytest.raises(InvalidInputError, match="not a directory"):
        mount(tmp_path / "file", fuse_mount.short_options())


@pytest.mark.needs("fuse")
def test_a_busy_mountpoint_is_refused(mountpoint: Path) -> None:
    with fuse_mount.mounted(Operations(), mountpoint, fuse_mount.short_options(name="first")):
        with pytest.raises(BusyError, match="first"):
            mount(mountpoint, fuse_mount.short_options())
        found = [m for m in find_mounts(fuse_mount.SUBTYPE) if m.path == mountpoint]
        assert len(found) == 1
    assert mount_table.find_mount(mountpoint) is None


@pytest.mark.needs("fuse")
def test_the_end_of_a_server_leaves_the_next_mount_of_its_number(mountpoint: Path) -> None:
    before = attach(mountpoint, fuse_mount.short_options())
    server = FuseServer(Operations(), before, fuse_mount.short_options(), on_end=lambda: None)
    server.start(resend=False)
    unmount(mountpoint, timeout_s=60)
    assert server.wait(60)
    after = attach(mountpoint, fuse_mount.short_options())
    try:
        # Another program may have taken the number meanwhile; then nothing is shown here.
        assert not before.is_mounted()
        server.unmount()
        assert mount_table.find_mount(mountpoint) is not None
        assert after.is_mounted()
    finally:
        unmount(mountpoint, timeout_s=0)
        os.close(after.device)


@pytest.mark.needs("fuse")
def test_unmount_of_nothing_says_so(mountpoint: Path) -> None:
    with pytest.raises(InvalidInputError, match="no FUSE"):
        unmount(mountpoint)


@pytest.mark.needs("fuse")
def test_unmount_by_path_ends_the_server(mountpoint: Path) -> None:
    with fuse_mount.mounted(Operations(), mountpoint) as server:
        unmount(mountpoint, timeout_s=60)
        assert server.wait(60)
        assert mount_table.find_mount(mountpoint) is None
