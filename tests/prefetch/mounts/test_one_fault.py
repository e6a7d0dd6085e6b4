"""One fault of a served tree, followed through the code from the kernel's request to the page."""

import hashlib
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.serve.tree_fs import TreeFileSystem
from bootseer.prefetch.streams.streams import BlobStreams
from testbed.mounts.fuse_mount import check_python, mounted
from testbed.paths import REPOSITORY
from tests.support.images.stored_image import INDEX, stored_image

pytestmark = pytest.mark.needs("fuse")

READ = """
import hashlib, sys
with open(sys.argv[1], "rb", buffering=0) as file:
    print(hashlib.sha256(file.read(4096)).hexdigest())
"""
WAY = ["fuse.kernel", "prefetch", "blob", "transfer", "store"]
"""Packages, in the order in which the fault enters them."""
GROUND = {"base", "errors", "linux"}
"""What every package stands on: checksums, the exceptions, the kernel's doors."""


def _layer_of(module: str, layers: list[str]) -> str:
    """The package of a module: the contract's layer that it lies in."""
    name = module.removeprefix("bootseer.")
    return next(one for one in layers if name == one or name.startswith(f"{one}."))


def _layers() -> list[str]:
    """The packages of the house, from the highest to the lowest, as import-linter holds them."""
    document = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contract = document["tool"]["importlinter"]["contracts"][0]
    return [name.strip() for line in contract["layers"] for name in line.split("|")]


@contextmanager
def _following(called: list[str]) -> Iterator[threading.Event]:
    """Notes the module of each function of ours that is called, in any thread that is started in
    the `with` block, while the event is set."""
    is_on = threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and is_on.is_set():
            module = frame.f_globals.get("__name__", "")
            if module.startswith("bootseer."):
                called.append(module)

    before = threading.getprofile()
    threading.setprofile(note)
    try:
        yield is_on
    finally:
        is_on.clear()
        threading.setprofile(before)


def test_one_fault_crosses_five_packages_inwards(tmp_path: Path) -> None:
    image = stored_image(tmp_path)
    called: list[str] = []
    with _following(called) as is_on:
        streams = BlobStreams(
            image.tree.blobs,
            image.store.read_into,
            NodeCache(tmp_path / "cache"),
            deadline_s=20.0,
            claimant=INDEX,
        )
        with mounted(TreeFileSystem(image.tree, streams), tmp_path / "mnt"):
            is_on.set()
            found = check_python(READ, tmp_path / "mnt/middle").strip()
            is_on.clear()
        streams.close()
    assert found == hashlib.sha256(image.contents["middle"][:4096]).hexdigest()
    layers = _layers()
    crossed = list(dict.fromkeys(_layer_of(module, layers) for module in called))
    assert [package for package in crossed if package not in GROUND] == WAY
    # `fuse.kernel` and `transfer` call what they were given; every import points inwards.
    for module in set(called):
        own = layers.index(_layer_of(module, layers))
        imported = [name for name in _imports_of(module) if name.startswith("bootseer.")]
        outward = [one for one in imported if layers.index(_layer_of(one, layers)) < own]
        assert not outward, f"{module} imports {outward}"


def _imports_of(module: str) -> set[str]:
    """The modules of ours whose functions and classes are bound in a module."""
    values = vars(sys.modules[module]).values()
    return {getattr(value, "__module__", "") or "" for value in values}
