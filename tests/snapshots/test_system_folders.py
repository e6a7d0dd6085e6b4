"""Folders to which another user's snapshot may be restored without the user's consent."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import InvalidInputError
from bootseer.snapshots import catalogue
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.manifest import Manifest
from bootseer.snapshots.restore import restore_snapshot
from bootseer.snapshots.staging import why_guarded
from bootseer.store import open_store
from tests.snapshots.conftest import MakeNode

HOME = Path("/home/ann")


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "/etc",
            "/etc/cron.d",
            "/usr",
            "/usr/bin",
            "/usr/local/bin",
            "/bin",
            "/lib64/security",
        ),
        *("/var/spool/cron", "/run/systemd/system", "/dev", "/dev/shm", "/var/tmp", "/proc/sys"),
        *(
            "/root",
            "/root/.ssh",
            "/home",
            "/home/ann",
            "/home/ann/.ssh",
            "/home/bob/.config/systemd",
        ),
        *("/home/ann/.local/bin", "/home/bob"),
    ],
)
def test_what_is_guarded(path: str) -> None:
    assert why_guarded(Path(path), HOME)


@pytest.mark.parametrize(
    "path",
    [
        *("/opt/env", "/env", "/scratch/env", "/tmp/env", "/dev/shm/env", "/var/tmp/env"),
        *("/home/ann/env", "/home/ann/.venv", "/home/ann/project/.venv", "/home/bob/.conda/envs/x"),
        *("/root/env", "/etcetera", "/data/home/.ssh"),
    ],
)
def test_what_is_free(path: str) -> None:
    assert not why_guarded(Path(path), HOME)


def _of_a_stranger(manifest: Manifest, path: bytes) -> Manifest:
    """Return a manifest with the same content for another target."""
    (target,) = manifest.targets
    return replace(manifest, targets=(replace(target, path=path),))


def test_a_strangers_snapshot_does_not_choose_where_it_goes(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a restore by name wrote to any path in the manifest without asking."""
    node = make_node("a")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    source = tmp_path / "source"
    source.mkdir()
    (source / "authorized_keys").write_text("a stranger's")
    manifest = create_snapshot(node, [str(source)])
    evil = home / ".ssh"
    with open_store(node.store_url) as store:
        found = catalogue.find(store, manifest.fingerprint)
        monkeypatch.setattr(catalogue, "find", lambda *_: _of_a_stranger(found, bytes(evil)))
        said: list[str] = []
        with pytest.raises(InvalidInputError, match="--system"):
            restore_snapshot(node, "env", report=said.append)
        assert said == [f"restoring to '{evil}'"]
        assert not evil.exists()
        # Nor through a symbolic link.
        link = tmp_path / "link"
        link.symlink_to(home)
        monkeypatch.setattr(
            catalogue, "find", lambda *_: _of_a_stranger(found, bytes(link / ".ssh"))
        )
        with pytest.raises(InvalidInputError, match="--system"):
            restore_snapshot(node, "env")
        assert not evil.exists()
        restore_snapshot(node, "env", allows_system=True)
        assert (evil / "authorized_keys").read_text() == "a stranger's"
