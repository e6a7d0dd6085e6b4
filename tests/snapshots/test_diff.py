"""Comparison of two snapshots, or of a snapshot and a folder, with damaged snapshots, too."""

import os
import shutil
from pathlib import Path

import pytest

from bootseer.blob.keys import blob_key, index_key
from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.catalogue import Verifier
from bootseer.snapshots.diff import ViewDifferences, compare, disk_view, snapshot_view
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.manifest import Manifest
from bootseer.store import open_store
from tests.snapshots.conftest import MakeNode


def _write(env: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = env / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _compare(
    settings: Settings, one: Manifest, other: Manifest | None, *disk: Path
) -> ViewDifferences:
    with open_store(settings.store_url) as store:
        before = snapshot_view(store, one)
        after = snapshot_view(store, other) if other else disk_view(one, *disk)
    return compare(before, after)


def _said(comparison: ViewDifferences, env: Path) -> list[tuple[str, ...]]:
    skip = len(os.fsencode(env)) + 1
    return [(change.kind, change.path[skip:].decode(), *change.what) for change in comparison.files]


def test_packages_are_told_by_names(tmp_path: Path, make_node: MakeNode) -> None:
    node, env = make_node("a"), tmp_path / "env"
    env.mkdir()
    before = create_snapshot(node, [str(env)], "before")
    folders = (
        *("lib/site-packages/Foo_Bar-1.2.post1.dist-info", "src/thing.egg-info", ".dist-info"),
        "lib/x/zope.interface-5.4-py3.11.egg-info",
    )
    files = ("libgcc-ng-13.1.0-h2_0.json", "history.json")
    others = ("env/conda-meta/_x86-64-1-1.json", "lib/other/a-1-1.json", "lib/b-1.dist-info")
    _write(env, dict.fromkeys((*(f"{name}/RECORD" for name in folders), *others), "x"))
    _write(env, {f"conda-meta/{name}": "x" for name in files})
    changes = _compare(node, before, create_snapshot(node, [str(env)], "after")).packages
    assert {(one.package.kind, one.package.name, one.after) for one in changes} == {
        ("python", "foo-bar", "1.2.post1"),
        ("python", "zope-interface", "5.4"),
        ("conda", "libgcc-ng", "13.1.0"),
        ("conda", "_x86-64", "1"),
    }
    assert {one.before for one in changes} == {None}


def test_what_differs_between_two_snapshots_and_from_the_disk(
    tmp_path: Path, make_node: MakeNode
) -> None:
    node, env = make_node("a"), tmp_path / "env"
    _write(
        env,
        {
            "same": "1",
            "content": "1",
            "mode": "1",
            "gone": "123",
            "kind": "1",
            "alpha-1.0.dist-info/METADATA": "x",
            "beta-1.0.dist-info/METADATA": "x",
        },
    )
    (env / "link").symlink_to("same")
    first = create_snapshot(node, [str(env)], "first")
    assert _compare(node, first, first).is_equal
    assert _compare(node, first, None).is_equal
    # The same size, so only the content differs. Another time alone is no difference.
    _write(env, {"content": "2", "new": "12345"})
    os.utime(env / "same", (1, 1))
    (env / "mode").chmod(0o700)
    (env / "gone").unlink()
    (env / "kind").unlink()
    (env / "kind").mkdir()
    (env / "link").unlink()
    (env / "link").symlink_to("content")
    (env / "alpha-1.0.dist-info").rename(env / "alpha-2.0.dist-info")
    shutil.rmtree(env / "beta-1.0.dist-info")
    expected = [
        ("removed", "alpha-1.0.dist-info"),
        ("removed", "alpha-1.0.dist-info/METADATA"),
        ("added", "alpha-2.0.dist-info"),
        ("added", "alpha-2.0.dist-info/METADATA"),
        ("removed", "beta-1.0.dist-info"),
        ("removed", "beta-1.0.dist-info/METADATA"),
        ("changed", "content", "content"),
        ("removed", "gone"),
        ("changed", "kind", "kind"),
        ("changed", "link", "target"),
        ("changed", "mode", "mode"),
        ("added", "new"),
    ]
    second = create_snapshot(node, [str(env)])
    for other, disk in ((second, ()), (None, ()), (None, (env,))):
        comparison = _compare(node, first, other, *disk)
        assert _said(comparison, env) == expected
        assert [(one.package.name, one.before, one.after) for one in comparison.packages] == [
            ("alpha", "1.0", "2.0"),
            ("beta", "1.0", None),
        ]
    shutil.rmtree(env)
    with pytest.raises(NotFoundError, match="restore"):
        _compare(node, first, None)


def test_a_difference_says_nothing_of_what_was_there_before(
    tmp_path: Path, make_node: MakeNode
) -> None:
    node, env = make_node("a"), tmp_path / "env"
    _write(env, {"before": "1", "old-1.dist-info/x": "", "removed": ""})
    script = f"rm {env}/removed; echo new > {env}/new; mkdir {env}/old-2.dist-info"
    result = run_setup(node, SetupRequest(command=["sh", "-c", script], targets=[str(env)]))
    with open_store(node.store_url) as store:
        manifest = catalogue.find(store, result.fingerprint)
    assert _compare(node, manifest, None).files == ()
    (env / "new").write_text("other")
    (env / "removed").write_text("again")
    assert _said(_compare(node, manifest, None), env) == [
        ("changed", "new", "content"),
        ("changed", "removed", "deletion"),
    ]


def test_two_directories_are_not_compared_with_one(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    for name in "ab":
        (tmp_path / name).mkdir()
    both = create_snapshot(node, [str(tmp_path / "a"), str(tmp_path / "b")])
    assert _compare(node, both, None).is_equal
    with pytest.raises(InvalidInputError, match="2 directories"):
        _compare(node, both, None, tmp_path / "a")


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "index gone", "manifest"])
def test_verify_names_what_is_damaged(tmp_path: Path, make_node: MakeNode, damage: str) -> None:
    node, env = make_node("a"), tmp_path / "env"
    _write(env, {"file": "content" * 1000})
    damaged = create_snapshot(node, [str(env)], "damaged")
    _write(env, {"file": "other"})
    whole = create_snapshot(node, [str(env)], "whole")
    folder = tmp_path / "store"
    (target,) = damaged.targets
    blob = folder / blob_key(target.blob.digest)
    data = bytearray(blob.read_bytes())
    if damage == "cut":
        blob.write_bytes(data[:-1])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
    elif damage == "gone":
        blob.unlink()
    elif damage == "index gone":
        (folder / index_key(target.index.digest)).unlink()
    else:
        (folder / catalogue.manifest_key(damaged.fingerprint)).write_text("{")
    with open_store(node.store_url) as store:
        for quick in (False, True):
            verifier = Verifier(store, quick=quick)
            assert verifier.check(whole.fingerprint).problems == ()
            found = verifier.check(damaged.fingerprint)
            # A flipped bit is found by reading only.
            assert len(found.problems) == (0 if quick and damage == "flip" else 1)
            assert Verifier(store).check("0" * 64).problems == ("it is gone",)
