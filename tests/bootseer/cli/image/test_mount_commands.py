"""`bootseer image mount | unmount | status | run | warm | trace` as a user types them."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.linux import mount_table
from bootseer.served.service import live_mounts
from bootseer.settings.config import Settings
from testbed.mounts.image_mounts import (
    bootseer,
    checksums_in_child,
    index,
    settings_at,
    start_bootseer,
)
from testbed.mounts.sweeping import sweep
from testbed.waiting import wait_for


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    source = tmp_path / "source"
    source.mkdir()
    (source / "hot").write_bytes(os.urandom(100_000))
    (source / "cold").write_bytes(os.urandom(100_000))
    (tmp_path / "mnt").mkdir()
    settings = settings_at(tmp_path)
    index(settings, source, "image:1")
    yield settings
    sweep(settings.run_dir.parent, settings)


@pytest.mark.needs("fuse")
def test_mount_status_trace_and_unmount(settings: Settings, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    assert bootseer(settings, "image", "mount", "image:1", directory).returncode == 0
    again = bootseer(settings, "image", "mount", "image:1", directory)
    assert again.returncode == 19
    assert again.stderr.count("\n") == 1
    checksums_in_child([directory / "hot"])
    (row,) = json.loads(bootseer(settings, "status", directory, "--json").stdout)["served"]
    one = row["figures"]
    assert (one["reference"], one["workload"]) == ("image:1", "train")
    assert one["record"] == "recording"
    assert "image:1" in bootseer(settings, "status").stdout
    assert bootseer(settings, "unmount", directory).returncode == 0
    assert mount_table.find_mount(directory) is None
    served = json.loads(bootseer(settings, "status", "--wait", 30, "--json").stdout)["served"]
    assert [one for one in served if one["pid"]] == []
    (listed,) = json.loads(bootseer(settings, "image", "trace", "list", "image:1", "--json").stdout)
    assert listed["ended"] == "unmount"
    assert listed["file_count"] == 1
    assert listed["bundle"].startswith("sha256:")
    assert "train" in bootseer(settings, "image", "trace", "list", "image:1").stdout
    shown = json.loads(
        bootseer(settings, "image", "trace", "show", "image:1", listed["id"], "--json").stdout
    )
    assert {access["path"] for access in shown["accesses"]} == {"hot"}
    assert sum(access["length"] for access in shown["accesses"]) == 100_000
    assert "hot" in bootseer(settings, "image", "trace", "show", "image:1").stdout


@pytest.mark.needs("fuse")
def test_foreground_ends_on_ctrl_c_and_on_unmount(settings: Settings, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    for end in ("signal", "unmount"):
        arguments = ("image", "mount", "--foreground", "image:1", directory)
        with start_bootseer(settings, *arguments) as process:
            wait_for(lambda: mount_table.find_mount(directory) is not None)
            if end == "signal":
                process.send_signal(signal.SIGINT)
            else:
                bootseer(settings, "unmount", directory)
            # 130: the signal came before the command knew that the mount works.
            assert process.wait(60) in ((0, 130) if end == "signal" else (0,))
        wait_for(lambda: mount_table.find_mount(directory) is None)
        wait_for(lambda: list(live_mounts(settings.run_dir)) == [])


@pytest.mark.needs("fuse")
def test_a_warmed_image_needs_no_store(settings: Settings, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    assert bootseer(settings, "image", "fetch", "image:1").returncode == 0
    assert bootseer(settings, "image", "mount", "image:1", directory).returncode == 0
    (tmp_path / "store/blobs").rename(tmp_path / "store/gone")
    for name in ("hot", "cold"):
        assert not checksums_in_child([directory / name])[0].startswith("E")
    assert bootseer(settings, "unmount", directory).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("image", "mount", "no-such:1", "mnt"), 10),
        (("image", "mount", "image:1", "no-such-dir"), 10),
        (("image", "mount", "image:1"), 2),
        (("unmount", "mnt"), 10),
        (("status", "mnt"), 10),
        (("image", "trace", "show", "image:1"), 10),
        (("image", "trace", "list", "no-such:1"), 10),
        (("image", "fetch", "no-such:1"), 10),
    ],
)
def test_bad_input_is_one_sentence_and_a_code(
    settings: Settings, tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    paths = {"mnt": tmp_path / "mnt", "no-such-dir": tmp_path / "no-such-dir"}
    done = bootseer(settings, *(paths.get(argument, argument) for argument in arguments))
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    if code != 2:
        assert done.stderr.count("\n") == 1
