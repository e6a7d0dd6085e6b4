"""`bootseer status` of real mounts: of every kind, killed, of other users, of earlier releases."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.cli.node import node_entries
from bootseer.fuse.kernel.unmount import find_helper
from bootseer.fuse.striped.mounted.mount import mount_checkpoints, mount_spec
from bootseer.fuse.striped.mounted.server import serve_checkpoints
from bootseer.linux import mount_table, namespaces
from bootseer.prefetch.images.mount import mount_image
from bootseer.served.service import (
    PUBLISH,
    ServiceState,
    new_service_dir,
    services_dir,
    take_lock,
    write_state,
)
from bootseer.served.users import add_user
from bootseer.settings.config import Settings
from bootseer.snapshots.archive import create_snapshot
from testbed.mounts.fuse_mount import clear_mount
from testbed.mounts.image_mounts import index, settings_at
from testbed.mounts.sweeping import sweep
from testbed.needs import MissingError, require
from testbed.users import become, folder_for_all_users
from testbed.waiting import wait_for

pytestmark = pytest.mark.needs("mount", "fuse")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_for_all_users() as folder:
        yield folder


_NOBODY = 65534
_TIMEOUT_S = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Settings]:
    require("root", "fuse")
    settings = settings_at(tmp_path)
    yield settings
    for mount in mount_table.find_mounts("bootseer"):
        if mount.path.is_relative_to(tmp_path):
            clear_mount(mount.path)
    sweep(tmp_path, settings)


def _bootseer(node: Settings, *words: str) -> str:
    places = ("--store", node.store_url, "--cache-dir", str(node.cache_dir))
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", *places, "--run-dir", str(node.run_dir), *words],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _status(node: Settings) -> list[dict[str, Any]]:
    """Return the status of the node, without the mounts of other processes on this machine."""
    entries: list[dict[str, Any]] = json.loads(_bootseer(node, "status", "--json"))["served"]
    top = str(node.run_dir.parent)
    return [one for one in entries if one["pid"] or any(p.startswith(top) for p in one["where"])]


def _mount_image(node: Settings, directory: Path) -> ServiceState:
    source = directory.parent / "source"
    source.mkdir()
    (source / "file").write_text("content")
    index(node, source, "image:1")
    directory.mkdir()
    return mount_image(node, "image:1", directory).state


def _mount_checkpoints(node: Settings, directory: Path) -> None:
    directory.mkdir()
    url = (directory.parent / "stored").as_uri()
    mount_checkpoints(mount_spec(node, url, directory, memory_bytes=2**27))


def test_all_that_is_served_here(node: Settings, tmp_path: Path) -> None:
    _mount_image(node, tmp_path / "image")
    _mount_checkpoints(node, tmp_path / "checkpoints")
    for name in ("mounted", "linked"):
        target = tmp_path / name
        target.mkdir()
        (target / "file").write_text(name)
        key = create_snapshot(node, [str(target)]).fingerprint
        (target / "file").unlink()
        mode = {"mounted": "mount", "linked": "link"}[name]
        _bootseer(node, "snapshot", "restore", key, "--mode", mode)
    publishing = new_service_dir(node.run_dir, "record-00000000")
    lock = take_lock(publishing)
    write_state(
        publishing,
        ServiceState("record", "image:1", "", "", "", os.getpid(), time.time_ns(), PUBLISH),
    )

    found = {one["kind"]: one for one in _status(node)}
    assert set(found) == {"image", "checkpoints", "environment", "linked tree", "publisher"}
    assert {one["health"] for one in found.values()} == {"ok"}, found
    assert [one["problem"] for one in found.values()] == [""] * 5
    where = {"image": "image", "checkpoints": "checkpoints", "environment": "mounted"}
    for kind, name in {**where, "linked tree": "linked"}.items():
        one = found[kind]
        assert one["where"] == [str(tmp_path / name)]
        assert os.path.exists(f"/proc/{one['pid']}")
        assert one["since_s"] <= time.time()
        assert Path(one["log"]).exists()
    assert found["image"]["what"] == "image:1"
    assert found["checkpoints"]["what"] == (tmp_path / "stored").as_uri()
    assert found["image"]["worker_pid"] != found["image"]["pid"]

    shown = _bootseer(node, "status")
    assert all(kind in shown for kind in found)
    for kind, name in where.items():
        assert found[kind]["figures"]["pid"] == found[kind]["pid"]
        (one,) = json.loads(_bootseer(node, "status", str(tmp_path / name), "--json"))["served"]
        assert one["pid"] == found[kind]["pid"]
    assert (
        "throughput"
        in json.loads(_bootseer(node, "status", str(tmp_path / "checkpoints"), "--json"))["served"][
            0
        ]["figures"]
    )
    assert "from readahead" in _bootseer(node, "status", str(tmp_path / "image"))
    assert "sequential streams" in _bootseer(node, "status", str(tmp_path / "checkpoints"))
    os.close(lock)
    dead = [one for one in _status(node) if one["health"] == "dead"]
    assert [one["kind"] for one in dead] == ["publisher"]


def test_a_killed_server_and_what_removes_it(node: Settings, tmp_path: Path) -> None:
    _mount_image(node, tmp_path / "image")
    _mount_checkpoints(node, tmp_path / "checkpoints")
    for one in _status(node):
        for pid in (one["pid"], one["worker_pid"]):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: {one["health"] for one in _status(node)} == {"dead"}, "their deaths")
    found = {one["kind"]: one for one in _status(node)}
    # A start of something else leaves a checkpoint folder's dead mount where it is.
    for kind in ("checkpoints", "image"):
        assert f"`bootseer unmount {tmp_path / kind}`" in found[kind]["remedy"]
        assert "killed" in found[kind]["problem"]
        _bootseer(node, "unmount", str(tmp_path / kind))
    assert _status(node) == []


def test_a_dead_checkpoint_mount_stays_until_somebody_takes_it_off(
    node: Settings, tmp_path: Path
) -> None:
    """Otherwise the job would go on writing into the folder below."""
    _mount_checkpoints(node, tmp_path / "checkpoints")
    (before,) = _status(node)
    for pid in (before["pid"], before["worker_pid"]):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _status(node)[0]["health"] == "dead", "its death")
    _mount_image(node, tmp_path / "image")
    assert {one["kind"]: one["health"] for one in _status(node)} == {
        "checkpoints": "dead",
        "image": "ok",
    }
    assert mount_table.find_mount(tmp_path / "checkpoints") is not None


def test_a_worker_that_nobody_would_replace(node: Settings, tmp_path: Path) -> None:
    state = _mount_image(node, tmp_path / "image")
    (before,) = _status(node)
    os.kill(before["pid"], signal.SIGKILL)
    wait_for(lambda: _status(node)[0]["health"] == "degraded", "what is wrong")
    (after,) = _status(node)
    assert "replace" in after["problem"]
    assert after["remedy"]
    _bootseer(node, "unmount", state.directory)


def test_a_linked_environment_whose_keeper_was_killed(node: Settings, tmp_path: Path) -> None:
    """The environment is still in use."""
    target = tmp_path / "linked"
    target.mkdir()
    (target / "file").write_text("content")
    key = create_snapshot(node, [str(target)]).fingerprint
    (target / "file").unlink()
    _bootseer(node, "snapshot", "restore", key, "--mode", "link")
    (before,) = _status(node)
    add_user(services_dir(node.run_dir) / Path(before["log"]).stem, os.getpid())
    os.kill(before["pid"], signal.SIGKILL)
    wait_for(lambda: _status(node)[0]["health"] == "degraded", "what is wrong")
    (after,) = _status(node)
    assert (after["kind"], after["users"]) == ("linked tree", [os.getpid()])
    assert (target / "file").read_text() == "content"


def _forked(code: Callable[[], object], user: int) -> int:
    """Fork a process of `user`, to be waited for; return its id.

    A user might be unable to start this Python, where it is.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if user:
                become(user)
            code()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def _open_device_to_all(folder: Path) -> None:
    """Open /dev/fuse to all users, as most distributions do, in this process's mount namespace."""
    folder.mkdir()
    namespaces.unshare(namespaces.CLONE_NEWNS)
    namespaces.make_private()
    namespaces.mount("tmpfs", folder, "tmpfs")
    os.mknod(folder / "fuse", stat.S_IFCHR, os.makedev(10, 229))
    (folder / "fuse").chmod(0o666)
    namespaces.mount(folder / "fuse", "/dev/fuse", flags=namespaces.MS_BIND)


def test_two_users_see_of_each_other_what_is_mounted(node: Settings, tmp_path: Path) -> None:
    if find_helper() is None:
        raise MissingError("mounting without root needs fusermount3")
    home = tmp_path / "home"
    for folder in (home, home / "mnt"):
        folder.mkdir()
        os.chown(folder, _NOBODY, _NOBODY)
    theirs = replace(settings_at(home), run_dir=home / "run")
    ours, other = str(tmp_path / "checkpoints"), str(home / "mnt")

    # Once this process is another user's it may not be able to.
    import bootseer.fuse.striped.mounted.worker  # noqa: F401

    def serve() -> None:
        spec = mount_spec(theirs, (home / "stored").as_uri(), home / "mnt", memory_bytes=2**27)
        serve_checkpoints(spec, lambda: None)

    def look() -> None:
        seen = {one.where[0]: one for one in node_entries(theirs.run_dir) if one.where}
        assert (seen[ours].health, seen[ours].pid) == ("unknown", None)
        assert "user 0's" in seen[ours].problem
        assert (seen[other].kind, seen[other].health) == ("checkpoints", "ok")

    def both() -> None:
        _open_device_to_all(tmp_path / "devices")
        _mount_checkpoints(node, tmp_path / "checkpoints")
        server = _forked(serve, _NOBODY)
        try:
            wait_for(lambda: mount_table.find_mount(home / "mnt") is not None, "the other's mount")
            # Until INIT is answered every look at it waits.
            wait_for(lambda: list((home / "run/services").glob("*/control")), "its server")
            found = {one["where"][0]: one for one in _status(node)}
            assert (found[other]["health"], found[other]["pid"]) == ("unknown", None)
            assert f"user {_NOBODY}'s" in found[other]["problem"]
            assert found[ours]["health"] == "ok"
            assert os.waitpid(_forked(look, _NOBODY), 0)[1] == 0
        finally:
            os.kill(server, signal.SIGTERM)
            os.waitpid(server, 0)
            _bootseer(node, "unmount", ours)

    assert os.waitpid(_forked(both, 0), 0)[1] == 0


def test_a_server_that_is_still_waited_for_has_no_row(node: Settings) -> None:
    os.close(take_lock(new_service_dir(node.run_dir)))
    assert _status(node) == []
