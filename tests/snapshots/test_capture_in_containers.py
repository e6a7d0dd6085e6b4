"""Changes of a container's set-up outside its targets, as seen in the layers of its root."""

import os
import shutil
from pathlib import Path

import pytest

from bootseer.snapshots import capture as outside_layers
from bootseer.snapshots.capture import OutsideLayers
from bootseer.snapshots.layers import Layers
from testbed.mounts.overlays import overlay
from testbed.needs import require

pytestmark = pytest.mark.needs("mount")


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    require("mount", "fuse")
    lower = tmp_path / "lower"
    for folder in ("etc", "opt/old/deep", "opt/swap", "tmp", "usr/bin", "home", "target"):
        (lower / folder).mkdir(parents=True)
    for file in ("etc/a", "etc/b", "etc/c", "opt/old/deep/x", "opt/swap/x", "usr/bin/tool"):
        (lower / file).write_text("lower")
    return lower


def _begin(layers: Layers) -> OutsideLayers:
    environ = {"HOME": "/home", "UV_CACHE_DIR": "/opt/uv"}
    return OutsideLayers(layers, environ, "/", [layers.root / "target"])


def test_what_is_new_changed_or_gone(lower: Path) -> None:
    with overlay(lower) as layers:
        root = layers.root
        look = _begin(layers)
        assert look.changed().paths == ()
        (root / "etc/a").write_text("changed")
        (root / "etc/b").unlink()
        (root / "etc/c").chmod(0o600)
        (root / "opt/new/below").mkdir(parents=True)
        (root / "opt/new/below/file").touch()
        (root / "opt/empty").mkdir()
        shutil.rmtree(root / "opt/old")
        shutil.rmtree(root / "opt/swap")
        (root / "opt/swap").mkdir()
        (root / "opt/swap/y").touch()
        (root / "usr/bin").chmod(0o700)
        (root / "usr/bin/more").symlink_to("tool")
        (root / "usr/was-dir").mkdir()
        (root / "usr/was-dir").rmdir()
        found = look.changed()
        assert found.is_complete
        assert found.paths == (
            "/etc/a",
            "/etc/b",
            "/etc/c",
            "/opt/empty",
            "/opt/new/below/file",
            "/opt/old",
            "/opt/swap",
            "/opt/swap/y",
            "/usr/bin",
            "/usr/bin/more",
        )
        assert "/etc/ (3 names)" in found.sentence()


def test_what_was_written_before_counts_only_when_it_changes(lower: Path) -> None:
    with overlay(lower) as layers:
        root = layers.root
        for folder in ("opt/kept", "opt/gone/deep", "opt/again"):
            (root / folder).mkdir(parents=True)
        for file in ("opt/kept/a", "opt/kept/b", "opt/gone/deep/x", "opt/again/x", "etc/a"):
            (root / file).write_text("before")
        (root / "etc/b").unlink()
        (root / "etc/c").unlink()
        look = _begin(layers)
        (root / "opt/kept/a").write_text("changed")
        os.utime(root / "opt/kept/a", (1, 1))
        (root / "opt/kept/b").rename(root / "opt/kept/c")
        shutil.rmtree(root / "opt/gone")
        (root / "opt/again/x").unlink()
        (root / "etc/c").touch()
        (root / "opt/kept").chmod(0o700)
        assert look.changed().paths == (
            "/etc/c",
            "/opt/again/x",
            "/opt/gone",
            "/opt/kept",
            "/opt/kept/a",
            "/opt/kept/b",
            "/opt/kept/c",
        )


def test_caches_temporary_files_and_the_targets_do_not_count(lower: Path) -> None:
    with overlay(lower) as layers:
        look = _begin(layers)
        for folder in ("tmp", "home/.cache/pip", "opt/uv", "target/deep", "new/__pycache__"):
            (layers.root / folder).mkdir(parents=True, exist_ok=True)
            (layers.root / folder / "file").touch()
        (layers.root / "etc/ld.so.cache").touch()
        (layers.root / "etc/a.pyc").touch()
        assert look.changed().paths == ()
        whole = OutsideLayers(layers, {}, "/", [layers.root])
        (layers.root / "etc/b").unlink()
        assert whole.changed().paths == ()
        assert look.changed().paths == ("/etc/b",)


def test_the_look_is_bounded(lower: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_layers, "NAMES_MAX", 5)
    with overlay(lower) as layers:
        look = _begin(layers)
        for number in range(10):
            (layers.root / f"etc/{number}").mkdir()
        (layers.root / "etc/0/file").touch()
        found = look.changed()
        assert not found.is_complete
        assert set(found.paths) <= {f"/etc/{number}" for number in range(1, 10)}
        assert not _begin(layers).changed().is_complete
