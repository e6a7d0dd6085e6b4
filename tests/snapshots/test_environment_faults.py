"""`run_setup` without a store, on full disks, and with damage: the set-up command decides."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import SetupFailedError
from bootseer.snapshots import catalogue
from bootseer.snapshots.catalogue import Verifier
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.store import open_store
from testbed.needs import MissingError
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.counted import counted_request, runs


@pytest.mark.parametrize(
    "url", ["file:///proc/nowhere/store", "hdfs://127.0.0.1:1/x?deadline_s=2", "nosuch://x"]
)
def test_without_a_store_the_command_just_runs(
    tmp_path: Path, make_node: MakeNode, url: str
) -> None:
    said: list[str] = []
    node = replace(make_node("a"), store_url=url, deadline_s=2.0)
    result = run_setup(node, counted_request(tmp_path), report=said.append)
    assert result.how == "ran"
    assert (tmp_path / "env/file").read_text() == "Linux\n"
    assert runs(tmp_path) == 1
    assert len([sentence for sentence in said if sentence.startswith("warning")]) == 1


def test_a_corrupt_snapshot_is_replaced(tmp_path: Path, make_node: MakeNode) -> None:
    request = counted_request(tmp_path)
    first = run_setup(make_node("a"), request)
    shutil.rmtree(tmp_path / "env")
    for blob in (tmp_path / "store/blobs/blake3").iterdir():
        blob.chmod(0o600)
        data = bytearray(blob.read_bytes())
        data[5] ^= 0xFF
        blob.write_bytes(data)
    said: list[str] = []
    result = run_setup(make_node("b"), request, report=said.append)
    assert (result.how, result.fingerprint) == ("captured", first.fingerprint)
    assert len([sentence for sentence in said if sentence.startswith("warning")]) == 1
    shutil.rmtree(tmp_path / "env")
    assert run_setup(make_node("c"), request).how == "restored"
    assert runs(tmp_path) == 2


def test_a_manifest_that_was_changed_is_refused_and_replaced(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """Regression: a changed list of deletions removed another file, and verify reported no
    damage."""
    env = tmp_path / "env"

    def prepare() -> None:
        env.mkdir()
        (env / "old").write_text("1")
        (env / "precious").write_text("2")

    prepare()
    request = SetupRequest(["rm", str(env / "old")], targets=[str(env)])
    first = run_setup(make_node("a"), request)
    file = tmp_path / f"store/snapshots/{first.fingerprint}.json"
    file.chmod(0o600)
    file.write_text(file.read_text().replace('"old"', '"precious"'))
    with open_store(make_node("a").store_url) as store:
        (problem,) = Verifier(store).check(first.fingerprint).problems
    assert f"{first.fingerprint} does not match its digest" in problem
    shutil.rmtree(env)
    prepare()
    said: list[str] = []
    result = run_setup(make_node("b"), request, report=said.append)
    assert (result.how, result.fingerprint) == ("captured", first.fingerprint)
    assert len([one for one in said if "does not match its digest" in one]) == 1
    assert os.listdir(env) == ["precious"]
    with open_store(make_node("a").store_url) as store:
        assert Verifier(store).check(first.fingerprint).problems == ()


@pytest.mark.needs("root")
def test_a_full_disk(tmp_path: Path, make_node: MakeNode) -> None:
    """The disk is too small for the snapshot: no part of it appears, and the set-up's command
    runs."""
    (tmp_path / "disk").mkdir()
    target = tmp_path / "disk/env"
    script = f"mkdir {target}; head -c 3000000 /dev/urandom > {target}/file"
    request = SetupRequest(command=["sh", "-e", "-c", script], targets=[str(target)])
    run_setup(make_node("a"), request)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        raise MissingError("tmpfs cannot be mounted here")
    try:
        said: list[str] = []
        with pytest.raises(SetupFailedError):
            run_setup(make_node("b"), request, report=said.append)
        assert "bytes" in said[-1]
        assert os.listdir(tmp_path / "disk") == ["env"]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=False)


@pytest.mark.parametrize("where", ["nodes/a/cache", "store"])
@pytest.mark.needs("root")
def test_a_full_disk_elsewhere(tmp_path: Path, make_node: MakeNode, where: str) -> None:
    """The set-up has run but is not stored: there is one warning, which names the folder."""
    target, small = tmp_path / "env", tmp_path / where
    script = (
        f"echo run >> {tmp_path}/runs; mkdir {target}; head -c 3000000 /dev/urandom > {target}/f"
    )
    request = SetupRequest(command=["sh", "-e", "-c", script], targets=[str(target)])
    small.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        raise MissingError("tmpfs cannot be mounted here")
    try:
        said: list[str] = []
        assert run_setup(make_node("a"), request, report=said.append).how == "ran"
        (warning,) = [line for line in said if line.startswith("warning")]
        assert str(small) in warning
        assert "No space left" in warning
        # The partial file is removed.
        assert not [
            path for path in small.rglob("*") if path.is_file() and path.stat().st_size > 9000
        ]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)
    shutil.rmtree(target)
    # The first node does not make a new store where one was.
    assert run_setup(make_node("b"), request).how == "captured"
    assert runs(tmp_path) == 2


def test_a_cache_that_cannot_be_written(tmp_path: Path, make_node: MakeNode) -> None:
    request = counted_request(tmp_path)
    (tmp_path / "file").write_text("x")
    node = replace(make_node("a"), cache_dir=tmp_path / "file/cache")
    said: list[str] = []
    assert run_setup(node, request, report=said.append).how == "ran"
    assert said[-1].startswith("warning: the set-up ran but was not stored")
    shutil.rmtree(tmp_path / "env")
    assert run_setup(make_node("b"), request).how == "captured"
    shutil.rmtree(tmp_path / "env")
    assert run_setup(node, request).how == "restored"


def test_a_failed_setup_publishes_nothing(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    with pytest.raises(SetupFailedError) as failure:
        run_setup(node, counted_request(tmp_path, "exit 7"))
    assert failure.value.exit_code == 7
    with pytest.raises(SetupFailedError) as failure:
        run_setup(node, counted_request(tmp_path, "kill -9 $$"))
    assert failure.value.exit_code == 128 + 9
    with pytest.raises(SetupFailedError) as failure:
        run_setup(node, SetupRequest(command=["/no/such/program"], targets=[str(tmp_path / "env")]))
    assert failure.value.exit_code == 127
    with open_store(node.store_url) as store:
        assert list(catalogue.list_all(store)) == []
        assert list(store.list("leases/")) == []
