"""Runs a step in children that kill themselves, each at its N-th change to the file system.

`python crash_driver.py SCENARIO DIRECTORY POINTS` prints its results, and fails if something half
done was visible or the next run did not work. A process of its own, so that it may fork. Other
drivers use another act than the kill: see `run_in_child`.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.served.overlays import overlay_at
from bootseer.served.service import services_dir
from bootseer.served.users import has_users
from bootseer.settings.config import Settings, load_settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.mounted import unmount_snapshot
from bootseer.store import open_store
from testbed.mounts.snapshot_mounts import wait_gone
from testbed.mounts.sweeping import sweep
from testbed.trees import describe, differences, make_zoo

_CHANGES: tuple[str, ...] = (
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.remove",
    "os.utime",
    "os.chmod",
    "os.chown",
)
_CHANGES += ("os.link", "os.symlink", "os.truncate", "shutil.rmtree", "open", "os.setxattr")

DELTA = (
    "cd $0 && rm gone && rm -r folder/old && echo new > folder/new && mkdir -p a/b && "
    "echo x > a/b/c && ln a/b/c folder/c && rm file && mkdir file && echo y > file/y && "
    "rm -r tree && echo z > tree && echo changed > folder/changed && chmod 700 folder"
)


def settings_of(top: Path, node: str) -> Settings:
    flags = {"cache_dir": str(top / node / "cache"), "run_dir": str(top / node / "run")}
    return load_settings({**flags, "store_url": (top / "store").as_uri(), "node": node})


def kill_itself() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_in_child(
    function: Callable[[], object],
    at: int | None,
    act: Callable[[], object] = kill_itself,
) -> int | None:
    """Run `function` in a fork that calls `act` before its change number `at`.

    Return its number of changes, or None if it was killed.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 1
        try:
            count = 0

            def hook(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal count
                if event in _CHANGES:
                    count += 1
                    if count == at:
                        act()

            sys.addaudithook(hook)
            function()
            os.write(writer, str(count).encode())
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    if os.WIFSIGNALED(status):
        return None
    assert os.WEXITSTATUS(status) == 0, "the step failed"
    return int(answer)


def points_of(count: int, wanted: int) -> list[int]:
    return sorted({1 + i * (count - 1) // max(1, wanted - 1) for i in range(wanted)})


def no_leftovers(folder: Path) -> None:
    left = [path for path in folder.rglob(".*") if path.name.startswith((".bootseer", ".tree"))]
    assert left == [], left


def restore_whole(top: Path, wanted: int, mode: str = "extract") -> None:
    """Assert that after a kill a missing target is still missing or complete."""
    target = top / "work/env"
    make_zoo(top / "zoo")
    request = SetupRequest(
        command=["cp", "-a", str(top / "zoo"), str(target)], targets=[str(target)]
    )
    target.parent.mkdir()
    run_setup(settings_of(top, "a"), request)
    node = replace(settings_of(top, "b"), restore_mode=mode)

    def run() -> None:
        result = run_setup(node, request)
        assert result.hit
        assert result.how == "in place" or result.mode == mode, result.mode_reason

    def seen() -> dict[str, dict[str, Any]]:
        return describe(target)

    original = seen()
    shutil.rmtree(target)
    count = run_in_child(run, None)
    assert count is not None
    for point in points_of(count, wanted):
        shutil.rmtree(target, ignore_errors=True)
        # For links, the making of the node's copy is killed, too.
        shutil.rmtree(node.cache_dir, ignore_errors=True)
        killed = run_in_child(run, point) is None
        if target.exists():
            assert differences(original, seen()) == [], point
        assert run_in_child(run, None) is not None
        assert differences(original, seen()) == [], point
        no_leftovers(target.parent)
        no_leftovers(node.cache_dir)
        print(f"{point}/{count} {'killed' if killed else 'finished'}")  # noqa: T201


def restore_linked(top: Path, wanted: int) -> None:
    """Assert the same where files can share blocks, and that no damaged copy on the node is
    used."""
    restore_whole(top, wanted, "link")


def make_base(target: Path) -> None:
    for folder in ("folder/old", "tree"):
        (target / folder).mkdir(parents=True)
    for name in ("gone", "file", "folder/old/x", "folder/changed", "tree/leaf", "kept"):
        (target / name).write_text(name)
    for path in (*target.rglob("*"), target):
        os.utime(path, ns=(10**18, 10**18))


def restore_difference(top: Path, wanted: int) -> None:
    """Assert that after a kill the target is unchanged, or the next run completes it."""
    target = top / "work/env"
    request = SetupRequest(command=["sh", "-e", "-c", DELTA, str(target)], targets=[str(target)])
    make_base(target)
    base = describe(target)
    run_setup(settings_of(top, "a"), request)
    original = describe(target)

    def run() -> None:
        assert run_setup(settings_of(top, "b"), request).hit

    shutil.rmtree(target)
    make_base(target)
    count = run_in_child(run, None)
    assert count is not None
    for point in points_of(count, wanted):
        shutil.rmtree(target)
        make_base(target)
        killed = run_in_child(run, point) is None
        is_base = differences(base, describe(target)) == []
        is_done = differences(original, describe(target)) == []
        journals = list(target.parent.glob(".bootseer-*/commit"))
        assert is_base or is_done or journals, point
        assert run_in_child(run, None) is not None
        assert differences(original, describe(target)) == [], point
        no_leftovers(target.parent)
        print(f"{point}/{count} {'killed' if killed else 'finished'}")  # noqa: T201


def restore_mounted(top: Path, wanted: int, mode: str = "mount") -> None:
    """Assert that after a kill nothing or everything is mounted, and that the next run mounts
    it."""
    target = top / "work/env"
    make_zoo(top / "zoo")
    request = SetupRequest(
        command=["cp", "-a", str(top / "zoo"), str(target)], targets=[str(target)]
    )
    target.parent.mkdir()
    run_setup(settings_of(top, "a"), request)
    original = describe(target)
    shutil.rmtree(target)
    node = replace(settings_of(top, "b"), restore_mode=mode)

    def run() -> None:
        assert run_setup(node, request).mode == mode

    def unmount() -> None:
        if overlay_at(target) is not None:
            unmount_snapshot(node, target)

    try:
        run_in_child(run, None)
        unmount()
        # Counted with the index in the node's cache, as in the runs that follow.
        count = run_in_child(run, None)
        assert count is not None
        for point in points_of(count, wanted):
            unmount()
            killed = run_in_child(run, point) is None
            cover = overlay_at(target)
            if cover is not None and has_users(services_dir(node.run_dir) / cover.id):
                assert differences(original, describe(target)) == [], point
            elif cover is not None and point % 2:
                # An unfinished mount is removed by its server, unless the next run does so first.
                wait_gone(node)
                assert list(target.iterdir()) == []
            assert run_in_child(run, None) is not None
            assert differences(original, describe(target)) == [], point
            print(f"{point}/{count} {'killed' if killed else 'finished'}")  # noqa: T201
        unmount()
        wait_gone(node)
    finally:
        sweep(top, node)


def restore_held(top: Path, wanted: int) -> None:
    """Assert the same for a node's copy below an overlay, where files cannot share blocks."""
    restore_mounted(top, wanted, "link")


def capture_and_publish(top: Path, wanted: int) -> None:
    """Assert that after a kill every listed snapshot can be restored, and the next run works."""
    target = top / "work/env"
    make_zoo(top / "zoo")
    # Enough files that all snapshots but the first are stored as differences.
    (top / "zoo/large").write_bytes(os.urandom(2 << 20))
    target.parent.mkdir()
    counter = top / "runs"
    script = f"echo >> {counter}; cp -a {top}/zoo {target}"

    def request(salt: str) -> SetupRequest:
        return SetupRequest(command=["sh", "-c", script], targets=[str(target)], salt=salt)

    def run(salt: str, node: str) -> None:
        run_setup(settings_of(top, node), request(salt), lease_s=0.5)

    count = run_in_child(lambda: run("first", "a"), None)
    assert count is not None
    original = describe(target)
    for point in points_of(count, wanted):
        salt = f"salt-{point}"
        shutil.rmtree(target)
        killed = run_in_child(lambda salt=salt, point=point: run(salt, "a"), point) is None  # type: ignore[misc]
        with open_store((top / "store").as_uri()) as store:
            for manifest in catalogue.list_all(store):
                assert [catalogue.load_tree(store, one) for one in manifest.targets]
                for blob in (blob for one in manifest.targets for blob in one.blobs):
                    assert store.size(blob_key(blob.digest)) == blob.size_bytes
        shutil.rmtree(target, ignore_errors=True)
        assert run_in_child(lambda salt=salt: run(salt, "b"), None) is not None  # type: ignore[misc]
        assert differences(original, describe(target)) == [], point
        shutil.rmtree(target)
        assert run_in_child(lambda salt=salt: run(salt, "c"), None) is not None  # type: ignore[misc]
        assert differences(original, describe(target)) == [], point
        with open_store((top / "store").as_uri()) as store:
            layered = [manifest.is_layered for manifest in catalogue.list_all(store)]
            assert layered.count(False) == 1
        no_leftovers(target.parent)
        print(f"{point}/{count} {'killed' if killed else 'finished'}")  # noqa: T201


if __name__ == "__main__":
    scenario, directory, points = sys.argv[1:]
    globals()[scenario](Path(directory), int(points))
