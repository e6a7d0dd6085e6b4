"""A blob that was damaged in the store: a mount shows the damage only when it is read."""

import os
import shutil
from pathlib import Path

import pytest

from bootseer.blob.keys import blob_key
from bootseer.prefetch.cache.damage import is_damage_known
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.mounted import unmount_snapshot
from bootseer.store import open_store
from testbed.mounts.image_mounts import run_program
from testbed.mounts.snapshot_mounts import wait_gone
from testbed.waiting import wait_for
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.mounted_jobs import SetupProcess

pytestmark = pytest.mark.needs("mount", "fuse")


def _request(tmp_path: Path) -> tuple[SetupRequest, Path]:
    """Return a set-up whose result cannot be compressed, so that every byte of its blob counts."""
    source, target = tmp_path / "source", tmp_path / "env"
    source.write_bytes(os.urandom(400_000))
    text = f"echo run >> {tmp_path}/runs; mkdir -p {target}; cp -p {source} {target}/data"
    return SetupRequest(command=["sh", "-ec", text], targets=[str(target)]), target


def _damage(node: Settings, key: str) -> None:
    with open_store(node.store_url) as store:
        manifest = catalogue.load(store, key)
    assert manifest is not None
    for target in manifest.targets:
        path = Path(node.store_url.removeprefix("file://")) / blob_key(target.blob.digest)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def _digest(node: Settings, key: str) -> str:
    with open_store(node.store_url) as store:
        manifest = catalogue.load(store, key)
    assert manifest is not None
    return manifest.targets[0].index.digest


def _fails_to_read(path: Path) -> bool:
    code = f"try: open({str(path)!r}, 'rb').read(); print('read')\nexcept OSError: print('failed')"
    return run_program(code) == "failed\n"


@pytest.mark.parametrize("is_taken_off", [True, False])
def test_the_next_start_says_it_and_replaces_it(
    tmp_path: Path, mounting: MakeNode, is_taken_off: bool
) -> None:
    """Regression: every start mounted the damaged snapshot again, and every job was killed by a
    signal."""
    request, target = _request(tmp_path)
    key = run_setup(mounting("a"), request).fingerprint
    shutil.rmtree(target)
    node = mounting("b")
    _damage(node, key)
    assert run_setup(node, request).mode == "mount"
    assert _fails_to_read(target / "data")
    wait_for(lambda: is_damage_known(node.cache_dir, _digest(node, key)), "the note of the damage")
    if is_taken_off:
        unmount_snapshot(node, target)
    said: list[str] = []
    again = run_setup(node, request, report=said.append)
    assert (again.how, again.fingerprint) == ("captured", key)
    warnings = [line for line in said if line.startswith("warning: ")]
    assert any("do not match their digest" in line for line in warnings), said
    assert (target / "data").read_bytes() == (tmp_path / "source").read_bytes()
    # All other nodes get the replaced snapshot, too.
    shutil.rmtree(target)
    other = mounting("c")
    assert run_setup(other, request).mode == "mount"
    assert not _fails_to_read(target / "data")
    unmount_snapshot(other, target)
    wait_gone(node)


def test_what_another_node_has_replaced_is_mounted_again(
    tmp_path: Path, mounting: MakeNode
) -> None:
    request, target = _request(tmp_path)
    key = run_setup(mounting("a"), request).fingerprint
    shutil.rmtree(target)
    node = mounting("b")
    _damage(node, key)
    run_setup(node, request)
    assert _fails_to_read(target / "data")
    _damage(node, key)  # The bit is as it was.
    unmount_snapshot(node, target)
    assert run_setup(node, request).mode == "mount"
    assert not _fails_to_read(target / "data")
    assert not is_damage_known(node.cache_dir, _digest(node, key))
    unmount_snapshot(node, target)
    wait_gone(node)


def test_a_job_that_runs_on_it_keeps_what_it_has(tmp_path: Path, mounting: MakeNode) -> None:
    request, target = _request(tmp_path)
    key = run_setup(mounting("a"), request).fingerprint
    shutil.rmtree(target)
    node = mounting("b")
    _damage(node, key)
    with SetupProcess(node, request) as one:
        assert _fails_to_read(target / "data")
        wait_for(lambda: is_damage_known(node.cache_dir, _digest(node, key)), "the note")
        with SetupProcess(node, request) as two:
            assert two.how == "captured"
            assert Path(f"/proc/{two.pid}/root{target}/data").stat().st_size == 400_000
            Path(f"/proc/{two.pid}/root{target}/data").read_bytes()
            assert os.listdir(target) == ["data"]
            two.end()
        one.end()
    wait_gone(node)
