"""Snapshots linked from extracted trees on the node: reflinks, and the trees themselves."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import BusyError, UnsupportedError
from bootseer.settings.config import Settings, load_settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.node_trees import NodeTrees, is_whole
from bootseer.store import open_store
from testbed.needs import MissingError, require
from testbed.trees import describe, differences, make_zoo
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.crash_driver import DELTA, make_base
from tests.snapshots.support.driving import run_driver

_TIMEOUT_S = 60.0


@pytest.fixture
def reflinking(tmp_path: Path) -> Iterator[Path]:
    """Folder on a file system whose files can share blocks."""
    with _file_system(tmp_path, 320 * 2**20, "mkfs.xfs", "-q") as top:
        yield top


@pytest.fixture
def coarse(tmp_path: Path) -> Iterator[Path]:
    """Folder on a file system with times in whole seconds: ext4 with inodes of 128 bytes."""
    options = ("-q", "-F", "-I", "128", "-O", "^has_journal")
    with _file_system(tmp_path, 64 * 2**20, "mkfs.ext4", *options) as top:
        yield top


@contextlib.contextmanager
def _file_system(folder: Path, size_bytes: int, make: str, *options: str) -> Iterator[Path]:
    """Yield a folder on a new file system in a file."""
    require("root")
    if not shutil.which(make):
        raise MissingError(f"needs {make}")
    image, top = folder / "image", folder / "mnt"
    top.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    command = [make, *options, str(image)]
    subprocess.run(command, check=True, timeout=_TIMEOUT_S, stderr=subprocess.DEVNULL)
    done = subprocess.run(
        ["mount", "-o", "loop", str(image), str(top)], check=False, timeout=_TIMEOUT_S
    )
    if done.returncode != 0:
        raise MissingError(f"what {make} has made cannot be mounted here")
    try:
        yield top
    finally:
        subprocess.run(["umount", "--lazy", str(top)], check=True, timeout=_TIMEOUT_S)


def _node(top: Path, name: str, mode: str) -> Settings:
    settings = load_settings(
        {
            "store_url": (top / "store").as_uri(),
            "cache_dir": str(top / name / "cache"),
            "run_dir": str(top / name / "run"),
            "node": name,
        }
    )
    return replace(settings, restore_mode=mode)


def _zoo(top: Path) -> tuple[SetupRequest, Path]:
    target = top / "work/env"
    make_zoo(top / "zoo")
    target.parent.mkdir()
    return SetupRequest(
        command=["cp", "-a", str(top / "zoo"), str(target)], targets=[str(target)]
    ), target


def _tree_digest(node: Settings) -> str:
    with open_store(node.store_url) as store:
        (manifest,) = catalogue.list_all(store)
    return manifest.targets[0].index.digest


def test_reflinks_are_the_original_and_writes_stay_out_of_the_cache(reflinking: Path) -> None:
    request, target = _zoo(reflinking)
    original = describe(reflinking / "zoo")
    node = _node(reflinking, "a", "link")
    run_setup(node, request)
    for _ in range(2):
        shutil.rmtree(target)
        result = run_setup(node, request)
        assert (result.how, result.mode) == ("restored", "link")
        assert "share their blocks" in result.mode_reason
        assert differences(original, describe(target)) == []
        (target / "small").write_text("written by a job")
        with (target / "large").open("r+b") as file:
            file.write(b"written in place")
    # The second restore came from the tree: only the index was fetched.
    assert result.moved_bytes < 100_000
    assert differences(original, describe(NodeTrees(node).path(_tree_digest(node)))) == []
    # Since the tree is here, linking is chosen.
    shutil.rmtree(target)
    assert run_setup(replace(node, restore_mode="auto"), request).mode == "link"


def test_a_reflinked_difference_is_the_original(reflinking: Path) -> None:
    target = reflinking / "work/env"
    make_base(target)
    request = SetupRequest(command=["sh", "-e", "-c", DELTA, str(target)], targets=[str(target)])
    node = _node(reflinking, "a", "link")
    run_setup(node, request)
    original = describe(target)
    shutil.rmtree(target)
    make_base(target)
    assert run_setup(node, request).mode == "link"
    assert differences(original, describe(target)) == []


def test_killed_while_blocks_are_shared(reflinking: Path) -> None:
    lines = run_driver("crash_driver.py", "restore_linked", reflinking, 3)
    assert sum(line.endswith("killed") for line in lines) >= 2


def test_trees_in_use_are_not_removed(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    trees = NodeTrees(node)
    digests = []
    for name in ("one", "two", "three"):
        target = tmp_path / name
        text = f"mkdir {target}; head -c 50000 /dev/zero > {target}/file"
        request = SetupRequest(command=["sh", "-ec", text], targets=[str(target)], salt=name)
        run_setup(node, request)
        with open_store(node.store_url) as store:
            newest = next(iter(catalogue.list_all(store)))
            tree = catalogue.load_tree(store, newest.targets[0])
        digests.append(newest.targets[0].index.digest)
        with trees.using(digests[-1], tree, partial(shutil.copytree, target)):
            pass
        lock = trees.path(digests[-1]).with_suffix(".lock")
        os.utime(lock, ns=(len(digests), len(digests)))

    def build(path: Path) -> None:
        pytest.fail("the tree is whole")

    with trees.using(digests[2], tree, build) as (path, _):
        # Make it the least recently used tree.
        os.utime(path.with_suffix(".lock"), ns=(0, 0))
        assert trees.trim(60_000) == 2
        assert [trees.has(digest) for digest in digests] == [False, False, True]
        # Nor is a damaged tree replaced while it is used.
        (path / "file").write_bytes(b"")
        assert not is_whole(path, tree)
        impatient = NodeTrees(replace(node, deadline_s=0.1))
        with contextlib.ExitStack() as stack, pytest.raises(BusyError, match="in use"):
            stack.enter_context(impatient.using(digests[2], tree, build))
    assert trees.trim(0) == 1
    assert list(trees.directory.iterdir()) == []


def test_a_file_system_that_keeps_whole_seconds_has_trees(
    coarse: Path, tmp_path: Path, make_node: MakeNode
) -> None:
    """Regression: the tree looked changed at each look, and was extracted again without end."""
    node = replace(make_node("a"), cache_dir=coarse / "cache")
    # Made on a file system with finer times.
    elsewhere = tmp_path / "env"
    text = f"mkdir {elsewhere}; for i in 1 2 3; do echo $i > {elsewhere}/$i; done"
    request = SetupRequest(command=["sh", "-ec", text], targets=[str(elsewhere)])
    run_setup(make_node("maker"), request)
    with open_store(node.store_url) as store:
        (manifest,) = catalogue.list_all(store)
        tree = catalogue.load_tree(store, manifest.targets[0])
    trees = NodeTrees(node)
    built = []

    def build(path: Path) -> None:
        built.append(path)
        shutil.copytree(elsewhere, path)

    for _ in range(3):
        with trees.using(manifest.targets[0].index.digest, tree, build) as (path, _):
            assert (path / "3").read_text() == "3\n"
    assert len(built) == 1
    (path / "3").write_text("x\n")
    os.utime(path / "3", ns=(0, 0))
    assert not is_whole(path, tree)


def test_a_tree_that_does_not_stay_as_it_was_is_extracted_once(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """The set-up is then restored by extraction, with one warning."""
    target = tmp_path / "env"
    text = f"mkdir {target}; echo 1 > {target}/file"
    request = SetupRequest(command=["sh", "-ec", text], targets=[str(target)])
    node = make_node("a")
    run_setup(node, request)
    with open_store(node.store_url) as store:
        (manifest,) = catalogue.list_all(store)
        tree = catalogue.load_tree(store, manifest.targets[0])
    built = []

    def build(path: Path) -> None:
        built.append(path)
        shutil.copytree(target, path)
        os.utime(path / "file", ns=(7 * 10**9, 7 * 10**9))

    with contextlib.ExitStack() as stack, pytest.raises(UnsupportedError, match="does not keep"):
        stack.enter_context(NodeTrees(node).using("sha256:" + "0" * 64, tree, build))
    assert len(built) == 1
