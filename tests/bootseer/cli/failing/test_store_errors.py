"""Commands with a damaged, foreign or full store: one sentence, and no change."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.needs import MissingError, require
from tests.bootseer.cli.conftest import World
from tests.bootseer.cli.failing.promises import (
    CORRUPT,
    DENIED,
    EXISTS,
    IMAGE_READERS,
    INVALID,
    NO_SPACE,
    NOT_FOUND,
    SNAPSHOT_READERS,
    STORE_COMMANDS,
    UNKNOWN,
    check,
    damage,
    listing,
)


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "noise", "nul"])
@pytest.mark.parametrize("what", ["indexes", "blobs"])
def test_damaged_objects(own_world: World, what: str, how: str) -> None:
    own_world.forget()
    for path in own_world.path("store").glob(f"{what}/*/*"):
        damage(path, how)
    before = listing(own_world.path("store"))
    readers = [*IMAGE_READERS, *SNAPSHOT_READERS]
    if what == "blobs":
        # Names come from the index; only what reads contents finds a bad blob.
        readers = [IMAGE_READERS[1], SNAPSHOT_READERS[1]]
    for arguments in readers:
        check(own_world(*arguments), CORRUPT)
    assert listing(own_world.path("store")) == before
    assert not own_world.path("restored").exists()
    assert not own_world.path("mnt").is_mount()
    assert not list(own_world.base.glob(".bootseer-*"))


def test_objects_that_were_exchanged(own_world: World) -> None:
    """Each object is whole, and has the wrong name."""
    assert own_world("image", "index", "src/lib", "--name", "other:1").code == 0
    for what in ("indexes", "blobs"):
        own_world.forget()
        one, two, *_ = sorted(own_world.path("store").glob(f"{what}/*/*"))
        data = one.read_bytes(), two.read_bytes()
        one.write_bytes(data[1])
        two.write_bytes(data[0])
        check(own_world("image", "fetch", "image:1"), CORRUPT)
        check(own_world("snapshot", "restore", "env", "--to", "restored"), CORRUPT)
        one.write_bytes(data[0])
        two.write_bytes(data[1])
    assert not own_world.path("restored").exists()


@pytest.mark.parametrize("how", ["truncate", "empty", "noise", "nul", "deep"])
def test_damaged_records(own_world: World, how: str) -> None:
    own_world.forget()
    store = own_world.path("store")
    for path in (*store.glob("images/*.json"), *store.glob("snapshots/*.json")):
        damage(path, how)
    for arguments in (*IMAGE_READERS, ("image", "show", "image:1"), *SNAPSHOT_READERS):
        check(own_world(*arguments), CORRUPT)
    # One bad record does not hide the others from a list: it is left out, with a warning or not.
    for arguments in (("image", "list"), ("snapshot", "list")):
        result = own_world(*arguments)
        assert result.code in (0, CORRUPT), result
        assert "Traceback" not in result.err


def test_missing_objects(own_world: World) -> None:
    own_world.forget()
    shutil.rmtree(own_world.path("store/blobs"))
    check(own_world("image", "fetch", "image:1"), NOT_FOUND, "blobs")
    check(own_world("snapshot", "restore", "env", "--to", "restored"), NOT_FOUND, "blobs")
    shutil.rmtree(own_world.path("store/indexes"))
    own_world.forget()
    check(own_world("image", "ls", "image:1"), CORRUPT, "index it again")
    check(own_world("image", "mount", "image:1", "mnt"), CORRUPT, "index it again")
    assert not own_world.path("restored").exists()


def test_unknown_format_versions(own_world: World) -> None:
    own_world.forget()
    store = own_world.path("store")
    for path in (*store.glob("images/*.json"), *store.glob("snapshots/*.json")):
        text = path.read_text()
        assert '"version": 1' in text
        document = {**json.loads(text), "version": 99}
        # That of the release which wrote it would be right.
        document.pop("checksum", None)
        document.pop("digest", None)
        path.write_text(json.dumps(document))
    for arguments in (*IMAGE_READERS, ("image", "show", "image:1"), *SNAPSHOT_READERS):
        check(own_world(*arguments), UNKNOWN, "99")
    assert not own_world.path("restored").exists()


@pytest.fixture
def root_only() -> None:
    require("root")


@pytest.mark.usefixtures("root_only")
def test_folders_that_belong_to_somebody_else(own_world: World) -> None:
    """The store, the cache and the run directory belong to root, and are private."""
    world = own_world
    # What nobody may enter down to the world; the world's own folders are what is refused.
    for folder in (world.base, *world.base.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    world.path("locked").mkdir(mode=0o700)
    world.path("secret").write_text("x")
    world.path("secret").chmod(0o600)
    for arguments in STORE_COMMANDS:
        if arguments[0] == "run":
            continue
        check(world(*arguments, nobody=True), DENIED, "ermission")
    cases: list[tuple[tuple[str, ...], dict[str, str]]] = [
        (("image", "index", "locked"), {}),
        (("image", "index", "secret"), {}),
        (("snapshot", "create", "--target", "locked"), {}),
        (("checkpoint", "mount", "locked", "mnt"), {}),
        (("report",), {"BOOTSEER_TIMELINE_DIR": str(world.path("locked/x"))}),
        (("config",), {"BOOTSEER_CONFIG": str(world.path("secret"))}),
    ]
    for case, variables in cases:
        check(world(*case, nobody=True, **variables), (DENIED, 18), "")


@pytest.fixture
def tiny(own_world: World) -> Iterator[Path]:
    """Yield a file system of 128 KiB."""
    folder = own_world.path("tiny")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise MissingError("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.usefixtures("root_only")
def test_a_full_store_is_told_and_nothing_is_left_in_it(own_world: World, tiny: Path) -> None:
    world = own_world
    for arguments in (("image", "index", "src"), ("snapshot", "create", "--target", "src")):
        result = world("--store", (tiny / "store").as_uri(), *arguments)
        check(result, NO_SPACE, str(tiny))
        left = [path for path in (tiny / "store").rglob("*") if path.is_file()]
        assert [path.name for path in left] == [".bootseer.store"], left
        shutil.rmtree(tiny / "store")
        # Else it would be a store that has vanished.
        shutil.rmtree(world.path("cache/stores"))
    check(world("snapshot", "restore", "env", "--to", tiny / "restored"), NO_SPACE, str(tiny))
    assert not list(tiny.iterdir())
    (tiny / "fill").write_bytes(bytes(120_000))
    world.path("cache").rename(world.path("old-cache"))
    result = world("--cache-dir", tiny / "cache", "image", "fetch", "image:1")
    # The cache and the node's catalogue have warned by themselves before.
    assert result.err.count("\n") == 3
    check(replace(result, err=result.err.splitlines()[-1]), NO_SPACE, str(tiny))


@pytest.mark.parametrize("setting", ["--cache-dir", "--run-dir"])
def test_a_folder_of_the_node_that_cannot_be_made(world: World, setting: str) -> None:
    for below in ("text", "text/below", "/proc/nothing"):
        result = world(setting, below, "image", "mount", "image:1", "mnt")
        check(result, (NOT_FOUND, EXISTS, INVALID, DENIED), below.partition("/")[0])
        assert not world.path("mnt").is_mount()
