"""Damage to files that only speed a start up never stops one; dead mounts can be unmounted."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.linux import mount_table
from testbed.needs import require
from testbed.waiting import wait_for
from tests.bootseer.cli.conftest import World
from tests.bootseer.cli.failing.promises import CORRUPT, UNKNOWN, check, damage

pytestmark = pytest.mark.needs("fuse")


@pytest.fixture
def mountable(own_world: World) -> Iterator[World]:
    require("root", "fuse")
    yield own_world
    own_world("unmount", "mnt", "--timeout", "0")
    own_world("status", "--wait", "20")


def content(path: Path) -> bytes:
    """Return the file's content, read in a process that can be left if the mount hangs."""
    done = subprocess.run(["timeout", "20", "cat", str(path)], capture_output=True, check=True)
    return done.stdout


def start(world: World) -> None:
    """Run a start: mount, read, unmount, and publish the record."""
    assert world("image", "mount", "image:1", "mnt").code == 0
    assert content(world.path("mnt/lib/data")) == world.path("src/lib/data").read_bytes()
    assert world("unmount", "mnt").code == 0
    assert world("status", "--wait", "20").code == 0


def test_verifying_the_cache_sees_contents_and_indexes(mountable: World) -> None:
    """A named fault: indexes were not verified, and reported as undamaged."""
    start(mountable)
    cache = mountable.path("cache")
    (index,) = (cache / "indexes").iterdir()
    (stream,) = cache.glob("streams/*/data")
    for path in (index, stream):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x20
        path.write_bytes(data)
        found = mountable("image", "cache", "--verify", "--json")
        assert 0 < found.json["damaged_bytes"] <= len(data)
        assert mountable("image", "cache", "--verify", "--json").json["damaged_bytes"] == 0
    start(mountable)


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "noise", "deep"])
def test_a_damaged_record_costs_only_speed(mountable: World, how: str) -> None:
    world = mountable
    start(world)
    damaged = [
        path
        for kind in ("hot", "traces", "bundles", "hotsets")
        for path in world.path(
            "store",
        )
        .joinpath(kind)
        .rglob("*")
        if path.is_file()
    ]
    assert len(damaged) >= 3
    for path in damaged:
        damage(path, how)
    world.forget()
    start(world)
    # Some traces were replaced meanwhile by new ones; what is damaged is named, in one line.
    for arguments in (("image", "trace", "list", "image:1"), ("image", "trace", "show", "image:1")):
        result = world(*arguments)
        if result.code:
            check(result, (CORRUPT, UNKNOWN), "store")


def servers_of(world: World) -> list[int]:
    """Return the processes that name the world's directory, or are in such a process's session."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "fd").iterdir()
            text = b" ".join(os.fsencode(os.readlink(fd)) for fd in maps)
        except OSError:
            continue
        if int(process.name) != os.getpid() and os.fsencode(world.base) + b"/run" in text:
            found.append(int(process.name))
    return found


@pytest.mark.parametrize("kind", ["image", "checkpoint"])
def test_a_dead_mount_can_be_taken_off(mountable: World, kind: str) -> None:
    world = mountable
    unmount = ("unmount", "mnt")
    mount = ("image", "mount", "image:1", "mnt")
    if kind == "checkpoint":
        mount = ("checkpoint", "mount", "checkpoints", "mnt")
    assert world(*mount).code == 0
    assert servers_of(world)

    def are_gone() -> bool:
        # A supervisor may have started another worker meanwhile.
        left = servers_of(world)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_for(are_gone, "the end of the servers")
    assert mount_table.find_mount(world.path("mnt")) is not None
    # Mounting over it is refused, or takes the dead one away; it never hangs.
    again = world(*mount)
    if again.code:
        check(again, 19, "mnt")
    if mount_table.find_mount(world.path("mnt")) is not None:
        result = world(*unmount)
        assert (result.code, result.err) == (0, "")
    assert mount_table.find_mount(world.path("mnt")) is None
    check(world(*unmount), 10, "mnt")
    assert world(*mount).code == 0
    assert world(*unmount).code == 0
