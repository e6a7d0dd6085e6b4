import os
from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError
from bootseer.snapshots.scan import base_digest, scan
from testbed.trees import describe, make_zoo


def test_a_scan_sees_every_name(tmp_path: Path) -> None:
    make_zoo(tmp_path / "zoo")
    found = scan(tmp_path / "zoo")
    assert {os.fsdecode(path) for path in found} == describe(tmp_path / "zoo").keys()


def test_missing_and_not_a_directory(tmp_path: Path) -> None:
    assert scan(tmp_path / "missing") == {}
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match="not a directory"):
        scan(tmp_path / "file")


def test_work_of_restores_is_not_part_of_a_tree(tmp_path: Path) -> None:
    (tmp_path / ".bootseer-0123").mkdir()
    (tmp_path / ".bootseer-0123/x").write_text("x")
    assert list(scan(tmp_path)) == [b""]


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/loop").symlink_to("..")
    assert set(scan(tmp_path)) == {b"", b"a", b"a/loop"}


def test_a_base_is_the_same_on_every_node(tmp_path: Path) -> None:
    for node in ("one", "two"):
        (tmp_path / node / "pkg").mkdir(parents=True)
        (tmp_path / node / "pkg/a.py").write_text("x = 1\n")
    (tmp_path / "two/pkg/__pycache__").mkdir()
    (tmp_path / "two/pkg/__pycache__/a.cpython-311.pyc").write_text("whatever")
    one, two = scan(tmp_path / "one"), scan(tmp_path / "two")
    assert base_digest(one) == base_digest(two) != "nothing"
    (tmp_path / "two/pkg/b.py").touch()
    assert base_digest(scan(tmp_path / "two")) != base_digest(one)
    (tmp_path / "empty").mkdir()
    assert base_digest(scan(tmp_path / "empty")) == base_digest({}) == "nothing"
