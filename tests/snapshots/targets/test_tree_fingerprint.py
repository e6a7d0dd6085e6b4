"""What a restore records of what it makes is what a scan of it finds."""

import stat
from pathlib import Path

import pytest

from bootseer.blob.build import build_tree
from bootseer.blob.extract.extraction import extract
from bootseer.blob.tree import Inode
from bootseer.snapshots.restoring.linking.hard_links import link_tree
from bootseer.snapshots.restoring.linking.node_trees import NodeTrees
from bootseer.snapshots.targets.scan import scan
from bootseer.snapshots.targets.tree_fingerprint import (
    fingerprint_of_restored,
    fingerprint_of_scan,
    names_to_record,
)
from tests.bootseer.blob.trees import make_zoo, packed, reader_of
from tests.snapshots.conftest import MakeNode


def _zoo(top: Path) -> Path:
    make_zoo(top / "zoo")
    cache = top / "zoo/package/__pycache__"
    cache.mkdir(parents=True)
    (cache / "module.cpython-311.pyc").write_bytes(b"bytecode")
    (cache / "other").write_bytes(b"x")
    return top / "zoo"


@pytest.mark.parametrize("processes", [1, 2])
def test_an_extraction_knows_what_a_scan_would_find(tmp_path: Path, processes: int) -> None:
    tree, blob = packed(_zoo(tmp_path))
    recorded = names_to_record(tree)
    assert 0 < sum(recorded) < tree.name_count
    target = tmp_path / "out"
    result = extract(
        tree,
        reader_of(blob),
        target,
        processes=processes,
        allow_devices=True,
        recorded=recorded,
    )
    known = fingerprint_of_restored(tree, recorded, result.records)
    assert known == fingerprint_of_scan(scan(target))
    (target / "package/__pycache__/module.cpython-311.pyc").write_bytes(b"newer bytecode")
    assert known == fingerprint_of_scan(scan(target))
    (target / "package/__pycache__/other").touch()
    assert known != fingerprint_of_scan(scan(target))


def test_hard_links_know_what_a_scan_would_find(tmp_path: Path, make_node: MakeNode) -> None:
    tree, blob = packed(_zoo(tmp_path))
    node = make_node("a")
    target = tmp_path / "out"

    def build(path: Path) -> None:
        extract(tree, reader_of(blob), path, allow_devices=True)

    known = link_tree(NodeTrees(node), "sha256:" + "0" * 64, tree, build, target)
    assert known == fingerprint_of_scan(scan(target))
    mode = stat.S_IMODE((target / "package").stat().st_mode)
    (target / "package").chmod(mode ^ stat.S_IROTH)
    assert known != fingerprint_of_scan(scan(target))


def test_a_name_that_scans_leave_out_is_not_recorded() -> None:
    inodes = [Inode(stat.S_IFDIR | 0o755), Inode(stat.S_IFDIR | 0o755), Inode(stat.S_IFREG | 0o644)]
    tree = build_tree([(b"a", 1), (b"a/.bootseer-0123", 2)], inodes, ())
    assert names_to_record(tree) == b""
    assert fingerprint_of_restored(tree, b"", bytearray()) == ""
