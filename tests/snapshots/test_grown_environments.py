"""Environments that grew since a snapshot: fetched, kept and checked content."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.base.documents import members_digest
from bootseer.blob.keys import blob_key
from bootseer.errors import CorruptError, NotFoundError
from bootseer.gc.collect import collect
from bootseer.gc.inventory import take_inventory
from bootseer.gc.plan import Rules, make_plan
from bootseer.launch.formats import FORMATS
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.catalogue import Verifier
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.fetch import fetch_tree
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.manifest import Manifest, decode, encode
from bootseer.snapshots.mounted import unmount_snapshot
from bootseer.store import Store, open_store
from testbed.mounts.snapshot_mounts import wait_gone
from testbed.mounts.sweeping import sweep
from testbed.needs import require
from testbed.trees import describe, differences
from tests.snapshots.conftest import MakeNode


def _request(top: Path) -> tuple[SetupRequest, Path]:
    """Return a set-up that makes an environment of the files in `top/wanted`; their list is an
    input."""
    target = top / "env"
    (top / "wanted").mkdir(exist_ok=True)
    _add(top, "first", 3_000_000)
    # The files that find(1) finds are not known to be inputs.
    script = f"mkdir {target}; find {top}/wanted -type f -exec cp -t {target} {{}} +"
    command = ["sh", "-ec", script, str(top / "list")]
    return SetupRequest(command=command, targets=[str(target)], inputs=[str(top / "list")]), target


def _add(top: Path, name: str, size_bytes: int) -> None:
    (top / "wanted" / name).write_bytes(random.Random(name).randbytes(size_bytes))
    (top / "list").write_text("\n".join(sorted(os.listdir(top / "wanted"))))


def _load(node: Settings, fingerprint: str) -> Manifest:
    with open_store(node.store_url) as store:
        return catalogue.find(store, fingerprint)


def _grown(tmp_path: Path, node: Settings) -> tuple[SetupRequest, Path, Manifest, Manifest]:
    """Return a set-up, its target, and its snapshots before and after a file was added."""
    request, target = _request(tmp_path)
    first = run_setup(node, request)
    shutil.rmtree(target)
    _add(tmp_path, "second", 50_000)
    second = run_setup(node, request)
    assert (first.how, second.how) == ("captured", "captured")
    assert second.moved_bytes < 100_000 < first.moved_bytes
    return request, target, _load(node, first.fingerprint), _load(node, second.fingerprint)


@pytest.mark.needs("root", "fuse")
def test_a_node_that_has_read_the_earlier_one_fetches_the_difference(
    tmp_path: Path, make_node: MakeNode
) -> None:
    request, target, first, _ = _grown(tmp_path, make_node("a"))
    original = describe(target)
    shutil.rmtree(target)
    node = replace(make_node("b"), restore_mode="mount")
    wanted = (tmp_path / "list").read_text()
    try:
        (tmp_path / "list").write_text("first")
        assert run_setup(node, request).how == "restored"
        assert len((target / "first").read_bytes()) == 3_000_000
        unmount_snapshot(node, target)
        wait_gone(node)
        # Content fetched from it now would be wrong.
        blob = tmp_path / "store" / blob_key(first.targets[0].blob.digest)
        blob.chmod(0o600)
        blob.write_bytes(bytes(blob.stat().st_size))
        (tmp_path / "list").write_text(wanted)
        result = run_setup(node, request)
        assert (result.how, result.mode) == ("restored", "mount")
        assert differences(original, describe(target)) == []
    finally:
        sweep(tmp_path, node)


@pytest.mark.parametrize("mode", ["extract", "link"])
def test_a_grown_environment_in_each_mode(tmp_path: Path, make_node: MakeNode, mode: str) -> None:
    if mode != "extract":
        require("root", "fuse")
    request, target, first, second = _grown(tmp_path, make_node("a"))
    assert second.targets[0].earlier == (first.targets[0].blob,)
    assert second.stored_bytes < 100_000 < 3_000_000 < second.whole_bytes
    original = describe(target)
    node = replace(make_node("b"), restore_mode=mode)
    try:
        shutil.rmtree(target)
        result = run_setup(node, request)
        assert result.how == "restored"
        assert result.moved_bytes <= second.whole_bytes
        assert differences(original, describe(target)) == []
    finally:
        sweep(tmp_path, node)


def test_another_environment_is_stored_whole(tmp_path: Path, make_node: MakeNode) -> None:
    """The environment has the same path and kind, but most of it is new."""
    node = make_node("a")
    request, target = _request(tmp_path)
    run_setup(node, request)
    shutil.rmtree(target)
    _add(tmp_path, "second", 4_000_000)
    manifest = _load(node, run_setup(node, request).fingerprint)
    assert not manifest.is_layered
    assert json.loads(encode(manifest))["version"] == 1


def test_a_collector_keeps_what_a_kept_snapshot_needs(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    request, target, first, second = _grown(tmp_path, node)
    original = describe(target)
    (earlier,) = second.targets[0].earlier
    rules = Rules(grace_s=0)
    with open_store(node.store_url) as store:
        for info in list(store.list("used/")):
            store.delete(info.path)
        store.delete(catalogue.manifest_key(first.fingerprint))
        _collect(store, rules)
        assert store.exists(blob_key(earlier.digest))
        assert Verifier(store).check(second.fingerprint).problems == ()
    shutil.rmtree(target)
    assert run_setup(make_node("b"), request).how == "restored"
    assert differences(original, describe(target)) == []
    with open_store(node.store_url) as store:
        for info in list(store.list("used/")):
            store.delete(info.path)
        store.delete(catalogue.manifest_key(second.fingerprint))
        _collect(store, rules)
        assert list(store.list("blobs/")) == []


def _collect(store: Store, rules: Rules) -> None:
    inventory = take_inventory(store, FORMATS)
    plan = make_plan(inventory, rules)
    collect(store, inventory, plan, rules, owner="gc")


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_without_its_base_a_snapshot_is_made_anew(
    tmp_path: Path, make_node: MakeNode, damage: str
) -> None:
    request, target, _, second = _grown(tmp_path, make_node("a"))
    original = describe(target)
    (earlier,) = second.targets[0].earlier
    blob = tmp_path / "store" / blob_key(earlier.digest)
    blob.chmod(0o600)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 0xFF
    if damage == "gone":
        blob.unlink()
    else:
        blob.write_bytes(data)
    with open_store(make_node("a").store_url) as store:
        assert Verifier(store).check(second.fingerprint).problems
    shutil.rmtree(target)
    said: list[str] = []
    result = run_setup(make_node("b"), request, report=said.append)
    assert (result.how, result.fingerprint) == ("captured", second.fingerprint), said
    assert len([sentence for sentence in said if "to replace the snapshot" in sentence]) == 1
    assert not _load(make_node("b"), second.fingerprint).is_layered
    shutil.rmtree(target)
    assert run_setup(make_node("c"), request).how == "restored"
    assert set(describe(target)) == set(original)


def test_the_same_environment_in_another_folder_shares_its_content(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """Regression: each folder with the same requirements was stored in full."""
    request, target = _request(tmp_path)
    first = run_setup(make_node("a"), request)
    other = tmp_path / "other"
    (script,) = (word for word in request.command if "mkdir" in word)
    command = ["sh", "-ec", script.replace(str(target), str(other)), str(tmp_path / "list")]
    second = run_setup(make_node("a"), replace(request, command=command, targets=[str(other)]))
    assert second.moved_bytes < 100_000 < first.moved_bytes
    original = describe(other)
    shutil.rmtree(other)
    result = run_setup(make_node("b"), replace(request, command=command, targets=[str(other)]))
    assert result.how == "restored"
    assert not differences(original, describe(other))


def _edited(manifest: Manifest, **changes: object) -> bytes:
    document = json.loads(encode(manifest))
    document["targets"][0] |= changes
    document["digest"] = members_digest(document, "digest")
    return json.dumps(document).encode()


def test_hostile_manifests_are_refused(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    _, _, first, second = _grown(tmp_path, node)
    one = {"digest": first.targets[0].blob.digest, "size_bytes": 5}
    own = {"digest": second.targets[0].blob.digest, "size_bytes": 5}
    many = [{"digest": f"sha256:{number:064x}", "size_bytes": 5} for number in range(8)]
    for earlier in ([own], [one, one], many, one, [None], [{**one, "digest": "sha256:../x"}]):
        with pytest.raises(CorruptError):
            decode(_edited(second, earlier=earlier))
    with open_store(node.store_url) as store:
        for earlier in ([], many[:1], [one]):
            target = decode(_edited(second, earlier=earlier)).targets[0]
            with pytest.raises(CorruptError, match="belongs to other blobs"):
                catalogue.load_tree(store, target)
        store.delete(blob_key(first.targets[0].blob.digest))
        target = second.targets[0]
        with pytest.raises(NotFoundError):
            fetch_tree(store, target, catalogue.load_tree(store, target), tmp_path / "x", 5)
    assert not (tmp_path / "x").exists()


def test_a_base_that_is_collected_meanwhile(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base goes between its choice and the publication: the new snapshot is then stored
    whole."""
    node = make_node("a")
    request, target = _request(tmp_path)
    first = _load(node, run_setup(node, request).fingerprint)
    shutil.rmtree(target)
    _add(tmp_path, "second", 50_000)
    publish = catalogue.publish

    def collected_first(store: Store, manifest: Manifest, *, replace: bool = False) -> bool:
        store.delete(blob_key(first.targets[0].blob.digest))
        return publish(store, manifest, replace=replace)

    monkeypatch.setattr(catalogue, "publish", collected_first)
    manifest = _load(node, run_setup(node, request).fingerprint)
    assert not manifest.is_layered
    with open_store(node.store_url) as store:
        assert Verifier(store).check(manifest.fingerprint).problems == ()
