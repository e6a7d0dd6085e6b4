"""Nodes: settings with a cache and a run directory of their own, and one store for all."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.config import Settings, load_settings

MakeNode = Callable[[str], Settings]


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeNode:
    """`make_node("a")`: the settings of a node that shares only the store with the others."""
    monkeypatch.delenv("BOOTSEER_IMAGE", raising=False)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)

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
