"""Nodes: settings with a cache and a run directory of their own, and one store for all."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.settings.config import Settings, load_settings
from testbed.mounts.snapshot_mounts import can_reflink
from testbed.mounts.sweeping import sweep
from testbed.needs import MissingError, require

MakeNode = Callable[[str], Settings]


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is restored is what was captured, to the last bit; test_privileges is about the rest."""
    monkeypatch.setenv("BOOTSEER_RESTORE_PRIVILEGES", "on")


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeNode:
    """`make_node("a")`: the settings of a node that shares only the store with the others."""
    monkeypatch.delenv("BOOTSEER_IMAGE", raising=False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    # Each run asks `python3` about itself: ours answers at once, a shim of pyenv's runs ten.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def make(name: str) -> Settings:
        return load_settings(
            {
                "store_url": (tmp_path / "store").as_uri(),
                "cache_dir": str(tmp_path / "nodes" / name / "cache"),
                "run_dir": str(tmp_path / "nodes" / name / "run"),
                "node": name,
                "deadline_s": "20",
                # What is mounted by itself would outlive its test.
                "restore_mode": "extract",
            }
        )

    return make


@pytest.fixture
def mounting(tmp_path: Path, make_node: MakeNode) -> Iterator[MakeNode]:
    """Nodes that mount; whatever happens, no mount, no server and no publisher stays."""
    require("root", "fuse")
    nodes: list[Settings] = []

    def make(name: str) -> Settings:
        nodes.append(replace(make_node(name), restore_mode="mount"))
        return nodes[-1]

    yield make
    sweep(tmp_path, *nodes)


@pytest.fixture(params=["mount", "link"])
def covering(mounting: MakeNode, request: pytest.FixtureRequest, tmp_path: Path) -> MakeNode:
    """Nodes that put overlays on targets, over trees that are served or that they keep."""
    if request.param == "link" and can_reflink(tmp_path):
        raise MissingError("files here can share their blocks: nothing is mounted to link them")

    def make(name: str) -> Settings:
        return replace(mounting(name), restore_mode=request.param)

    return make


@pytest.fixture
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the surrounding configuration decides what the tools do."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "PYTHON", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    # Else files have more links than there are in the environment.
    monkeypatch.setenv("UV_LINK_MODE", "copy")
