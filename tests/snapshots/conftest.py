"""Fixtures for nodes: settings with a cache and a run directory each, and one store for all."""

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
    """Keep privileges in restores, so that trees are exact; test_privileges.py tests dropping
    them."""
    monkeypatch.setenv("BOOTSEER_RESTORE_PRIVILEGES", "on")


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeNode:
    """`make_node("a")` returns the settings of a node that shares only the store with the
    others."""
    monkeypatch.delenv("BOOTSEER_IMAGE", raising=False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    # Each run asks `python3` about itself: this interpreter answers at once, while a shim of
    # pyenv's starts ten.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def make(name: str) -> Settings:
        return load_settings(
            {
                "store_url": (tmp_path / "store").as_uri(),
                "cache_dir": str(tmp_path / "nodes" / name / "cache"),
                "run_dir": str(tmp_path / "nodes" / name / "run"),
                "node": name,
                "deadline_s": "20",
                # A mount that serves itself would outlive its test.
                "restore_mode": "extract",
            }
        )

    return make


@pytest.fixture
def mounting(tmp_path: Path, make_node: MakeNode) -> Iterator[MakeNode]:
    """Nodes that may mount; at the end no mount, server or publisher is left."""
    require("root", "fuse")
    nodes: list[Settings] = []

    def make(name: str) -> Settings:
        nodes.append(replace(make_node(name), restore_mode="mount"))
        return nodes[-1]

    yield make
    sweep(tmp_path, *nodes)


@pytest.fixture(params=["mount", "link"])
def covering(mounting: MakeNode, request: pytest.FixtureRequest, tmp_path: Path) -> MakeNode:
    """Nodes that put overlays on targets, over served trees or over kept ones."""
    if request.param == "link" and can_reflink(tmp_path):
        raise MissingError("files here can share their blocks: nothing is mounted to link them")

    def make(name: str) -> Settings:
        return replace(mounting(name), restore_mode=request.param)

    return make


@pytest.fixture
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the surrounding configuration of pip and other tools."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "PYTHON", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    # Without this, files have more links than the environment's own.
    monkeypatch.setenv("UV_LINK_MODE", "copy")
