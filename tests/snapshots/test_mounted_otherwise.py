"""Fallbacks where a snapshot cannot be mounted, or not in the usual way, with a message."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.served.overlays import overlay_at
from bootseer.served.service import services_dir
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.mounted import unmount_snapshot
from testbed.mounts.snapshot_mounts import WAIT_S, servers, wait_gone
from testbed.users import as_ordinary_user, give_to_nobody
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.mounted_jobs import (
    capture_and_remove,
    done_by,
    environment_of,
    runs,
    small_setup,
    snapshot_run,
)

pytestmark = pytest.mark.needs("mount", "fuse")


def test_a_failed_mount_is_extracted(tmp_path: Path, mounting: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(mounting("a"), request, target)
    node = mounting("b")
    # This /dev/fuse can be opened, but does not mount.
    hide = 'mount --bind /dev/null /dev/fuse; exec "$@"'
    done = done_by(
        ["unshare", "--mount", "sh", "-ec", hide, "sh", *snapshot_run(request)],
        environment_of(node),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: extracted: ") == 1
    assert (target / "d/file").read_text() == "Linux\n"
    assert runs(tmp_path) == 1
    assert servers(node) == []


def test_a_cache_on_an_overlay(tmp_path: Path, mounting: MakeNode) -> None:
    """A cache in a container is on an overlay, which cannot hold another one's changes: memory
    does."""
    request, target = small_setup(tmp_path)
    capture_and_remove(mounting("a"), request, target)
    node = mounting("b")
    script = (
        "mkdir lower upper work merged; "
        "mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay merged; "
        'BOOTSEER_CACHE_DIR=$PWD/merged/cache; export BOOTSEER_CACHE_DIR; "$@"; '
        f"echo written > {target}/new; cat {target}/d/file {target}/new; "
        f"{sys.executable} -m bootseer unmount {target}; ls -A {target}"
    )
    (tmp_path / "place").mkdir()
    command = ["unshare", "--mount", "sh", "-ec", f"cd {tmp_path}/place; {script}", "sh"]
    done = done_by([*command, *snapshot_run(request)], environment_of(node))
    assert done.returncode == 0, done.stderr
    assert "mounted: it was asked for" in done.stderr
    assert done.stdout == "Linux\nwritten\n"
    wait_gone(node)


def test_without_root_it_is_extracted(mounting: MakeNode) -> None:
    node = mounting("b")
    # Not below pytest's folder, which other users may not enter.
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        give_to_nobody(home)
        request, target = small_setup(home)
        environment = {**environment_of(node), "HOME": name}
        for folder in ("STORE", "CACHE_DIR", "RUN_DIR"):
            environment[f"BOOTSEER_{folder}"] = str(home / folder)
        command = [*as_ordinary_user(), *snapshot_run(request)]

        def run() -> "subprocess.CompletedProcess[str]":
            return done_by(command, environment)

        first = run()
        assert first.returncode == 0, first.stderr
        shutil.rmtree(target)
        second = run()
        assert "mounting needs root (CAP_SYS_ADMIN)" in second.stderr
        assert "restored" in second.stderr
        assert (target / "d/file").read_text() == "Linux\n"
        assert runs(home) == 1


def test_a_damaged_copy_of_the_index_is_fetched_again(tmp_path: Path, mounting: MakeNode) -> None:
    """Regression: the copy was taken for a damaged snapshot, and the set-up ran again."""
    request, target = small_setup(tmp_path)
    capture_and_remove(mounting("a"), request, target)
    node = mounting("b")
    run_setup(node, request)
    unmount_snapshot(node, target)
    (copy,) = (node.cache_dir / "indexes").iterdir()
    copy.write_bytes(b"damaged")
    again = run_setup(node, request)
    assert (again.how, again.mode, runs(tmp_path)) == ("restored", "mount", 1)


def test_a_snapshot_whose_blob_is_gone_is_made_anew(tmp_path: Path, mounting: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(mounting("a"), request, target)
    for path in (tmp_path / "store/blobs").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    assert run_setup(mounting("b"), request).how == "captured"
    assert overlay_at(target) is None
    shutil.rmtree(target)
    assert run_setup(mounting("c"), request).mode == "mount"


def test_a_target_with_a_mount_inside_is_extracted(tmp_path: Path, mounting: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    inner = target / "inner"
    inner.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(inner)], check=True, timeout=WAIT_S)
    try:
        (inner / "data").write_text("not the set-up's")
        run_setup(mounting("a"), request)
        shutil.rmtree(target / "d")
        said: list[str] = []
        result = run_setup(mounting("b"), request, report=said.append)
        assert (result.how, result.mode) == ("restored", "extract")
        assert sum("something else is mounted inside" in line for line in said) == 2
        assert (inner / "data").read_text() == "not the set-up's"
        assert (target / "d/file").read_text() == "Linux\n"
    finally:
        subprocess.run(["umount", str(inner)], check=True, timeout=WAIT_S)


def test_the_way_is_reported(tmp_path: Path, mounting: MakeNode) -> None:
    request, target = small_setup(tmp_path)
    capture_and_remove(mounting("a"), request, target)
    node = replace(mounting("b"), restore_mode="auto")
    result = run_setup(node, request)
    assert (result.mode, result.mode_reason) == ("extract", "it is small")
    assert not services_dir(node.run_dir).exists()
