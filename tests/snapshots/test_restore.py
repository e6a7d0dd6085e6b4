"""Capture and restore of whole directories and of differences, on real trees."""

import hashlib
import inspect
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from bootseer.base.documents import members_digest
from bootseer.blob.keys import blob_key
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnknownFormatError,
)
from bootseer.linux.removal import remove_tree
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.restore import restore_snapshot
from bootseer.store import open_store
from testbed.trees import describe, differences, make_zoo
from tests.snapshots.conftest import MakeNode


def _blob(settings: Settings, key: str) -> Path:
    with open_store(settings.store_url) as store:
        manifest = catalogue.find(store, key)
    return Path(settings.store_url.removeprefix("file://")) / blob_key(
        manifest.targets[0].blob.digest
    )


def _leftovers(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob(".bootseer-*")] + [
        str(path) for path in folder.rglob("*extracting*")
    ]


def test_a_zoo_comes_back_exactly(tmp_path: Path, make_node: MakeNode) -> None:
    zoo = tmp_path / "work/zoo"
    make_zoo(zoo)
    original = describe(zoo)
    manifest = create_snapshot(make_node("a"), [str(zoo)], "zoo")
    zoo.rename(tmp_path / "zoo.original")
    restored = restore_snapshot(make_node("b"), "zoo")
    assert restored == manifest
    assert differences(original, describe(zoo)) == []
    assert _leftovers(tmp_path / "work") == []
    assert manifest.file_count == len(original) - 1


def test_an_empty_directory_is_replaced_and_a_full_one_refused(
    tmp_path: Path, make_node: MakeNode
) -> None:
    target = tmp_path / "t"
    target.mkdir()
    (target / "file").write_text("x")
    key = create_snapshot(make_node("a"), [str(target)]).fingerprint
    (target / "file").write_text("mine")
    with pytest.raises(AlreadyExistsError, match="not empty"):
        restore_snapshot(make_node("b"), key)
    assert (target / "file").read_text() == "mine"
    (target / "file").unlink()
    restore_snapshot(make_node("b"), key[:8])
    assert (target / "file").read_text() == "x"


def test_several_targets_and_a_link_on_the_way(tmp_path: Path, make_node: MakeNode) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    one, two = tmp_path / "alias/one", tmp_path / "two"
    for target in (one, two):
        target.mkdir()
        (target / "file").write_text(target.name)
    create_snapshot(make_node("a"), [str(one), str(two)], "both")
    shutil.rmtree(one)
    shutil.rmtree(two)
    restore_snapshot(make_node("b"), "both")
    assert (tmp_path / "real/one/file").read_text() == "one"
    assert (two / "file").read_text() == "two"


_CHANGES = """
cd {target}
rm removed.txt
rm -r gone
echo more >> grown.txt
chmod 700 script
rm swapped-file && mkdir swapped-file && echo in > swapped-file/x
rm -r swapped-dir && echo file > swapped-dir
mkdir -p new/deep && echo new > new/deep/x && ln new/deep/x lib/linked && ln -s deep new/link
echo added > lib/sub/added
ln kept-a kept-b
mv lib/old-name lib/new-name
chmod 750 lib
touch -d '2001-02-03 04:05:06.789' lib/sub
"""


def _base(target: Path) -> None:
    for folder in ("gone/a/b", "swapped-dir", "lib/sub"):
        (target / folder).mkdir(parents=True)
    for name in ("removed.txt", "grown.txt", "script", "swapped-file", "kept-a", "untouched"):
        (target / name).write_text(name)
    for name in ("gone/a/b/c", "swapped-dir/y", "lib/sub/z", "lib/old-name"):
        (target / name).write_text(name)
    for path in sorted(target.rglob("*"), reverse=True):
        os.utime(path, ns=(10**18, 10**18 + 123456789))
    os.utime(target, ns=(10**18, 10**18 + 123456789))


def test_a_difference_comes_back_exactly(tmp_path: Path, make_node: MakeNode) -> None:
    target = tmp_path / "prefix"
    request = SetupRequest(
        command=["sh", "-e", "-c", _CHANGES.format(target=target)], targets=[str(target)]
    )
    _base(target)
    assert run_setup(make_node("a"), request).how == "captured"
    original = describe(target)
    shutil.rmtree(target)
    _base(target)
    # Bytecode that this node compiled in a directory that the set-up removes.
    (target / "gone/a/__pycache__").mkdir()
    (target / "gone/a/__pycache__/c.pyc").write_text("bytecode")
    result = run_setup(make_node("b"), request)
    assert result.how == "restored"
    assert differences(original, describe(target)) == []
    assert _leftovers(tmp_path) == []
    assert run_setup(make_node("b"), request).how == "in place"


def test_a_difference_far_below(tmp_path: Path, make_node: MakeNode) -> None:
    """Regression: existing directories were walked by recursion."""
    target = tmp_path / "prefix"
    bottom = target.joinpath(*["d"] * 250)
    request = SetupRequest(command=["touch", f"{bottom}/new"], targets=[str(target)])
    bottom.mkdir(parents=True)
    limit = sys.getrecursionlimit()
    # Instead of a tree four times as deep, which takes a quarter of a minute.
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        assert run_setup(make_node("a"), request).how == "captured"
        (bottom / "new").unlink()
        assert run_setup(make_node("b"), request).how == "restored"
    finally:
        sys.setrecursionlimit(limit)
    assert (bottom / "new").exists()
    remove_tree(target)


def test_a_difference_is_not_put_on_another_base(tmp_path: Path, make_node: MakeNode) -> None:
    target = tmp_path / "prefix"
    request = SetupRequest(command=["touch", str(target / "new")], targets=[str(target)])
    _base(target)
    first = run_setup(make_node("a"), request)
    shutil.rmtree(target)
    _base(target)
    (target / "surprise").write_text("x")
    with pytest.raises(AlreadyExistsError, match="as it was before"):
        restore_snapshot(make_node("b"), first.fingerprint)
    assert not (target / "new").exists()
    assert run_setup(make_node("b"), request).how == "captured"


def test_only_plain_trees_go_elsewhere(tmp_path: Path, make_node: MakeNode) -> None:
    plain, env = tmp_path / "plain", tmp_path / "env"
    make_zoo(plain)
    env.mkdir()
    (env / "pyvenv.cfg").write_text("home = /usr/bin\n")
    node = make_node("a")
    create_snapshot(node, [str(plain)], "plain")
    create_snapshot(node, [str(env)], "env")
    restore_snapshot(node, "plain", tmp_path / "elsewhere")
    assert differences(describe(plain), describe(tmp_path / "elsewhere")) == []
    with pytest.raises(AlreadyExistsError):
        restore_snapshot(node, "plain", tmp_path / "elsewhere")
    with pytest.raises(InvalidInputError, match="without --to"):
        restore_snapshot(node, "env", tmp_path / "other")


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_blob_changes_nothing(tmp_path: Path, make_node: MakeNode, damage: str) -> None:
    target = tmp_path / "work/t"
    make_zoo(target)
    node = make_node("a")
    key = create_snapshot(node, [str(target)]).fingerprint
    shutil.rmtree(target)
    blob = _blob(node, key)
    data = bytearray(blob.read_bytes())
    blob.chmod(0o600)
    if damage == "flip":
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
    elif damage == "cut":
        blob.write_bytes(data[: len(data) // 2])
    else:
        blob.unlink()
    with pytest.raises((CorruptError, NotFoundError)):
        restore_snapshot(make_node("b"), key)
    assert list((tmp_path / "work").iterdir()) == []


def test_damaged_and_foreign_manifests(tmp_path: Path, make_node: MakeNode) -> None:
    target = tmp_path / "t"
    target.mkdir()
    node = make_node("a")
    key = create_snapshot(node, [str(target)]).fingerprint
    file = tmp_path / "store" / catalogue.manifest_key(key)
    document = json.loads(file.read_text())
    file.chmod(0o600)
    del document["digest"]
    file.write_text(json.dumps({**document, "version": 99}))
    with pytest.raises(UnknownFormatError):
        restore_snapshot(node, key)
    file.write_text(file.read_text()[:100])
    with pytest.raises(CorruptError):
        restore_snapshot(node, key)
    with open_store(node.store_url) as store:
        assert list(catalogue.list_all(store)) == []


def test_an_index_of_another_blob_is_refused(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    documents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
        key = create_snapshot(node, [str(tmp_path / name)]).fingerprint
        file = tmp_path / "store" / catalogue.manifest_key(key)
        documents.append((key, file, json.loads(file.read_text())))
    key, file, document = documents[0]
    document["targets"][0]["index"] = documents[1][2]["targets"][0]["index"]
    document["digest"] = members_digest(document, "digest")
    file.chmod(0o600)
    file.write_text(json.dumps(document))
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(CorruptError, match="other blobs"):
        restore_snapshot(node, key)


def test_names_and_prefixes(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    (tmp_path / "t").mkdir()
    key = create_snapshot(node, [str(tmp_path / "t")], "t-1").fingerprint
    with open_store(node.store_url) as store:
        assert catalogue.find(store, "t-1").fingerprint == key
        assert catalogue.find(store, key[:4]).fingerprint == key
        for text in ("t-2", "abcd" if not key.startswith("abcd") else "dcba", "0" * 64):
            with pytest.raises(NotFoundError):
                catalogue.find(store, text)
        with pytest.raises(InvalidInputError):
            catalogue.find(store, "../x")
    with pytest.raises(InvalidInputError):
        create_snapshot(node, [str(tmp_path / "t")], "../t")
    with pytest.raises(NotFoundError):
        create_snapshot(node, [str(tmp_path / "missing")])


@pytest.mark.needs("root")
def test_somebody_elses_working_directory_is_not_trusted(
    tmp_path: Path, make_node: MakeNode
) -> None:
    target = tmp_path / "t"
    make_zoo(target)
    key = create_snapshot(make_node("a"), [str(target)]).fingerprint
    shutil.rmtree(target)
    trap = tmp_path / f".bootseer-{hashlib.sha256(b't').hexdigest()[:16]}"
    trap.mkdir(mode=0o700)
    os.chown(trap, 4711, 4711)
    with pytest.raises(PermissionDeniedError, match="somebody else"):
        restore_snapshot(make_node("b"), key)
    assert trap.exists()
    assert not target.exists()


def test_a_target_that_cannot_be_written(tmp_path: Path, make_node: MakeNode) -> None:
    """/proc is read-only even for root."""
    target = tmp_path / "t"
    target.mkdir()
    key = create_snapshot(make_node("a"), [str(target)]).fingerprint
    target.rmdir()
    target.symlink_to("/proc/sys/bootseer-test/t")
    with pytest.raises(BootseerError):
        restore_snapshot(make_node("b"), key)
